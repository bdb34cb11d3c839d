"""How a build makes a module again that a program has, by `aotc.record` and `aotc.compile`: its factory, and what was
done to it since, as adapters, parts in another training mode and weights in another order."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from aotc.errors import ManifestError
from aotc.reads.attributes import NO_VALUE, plain_forward, training_differs
from aotc.reads.sources import cells_file
from aotc.tools.recording.module_factories import Made, factory_of
from aotc.tools.recording.part_modes import with_modes
from aotc.tools.recording.peft_adapters import OF_MODEL, adapters_in, base_of, with_adapters
from aotc.tools.recording.weight_layouts import made_as_it_lies


def made_again(
    module: nn.Module, factory: str | None, kwargs: Mapping[str, Any] | None, changed: Collection[str] = ()
) -> Made:
    """How a build makes the module, all of it in one training mode, with absolute paths; `changed` are attributes that
    its calls have changed. `factory` makes it without adapters, or with them; None where the module has to say it.
    Raises ManifestError where that is not known."""
    if adapters := adapters_in(module):
        inner = [name.removeprefix(OF_MODEL) for name in changed]
        made = _made_without(base_of(module), factory, kwargs, inner, adapters)
        return made_around(with_adapters, made, adapters)
    return _made_without(module, factory, kwargs, changed, {})


def made_as_it_is(made: Made, module: nn.Module) -> Made:
    """How it is made with weights that lie as this module's, and parts in the same training modes."""
    made = made_as_it_lies(made, module)
    return made_around(with_modes, made, {"parts": list(parts)}) if (parts := training_differs(module)) else made


def made_around(function: Any, made: Made, given: Mapping[str, Any]) -> Made:
    """How `function(module, **given)` is made of a module."""
    nested = {"factory": made.factory, "kwargs": made.kwargs}
    return Made(f"{function.__module__}:{function.__name__}", {"module": nested, **given})


def relative_to(folder: Path, value: Any) -> Any:
    """A factory with its arguments: with files relative to the folder of a manifest, where they are absolute."""
    if not isinstance(value, Mapping):
        return value
    made = {name: relative_to(folder, item) for name, item in value.items()}
    file, colon, name = str(made.get("factory", "")).partition(":")
    return made | {"factory": f"{os.path.relpath(file, folder)}:{name}"} if colon and Path(file).is_absolute() else made


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
        script_of(cls.__qualname__)
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
        check_script(script, cls.__qualname__)
    return made._replace(factory=f"{script}{colon}{name}")


def _has_own_forward(part: nn.Module) -> bool:
    forward = vars(part).get("forward")
    return forward is None or plain_forward(part, forward, lambda value: "") is NO_VALUE


def script_of(name: str) -> Path:
    """The file that this process runs, in which `name` is defined. Raises ManifestError where there is none."""
    file = str(getattr(__import__("__main__"), "__file__", ""))
    if not file.endswith(".py"):
        raise ManifestError(
            f"{name} is defined in a notebook or at a prompt, where the process that builds cannot find it",
            hint="write it into a file (in a notebook: `%%writefile my_models.py`) and import it from there",
        )
    return Path(file).resolve()


def check_script(script: Path, name: str) -> None:
    if "__name__" not in script.read_text(errors="replace"):
        raise ManifestError(
            f"{name} is defined in {script}, all of which would run again in the build",
            hint='let what the script does stand under `if __name__ == "__main__":`, or import it from a module',
        )
