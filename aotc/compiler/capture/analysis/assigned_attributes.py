"""Public attributes that forward sets, so that their values at a load may differ from those at build.

Examples: the weight that an old weight norm computes at each call; a mask or anchors that the first call makes, and the
size that they are for. torch.export does not see these assignments, and a load compares attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aotc.compiler.capture.checks.hidden_state import TRIED
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.digest import sha256_json
from aotc.models.calls import call_model
from aotc.reads.attributes import module_attributes
from aotc.records import Signature
from aotc.tensors.rounding import Result, is_repeated

Name = tuple[str, str]
"""A submodule's path, and its attribute."""


class Assigned(NamedTuple):
    """first: attributes that forward sets before it reads them.
    left: digests of the plain values that a call leaves in the other attributes that it sets."""

    first: Collection[str] = ()
    left: Mapping[str, str] = MappingProxyType({})


def assigned_attributes(
    module: nn.Module,
    signature: Signature,
    written: Collection[str],
    kept: KeptObjects,
    leaves: Sequence[Any],
    result: Result,
) -> Assigned:
    """Find the attributes by calling the model, whose first call gave `result`. Afterwards `kept` is restored."""
    if not kept.has_changed:
        return Assigned()
    before, after = _attributes(module), dict[Name, Any]()
    values: dict[str, dict[str, Any]] = {}

    def look() -> None:
        after.update(_attributes(module))
        values.update(module_attributes(module))

    def gives_the_same(stand_ins: Iterable[tuple[Name, Any]]) -> bool:
        kept.put_back()
        for (path, name), value in stand_ins:
            vars(module.get_submodule(path))[name] = value
        try:
            again = call_model(module, signature, written, leaves, look)
        except Exception:  # whatever the model raises at such a value
            return False
        finally:
            kept.put_back()
        return is_repeated(result, again)

    if not gives_the_same(()):
        return Assigned()
    changed = {name: value for name, value in after.items() if before.get(name, _ABSENT) is not value}
    plain = {(path, name): values[path][name] for path, name in changed if name in values.get(path, {})}

    def are_first(names: Collection[Name]) -> bool:
        others = [(name, _another(changed[name])) for name in names]
        return gives_the_same([(name, object()) for name in names]) and gives_the_same(others)

    names = [name for name in changed if name in plain]
    if not names:
        return Assigned()
    first = {*names} if are_first(names) else {name for name in names[:TRIED] if are_first([name])}
    left = {_joined(name): sha256_json(plain[name]) for name in names if name not in first}
    return Assigned(sorted(map(_joined, first)), left)


_ABSENT = object()


def _attributes(module: nn.Module) -> dict[Name, Any]:
    """All attributes, except `training` and `forward`, which a load checks in other ways."""
    parts = module.named_modules(remove_duplicate=False)
    own = {(path, name): value for path, part in parts for name, value in vars(part).items()}
    return {name: value for name, value in own.items() if name[1] not in ("training", "forward")}


def _another(value: Any) -> Any:
    """A tensor of the same form with other numbers: a check of the form does not tell the two apart."""
    if not isinstance(value, Tensor):
        return object()
    value = value.detach()
    if value.dtype == torch.bool:
        return ~value
    return torch.full_like(value, torch.nan) if value.is_floating_point() or value.is_complex() else value + 1


def _joined(name: Name) -> str:
    return ".".join(filter(None, name))
