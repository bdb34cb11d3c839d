"""How a build makes a module again that a program has, also one that `aotc.compile` has made around it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from aotc.reads.sources import public_name
from aotc.tools.recording.made_again import check_script, made_again, made_around, made_as_it_is, script_of
from aotc.tools.recording.module_factories import Made
from aotc.tools.remembering.caches.cache_module import CallsWithCache, with_cache
from aotc.tools.remembering.making.functions import FunctionOf, undecorated, with_function


def made_from(
    module: nn.Module, factory: str | None, kwargs: Mapping[str, Any] | None, changed: Collection[str] = ()
) -> Made:
    """How a build makes the module again, with absolute paths; `changed` are attributes that its calls have changed.
    Raises ManifestError where that is not known."""
    return made_as_it_is(_made_from(module, factory, kwargs, changed), module)


def _made_from(
    module: nn.Module, factory: str | None, kwargs: Mapping[str, Any] | None, changed: Collection[str]
) -> Made:
    """The same, all of it in one training mode."""
    inner = [name.removeprefix("module.") for name in changed]
    if isinstance(module, FunctionOf):
        function, of = module.function, _made_from(module.module, factory, kwargs, inner)
        if function.__module__ == "__main__":
            check_script(script_of(function.__qualname__), function.__qualname__)
        named: dict[str, Any] = {"function": f"{public_name(function.__module__)}:{function.__qualname__}"}
        if decorators := len(undecorated(function)) - 1:
            named["decorators"] = decorators
        return made_around(with_function, of, named)
    if isinstance(module, CallsWithCache):
        return made_around(with_cache, _made_from(module.module, factory, kwargs, inner), {})
    return made_again(module, factory, kwargs, changed)
