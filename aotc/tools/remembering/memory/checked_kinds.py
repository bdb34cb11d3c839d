"""What a store remembers, checked before any of it is used: a store's content is data, and any process may write it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from aotc.records import TUPLE

if TYPE_CHECKING:
    from aotc.tools.remembering.memory.memory import Kind


def _is_dtype(name: Any) -> bool:
    return isinstance(name, str) and isinstance(vars(torch).get(name), torch.dtype)


_MODES: dict[str, Callable[[Any], bool]] = {
    "autocast": _is_dtype,
    "float32_matmul_precision": ("high", "medium").__contains__,
}


def check_kind(kind: Kind) -> None:
    """Raises ValueError where a name or a value is none that a recorded call can have."""
    for name, mode in kind.ambient.items():
        if name not in _MODES or not _MODES[name](mode):
            raise ValueError(f"{mode!r} is not a value of a mode called {name!r}")
    if not 0 <= kind.built <= len(kind.calls) > 0:
        raise ValueError(f"{kind.built} of {len(kind.calls)} calls have code")
    for pattern in kind.regions:
        if re.fullmatch(r"[\w.*]+", pattern) is None:
            raise ValueError(f"{pattern!r} is not a pattern of submodules")
    for name in kind.counters:
        if re.fullmatch(r"[\w.]+", name) is None or name.rpartition(".")[2].startswith("_"):
            raise ValueError(f"{name!r} is not a name of a counter")
    if kind.pushed and re.fullmatch(r"sha256:[0-9a-f]{64}", kind.pushed) is None:
        raise ValueError(f"{kind.pushed!r} is not a digest")
    for call in kind.calls:
        for name, value in call.items():
            if not name.isidentifier():
                raise ValueError(f"{name!r} is not a name of an argument")
            _check_value(value)


def _check_value(value: Any) -> None:
    if isinstance(value, Mapping) and "shape" in value:
        for key, item in value.items():
            if key not in _FIELDS or not _FIELDS[key](item):
                raise ValueError(f"{item!r} is not a {key!r} of a tensor")
        if "dtype" not in value:
            raise ValueError("a tensor has no dtype")
    elif isinstance(value, Mapping) and value.keys() != {TUPLE}:
        if "dtype" in value or "init" in value:
            raise ValueError("a tensor has no shape")
        for item in value.values():
            _check_value(item)
    elif isinstance(value, Mapping | list):
        items = value[TUPLE] if isinstance(value, Mapping) else value
        if not isinstance(items, list):
            raise ValueError(f"{items!r} are not the items of a tuple")
        for item in items:
            _check_value(item)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "shape": lambda value: isinstance(value, list) and all(map(_is_size, value)),
    "dtype": _is_dtype,
    "low": lambda value: type(value) is int,
    "high": lambda value: type(value) is int,
    "layout": ("channels_last", "channels_last_3d").__contains__,
    "requires_grad": lambda value: value is True,
    "is_sequence": lambda value: value is True,
}
