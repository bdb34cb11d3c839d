"""From what is remembered of a module to its manifest."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from aotc.amounts import listed
from aotc.errors import ManifestError, NotFoundError
from aotc.models.casting import changed_by_cast
from aotc.reads.attributes import NO_VALUE, plain_forward, training_differs
from aotc.reads.sources import cells_file, public_name
from aotc.reads.tensors import dtype_name
from aotc.records import Dims
from aotc.store.reference import is_remote
from aotc.tools.recording.check_written import check_written
from aotc.tools.recording.first_manifest import to_yaml, writing
from aotc.tools.recording.module_factories import Made, factory_of
from aotc.tools.recording.seen_calls import inputs_of_calls
from aotc.tools.remembering.cache_module import CallsWithCache, with_cache
from aotc.tools.remembering.functions import FunctionOf, undecorated, with_function
from aotc.tools.remembering.memory import Kind, Memory, Place, remembered_in
from aotc.tools.remembering.part_modes import with_modes
from aotc.tools.remembering.peft_adapters import OF_MODEL, adapters_in, base_of, with_adapters
from aotc.tools.remembering.remembered_calls import from_json

_log = logging.getLogger("aotc")


def made_from(
    module: nn.Module, factory: str | None, kwargs: Mapping[str, Any] | None, changed: Collection[str] = ()
) -> Made:
    """How a build makes the module again, with absolute paths; `changed` are attributes that its calls have changed.
    Raises ManifestError where that is not known."""
    made = _made_from(module, factory, kwargs, changed)
    if not (parts := training_differs(module)):
        return made
    nested = {"factory": made.factory, "kwargs": made.kwargs}
    return Made(f"{with_modes.__module__}:{with_modes.__name__}", {"module": nested, "parts": list(parts)})


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


def dtype_to_cast(module: nn.Module) -> str:
    """The dtype of all parameters, for a factory that makes them in another one; "" where a cast would change more."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    only = dtypes.pop() if len(dtypes) == 1 else None
    return dtype_name(only) if only is not None and not changed_by_cast(module, only) else ""


def manifest_of(
    memory: Memory, models: Mapping[str, Kind], folder: Path, *, wide: bool
) -> tuple[str, dict[str, list[Dims]]]:
    """The text of a manifest in `folder` of these kinds by the names of their models, and the sizes of each one's
    calls. `wide`: ranges that were seen are widened, so that not each further length needs a build."""
    ranges, dynamic = memory.asked.get("ranges") or {}, memory.asked.get("dynamic")
    made = _relative({"factory": memory.factory, "kwargs": memory.kwargs}, folder)
    lines, sizes = ["# By `aotc.compile`, from the calls that a program made.", "version: 1", "models:"], {}
    for model, kind in models.items():
        calls = inputs_of_calls([from_json(call) for call in kind.calls])
        settings = {"kwargs": made["kwargs"], "dtype": memory.dtype, "mode": memory.asked.get("mode"), **kind.ambient}
        asked = memory.asked.get("regions")
        settings |= {
            "train": memory.asked.get("train"),
            "make_contiguous": True,
            "method": memory.asked.get("method"),
            "regions": kind.regions or (asked if asked != "auto" else None),
        }
        lines += [
            f"  {to_yaml(model)}:",
            f"    factory: {to_yaml(made['factory'])}",
            *(f"    {to_yaml(name)}: {to_yaml(value)}" for name, value in settings.items() if value),
            f"    targets: [{to_yaml(memory.facts['target'])}]",
            "    inputs:" if calls.inputs else "    inputs: {}",
            *(f"      {to_yaml(name)}: {to_yaml(form)}" for name, form in calls.inputs.items()),
        ]
        if calls.buckets != [{}]:
            buckets = [
                {dim: ranges.get(dim) or (_widened(size, dynamic) if wide else size) for dim, size in bucket.items()}
                for bucket in (calls.sizes if dynamic is False else calls.buckets)
            ]
            distinct = [bucket for index, bucket in enumerate(buckets) if bucket not in buckets[:index]]
            lines += ["    buckets:", *(f"      - {to_yaml(bucket)}" for bucket in distinct)]
        sizes[model] = calls.sizes
    return "\n".join(lines) + "\n", sizes


def write_remembered(output: Path, store: str | Path, name: str, *, check: bool) -> str:
    """Write the manifest of what a store remembers of a module, and give its text; `check` as in `aotc init`, but not
    where others may write to the store: it would import the factory that the store names. Raises ManifestError where
    `output` exists or cannot be written, and NotFoundError."""
    from aotc.tools.remembering.remote_memory import remembered_of  # not where a program records its calls

    place = Place(remembered_in(store), name)
    if (memory := remembered_of(str(store), name)) is None:
        known = tuple(sorted(path.stem for path in place.folder.glob("*.json")))
        message = f"{store} remembers nothing of {name}"
        raise NotFoundError(message, hint=f"it remembers {listed(known, 10) if known else 'nothing'}", known=known)
    if output.exists():
        raise ManifestError(f"{output} exists", hint="name another file with --output")
    models = {place.model(number): kind for number, kind in enumerate(memory.kinds)}
    text, sizes = manifest_of(memory, models, output.absolute().parent, wide=True)
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    if check and (is_remote(str(store)) or os.environ.get("AOTC_TRUSTED_KEYS")):
        _log.warning("%s is not checked: the factories in it are those that %s names. Read them first", output, store)
    elif check:
        check_written(output, sizes)
    return output.read_text()


def _relative(value: Any, folder: Path) -> Any:
    """A factory with its arguments: with files relative to the folder of a manifest, where they are absolute."""
    if not isinstance(value, Mapping):
        return value
    made = {name: _relative(item, folder) for name, item in value.items()}
    file, colon, name = str(made.get("factory", "")).partition(":")
    return made | {"factory": f"{os.path.relpath(file, folder)}:{name}"} if colon and Path(file).is_absolute() else made


def _widened(size: Any, dynamic: bool | None) -> Any:
    """A range from 2, or less, to a power of two; `dynamic`: of a size of 2 or more that did not vary, too."""
    if dynamic and isinstance(size, int) and size > 1:
        size = [size, 2 * size]
    return [min(2, size[0]), 1 << (size[1] - 1).bit_length()] if isinstance(size, list) else size
