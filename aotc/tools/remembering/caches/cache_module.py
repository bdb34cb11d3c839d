"""A module whose forward takes caches of transformers apart: as a `structure`, a text of plain data, and `tensors`.

A build makes such a module by `with_cache`, which its manifest names as the factory.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from aotc.tools.remembering.caches.cache_structure import apart, is_apart, together

MARK = "<cache {}>"
"""In the result of a call, in the place of a cache that was an argument."""


class CallsWithCache(nn.Module):
    """A module whose caches are taken apart. For each class there is one of its own, as its forward has other names of
    arguments."""

    module: nn.Module


def with_cache(module: nn.Module) -> CallsWithCache:
    """The module of this module's calls with caches."""

    def forward(self: CallsWithCache, *args: Any, **kwargs: Any) -> Any:
        return _called(self.module, args, kwargs)

    own = type(module)
    forward.__signature__ = inspect.signature(own.forward)  # type: ignore[attr-defined]
    name = f"{own.__qualname__}_with_cache"
    members = {"__module__": own.__module__, "__qualname__": name, "forward": forward}
    made: CallsWithCache = type(name.rpartition(".")[2], (CallsWithCache,), members)()
    made.module = module
    made.training = module.training
    return made


def _called(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Call the module with its caches, and give the result, in which marks stand for them; and of each the structure
    and the tensors after the call, of which a number stands for one that was there."""
    caches: list[tuple[Any, list[Tensor]]] = []

    def made(value: Any) -> Any:
        if not is_apart(value):
            return value
        cache = together(json.loads(value["structure"]), iter(value["tensors"]))
        caches.append((cache, list(value["tensors"])))
        return cache

    result = module(*map(made, args), **{name: made(value) for name, value in kwargs.items()})
    after = []
    for cache, before in caches:
        now = apart(cache)
        known = {id(tensor): index for index, tensor in enumerate(before)}
        now["tensors"] = [known.get(id(tensor), tensor) for tensor in now["tensors"]]
        after.append(now)
    marks = {id(cache): MARK.format(index) for index, (cache, _) in enumerate(caches)}
    return {"result": replaced(result, lambda value: marks.get(id(value), value)), "caches": after}


def replaced(result: Any, other: Callable[[Any], Any]) -> Any:
    """The result with others in the place of its items."""
    if isinstance(result, dict):
        for name, item in [*result.items()]:
            if (new := other(item)) is not item:
                result[name] = new  # of a result of transformers, its attribute, too
        return result
    if type(result) in (tuple, list):
        return type(result)(map(other, result))
    return other(result)
