"""A call as it is remembered: what its arguments are, without the values of tensors, as JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from aotc.errors import ManifestError
from aotc.manifest.schema import is_tuple
from aotc.records import TUPLE
from aotc.tools.recording.seen_calls import SeenArgument, SeenTensor, seen_call
from aotc.tools.remembering.caches.cache_structure import is_apart


def seen_with_caches(
    module: nn.Module,
    method: Callable[..., Any] | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    gradients: bool = False,
) -> dict[str, SeenArgument]:
    """The arguments of a call of the module, or of its method, without the values of their tensors; which of them
    require `gradients`, if that is asked. Raises ManifestError for what no manifest holds."""
    wanted = gradients and torch.is_grad_enabled()
    device = next((tensor.device for tensor in itertools.chain(module.parameters(), module.buffers())), None)
    seen = seen_call(module, args, kwargs, method, gradients=wanted, device=device)
    return {name: _of_cache(each) if is_apart(each) else each for name, each in seen.items()}


def _of_cache(seen: Mapping[str, Any]) -> SeenArgument:
    """What was seen of a cache: its lengths are examples of none, as one may be beyond the sizes of another call."""
    tensors = (
        each._replace(is_sequence=True)
        if each.shape
        else each._replace(low=each.low and 0, high=each.high and 0, is_sequence=False)
        for each in seen["tensors"]
    )
    return {**seen, "tensors": list(tensors)}


def as_json(seen: SeenArgument) -> Any:
    """What was seen, as JSON; a mapping with `shape` is a tensor, and one of `tuple` a tuple, as in a manifest. Raises
    ManifestError for what would be read as another value."""
    if isinstance(seen, SeenTensor):
        return {name: value for name, value in seen._asdict().items() if value is not None and value is not False}
    if isinstance(seen, Mapping):
        return {as_json(name): as_json(item) for name, item in seen.items()}
    if isinstance(seen, list | tuple):
        items = [as_json(item) for item in seen]
        return items if isinstance(seen, list) else {TUPLE: items}
    if not _is_held(seen):
        raise ManifestError(
            f"{ascii(seen)[:80]}, of the type {type(seen).__name__}, is not remembered as the value that it is",
            hint="pass a plain bool, int of 64 bits, finite float or str, or a tensor",
        )
    return seen


def _is_held(value: object) -> bool:
    """Whether JSON gives this value back: no other type, as of an enumeration or of NumPy, infinity, or half of a
    character."""
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    if type(value) is float:
        return math.isfinite(value)
    return (
        value is None
        or type(value) is bool
        or (type(value) is str and not any("\ud800" <= c <= "\udfff" for c in value))
    )


def from_json(value: Any) -> SeenArgument:
    if isinstance(value, Mapping):
        if "shape" in value:
            return SeenTensor(**{**value, "shape": tuple(value["shape"])})
        if is_tuple(value):
            return tuple(map(from_json, value[TUPLE]))
        return {name: from_json(item) for name, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value
