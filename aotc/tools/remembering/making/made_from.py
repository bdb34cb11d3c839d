"""How a build makes a module again that a program has: a factory and its arguments, as a manifest names them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from aotc.errors import ManifestError
from aotc.reads.attributes import NO_VALUE, plain_forward, training_differs
from aotc.reads.sources import cells_file, public_name
from aotc.tools.recording.module_factories import Made, factory_of
from aotc.tools.recording.weight_layouts import made_as_it_lies
from aotc.tools.remembering.caches.cache_module import CallsWithCache, with_cache
from aotc.tools.remembering.making.functions import FunctionOf, undecorated, with_function
from aotc.tools.remembering.making.part_modes import with_modes
from aotc.tools.remembering.making.peft_adapters import OF_MODEL, adapters_in, base_of, with_adapters


def made_from(
    module: nn.Module, factory: str | None, kwargs: Mapping[str, Any] | None, changed: Collection[str] = ()
) -> Made:
    """How a build makes the module again, with absolute paths; `changed` are attributes that its calls have changed.
    Raises ManifestError where that is not known."""
    made = made_as_it_lies(_made_from(module, factory, kwargs, changed), module)
    if parts := training_differs(module):
        nested = {"factory": made.factory, "kwargs": made.kwargs}
        made = Made(f"{with_modes.__module__}:{with_modes.__name__}", {"module": nested, "parts": list(parts)})
    return made


def _made_from(
    module: nn.Module, factory: str | None, kwargs: Mapping[str, Any] | None, changed: Collection[str]
) -> Made:
    """The same, all of it in one training mode."""
    if isinstance(module, FunctionOf):
        inner = [name.removeprefix("module.") for name in changed]
        function, of = module.function, _made_from(module.module, factory, kwargs, inner)
        if function.__module__ == "__main__":
            _check_script(_script(function.__qualname__), function.__qualname__)
        named: dict[str, Any] = {"function": f"{public_name(function.__module__)}:{function.__qualname__}"}
        if decorators := len(undecorated(function)) - 1:
            named["decorators"] = decorators
        nested = {"factory": of.factory, "kwargs": of.kwargs}
        return Made(f"{with_function.__module__}:{with_function.__name__}", named | {"module": nested})
    if isinstance(module, CallsWithCache):
        inner = [name.removeprefix("module.") for name in changed]
        of = _made_from(module.module, factory, kwargs, inner)
        nested = {"factory": of.factory, "kwargs": of.kwargs}
        return Made(f"{with_cache.__module__}:{with_cache.__name__}", {"module": nested})
    if adapters := adapters_in(module):
        inner = [name.removeprefix(OF_MODEL) for name in changed]
        of = _made_without(base_of(module), factory, kwargs, inner, adapters)
        nested = {"factory": of.factory, "kwargs": of.kwargs}
        return Made(f"{with_adapters.__module__}:{with_adapters.__name__}", {"module": nested, **adapters})
    return _made_without(module, factory, kwargs, changed, {})


def _made_without(
    module: nn.Module,
    factory: str | None,
    kwargs: Mapping[str, Any] | None,
    changed: Collection[str],
    adapters: Mapping[str, Any],
) -> Made:
    """How a module is made, to which these `adapters` are added then. Raises ManifestError."""
    if factory is not None:
        file, colon, name = factory.partition(":")
        return Made(f"{Path(file).absolute() if file.endswith('.py') else file}{colon}{name}", dict(kwargs or {}))
    cls, root = type(module), Path("/")
    replaced = [path for path, part in module.named_modules() if not _has_own_forward(part)]
    if replaced:
        where = f"{replaced[0]}.forward".removeprefix(".")
        raise ManifestError(
            f"`{where}` was replaced in the module, and a build would make it with its class's",
            hint="undo that before the first call, or name a function that does so too: aotc.compile(model, factory=…)",
        )
    finish = functools.partial(with_adapters, **adapters) if adapters else lambda made: None
    made = factory_of(module, root, changed, finish)
    if made is None and cls.__module__ == "__main__" and cells_file.get() is None:
        _script(cls.__qualname__)
    if made is None:
        raise ManifestError(
            f"how to make {cls.__qualname__} again for the build cannot be read from its attributes",
            hint='name a function that returns such a module: aotc.compile(model, factory="package.module:function")',
        )
    file, colon, name = made.factory.partition(":")
    if not file.endswith(".py"):
        return made
    script = (root / file).resolve()
    if cells_file.get() is None:
        _check_script(script, cls.__qualname__)
    return made._replace(factory=f"{script}{colon}{name}")


def _has_own_forward(part: nn.Module) -> bool:
    forward = vars(part).get("forward")
    return forward is None or plain_forward(part, forward, lambda value: "") is NO_VALUE


def _script(name: str) -> Path:
    """The file that this process runs, in which `name` is defined. Raises ManifestError where there is none."""
    file = str(getattr(__import__("__main__"), "__file__", ""))
    if not file.endswith(".py"):
        raise ManifestError(
            f"{name} is defined in a notebook or at a prompt, where the process that builds cannot find it",
            hint="write it into a file (in a notebook: `%%writefile my_models.py`) and import it from there",
        )
    return Path(file).resolve()


def _check_script(script: Path, name: str) -> None:
    if "__name__" not in script.read_text(errors="replace"):
        raise ManifestError(
            f"{name} is defined in {script}, all of which would run again in the build",
            hint='let what the script does stand under `if __name__ == "__main__":`, or import it from a module',
        )
