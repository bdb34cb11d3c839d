"""A cache of transformers as a text of plain data and a list of tensors, and the cache from these."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from aotc.tensors.caches import find_cache, is_cache

_SIZES = {"batch_size": 0, "num_heads": 1, "max_cache_len": -2, "k_head_dim": -1}
"""Numbers of a layer that are sizes of its keys, by axis: calls that differ in them alone are of one kind."""


is_cache_class: Callable[[Any], bool] = functools.cache(is_cache)
"""As `aotc.tensors.caches.is_cache`, for each argument of each call."""


def is_apart(value: Any) -> bool:
    """Whether `apart` has given it."""
    return isinstance(value, Mapping) and value.keys() == {"structure", "tensors"}


def class_name(structure: Any) -> str:
    """The class of a cache by its structure, as `StaticCache`; "" of any other value."""
    found = re.match(r'\["cache", "([\w.]+)"', structure) if isinstance(structure, str) else None
    return found[1].rpartition(".")[2] if found else ""


def apart(cache: Any) -> dict[str, Any]:
    """A cache as a `structure` and `tensors`. Raises TypeError where a call with it is not one of plain data."""
    looked = _key_of(cache)
    if looked is not None and (known := _texts.get(looked[0])) is not None:
        return {"structure": known, "tensors": looked[1]}
    tensors: list[Tensor] = []
    text = json.dumps(_structure(cache, tensors))
    if looked is not None:
        if len(_texts) >= MOST_TEXTS:
            _texts.clear()
        _texts[looked[0]] = text
    return {"structure": text, "tensors": tensors}


MOST_TEXTS = 1024
_texts: dict[Hashable, str] = {}
"""The structures that were written, by what they depend on: to write one takes a millisecond for 32 layers."""


def _key_of(cache: Any) -> tuple[Hashable, list[Tensor]] | None:
    """What a cache's structure depends on, and its tensors; None of one that is more than a list of plain layers."""
    layers = vars(cache).get("layers")
    tensors: list[Tensor] = []
    key: list[Any] = []
    for holder in (cache, *layers) if type(layers) is list else ():
        members = vars(holder)
        key += (type(holder), *members)
        for value in members.values():
            if isinstance(value, Tensor):
                tensors.append(value)
                key.append(value.shape)
            elif value is not layers:
                key += (type(value), value)  # True equals 1
    try:
        found: Hashable = tuple(key)
        hash(found)
    except TypeError:  # of a list, or of sizes that are not known while a module is captured
        return None
    return (found, tensors) if key and not any(isinstance(each, Tensor) for each in vars(cache).values()) else None


def _structure(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return ("tensor",)
    if value is None or type(value) in (int, str):
        return value
    if type(value) in (bool, float):  # which may equal an int
        return (type(value).__name__, value)
    if type(value) is list:
        return ("list", *(_structure(item, tensors) for item in value))
    if isinstance(value, torch.dtype):
        return ("dtype", str(value).removeprefix("torch."))
    if isinstance(value, torch.device):
        return ("device", value.type)
    if isinstance(value, type) and is_cache_class(value):
        return ("class", f"{value.__module__}.{value.__qualname__}")
    if not is_cache_class(type(value)):
        raise TypeError(f"a cache holds {type(value).__name__}, which is neither a tensor nor a plain value")
    members, cls = vars(value), type(value)
    name = f"{cls.__module__}.{cls.__qualname__}"
    if not name.startswith("transformers.") or find_cache(name) is not cls:
        raise TypeError(
            f"the class {cls.__qualname__} of the cache is none of transformers, and a build does not know it"
        )
    if any(each.startswith("cumulative_length") and type(item) is int for each, item in members.items()):
        told = (
            "; `generate(cache=DynamicCache())` keeps all tokens, and is compiled" if "Sliding" in cls.__name__ else ""
        )
        raise TypeError(f"a {cls.__name__} counts its tokens in a Python number, which code would have built in{told}")
    keys = members.get("keys")
    items = [
        (member, ("size", axis) if _is_size(item, keys, axis) else _structure(item, tensors))
        for member, item in members.items()
        for axis in (_SIZES.get(member),)
    ]
    return ("cache", name, *items)


class _Size(NamedTuple):
    axis: int


def _is_size(value: Any, keys: Any, axis: int | None) -> bool:
    return axis is not None and isinstance(keys, Tensor) and keys.dim() == 4 and bool(keys.shape[axis] == value)


def together(structure: Any, tensors: Iterator[Any], held: Any = None) -> Any:
    """What `apart` has taken apart; of a cache, `held` is the object that becomes it. Raises LookupError, TypeError."""
    if not isinstance(structure, list):
        return structure
    kind, *items = structure
    match kind:
        case "bool" | "float":
            return items[0]
        case "tensor":
            return next(tensors)
        case "list":
            before = held if isinstance(held, list) and len(held) == len(items) else [None] * len(items)
            return [together(item, tensors, each) for item, each in zip(items, before, strict=True)]
        case "dtype":
            if not isinstance(dtype := vars(torch).get(items[0]), torch.dtype):
                raise TypeError(f"{items[0]!r} is not a dtype")
            return dtype
        case "device":
            return torch.device(items[0])
        case "class":
            return _class(items[0])
        case "size":
            return _Size(items[0])
        case "cache":
            cls = _class(items[0])
            made = held if type(held) is cls else object.__new__(cls)
            members = vars(made)
            found = {name: together(item, tensors, members.get(name)) for name, item in items[1:]}
            keys = found.get("keys")
            sizes = {
                name: cast("Tensor", keys).shape[item.axis] for name, item in found.items() if isinstance(item, _Size)
            }
            members.update(found | sizes)
            if isinstance(keys, Tensor) and "device" in found:
                members["device"] = keys.device  # with its number
            return made
    raise TypeError(f"{kind!r} is not a part of a cache")


def _class(name: str) -> type:
    """Of a module that is imported already. Raises LookupError."""
    if (found := find_cache(name)) is None:
        raise LookupError(f"no class of caches is called {name}")
    return found
