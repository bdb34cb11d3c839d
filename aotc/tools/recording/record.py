"""`aotc.record`: a manifest from the calls that a program makes to its modules."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

from torch import nn

from aotc.errors import Issue, ManifestError

_log = logging.getLogger("aotc")

Factory = str | Mapping[str, Any]


@contextmanager
def record(
    output: str | os.PathLike[str],
    of: Any = None,
    *,
    factories: Mapping[str, Factory] | None = None,
    check: bool = True,
) -> Iterator[None]:
    """Write a manifest of the modules that are called within, from what they are called with.

    Sizes that vary become dims: batches and images get a bucket for each size, lengths a range. Arguments that are
    not tensors become constants. A module that is called with other constants, dtypes or containers becomes several
    models (`unet`, `unet-2`). Threads may call. Nothing is compiled, and this process imports no compiler.

    Args:
        output: the manifest to write, which must not exist.
        of: whose calls are recorded: a pipeline, of which each module that it calls becomes a model called by its path
            (`transformer`, `vae.decoder`), as `aotc.attach` looks for it; a module; or modules and methods by the names
            of their models (`{"vae": pipe.vae.decode}`). By default, every module that is not called by another one.
        factories: for models whose modules cannot be made from what is known of them: `package.module:function`, or a
            mapping with `factory` and `kwargs`. Known are models of transformers and diffusers, by their configuration,
            and classes whose arguments can be read from the attributes of their names. For any other a function that
            has to be written is named in the manifest, and a warning is logged.

    Raises:
        ManifestError: `output` exists, PyYAML is not installed, or `factories` names what is not one of the models; at
            the end: nothing was called, or calls had arguments that a manifest cannot hold. What could be recorded is
            written all the same.

    Example:
        >>> factory = {"factory": "examples.models:transformer_block", "kwargs": {"width": 256, "heads": 4}}
        >>> with torch.no_grad(), aotc.record("recorded.yaml", {"block": module}, factories={"block": factory}):
        ...     for seq in (16, 48):
        ...         y = module(torch.randn(1, seq, 256))
        >>> print(*Path("recorded.yaml").read_text().splitlines()[-3:], sep="\\n")
              x: {shape: [batch, seq, 256], dtype: float32}
            buckets:
              - {batch: 1, seq: [16, 48]}
    """
    try:
        import yaml  # noqa: F401
    except ImportError as error:
        message = f"aotc.record writes a manifest, for which {error.name} is missing"
        raise ManifestError(message, hint="pip install 'aotc[build]'") from None
    from aotc.tools.recording.check_written import check_written
    from aotc.tools.recording.recorded_manifest import RecordedCalls, write_recorded

    path = Path(output)
    if path.exists():
        raise ManifestError(f"{path} exists", hint="name another file, or remove it")
    methods = {name: each for name, each in of.items() if _is_method(each)} if isinstance(of, Mapping) else {}
    names = None if of is None else _names({n: each for n, each in of.items() if n not in methods} if methods else of)
    if factories and names is not None:
        _check_factories(factories, {*names.values(), *methods})
    calls = RecordedCalls()
    with _watched(names, not _is_by_name(of), calls.add), ExitStack() as stack:
        for name, method in methods.items():
            stack.enter_context(_watched_method(name, method, calls.add))
        yield
    if calls.is_empty:
        known = ", ".join(sorted({*(names or {}).values(), *methods})[:10])
        raise ManifestError(
            "no call of a module was recorded",
            hint=f"call one of these within: {known}" if known else "call a module within the `with`",
        )
    written = write_recorded(path, calls, factories or {})
    if check and written:
        check_written(path, written)
    for issue in calls.issues:
        _log.warning("aotc.record: %s", issue)
    if calls.issues:
        raise ManifestError(
            f"some calls cannot be recorded; {path} holds the others" if calls.of else "no call can be recorded",
            issues=tuple(calls.issues),
        )
    if factories:  # without `of`, the names are known only now
        _check_factories(factories, {*(names or {}).values(), *methods, *calls.of}, f"; {path} holds what was recorded")


def _check_factories(factories: Mapping[str, Factory], models: set[str], written: str = "") -> None:
    """Raises ManifestError for a factory that is for none of the models."""
    unknown = [name for name in factories if name not in models]
    if unknown:
        from aotc.manifest.findings import did_you_mean

        issues = tuple(
            Issue("there is no such model", where=f"factories[{name!r}]", hint=did_you_mean(name, models))
            for name in unknown
        )
        raise ManifestError(f"`factories` names models that are not recorded{written}", issues=issues)


def _is_method(value: Any) -> bool:
    return isinstance(value, MethodType) and isinstance(value.__self__, nn.Module)


def _is_by_name(of: Any) -> bool:
    """Whether the modules were named one by one: each is recorded, also where another one calls it."""
    return isinstance(of, Mapping | nn.Module)


def _names(of: Any) -> dict[int, str]:
    """The name of each module that may be recorded, by its identity. Raises ManifestError for none."""
    if isinstance(of, nn.Module):
        return {id(of): _snake(type(of).__name__)}
    if isinstance(of, Mapping):
        if wrong := [name for name, module in of.items() if not isinstance(module, nn.Module)]:
            raise ManifestError(
                "only modules and their methods can be recorded",
                issues=tuple(Issue("is not a module", where=n) for n in wrong),
            )
        return {id(module): name for name, module in of.items()}
    names: dict[int, str] = {}
    for name, component in vars(of).items():
        if isinstance(component, nn.Module):
            for path, module in component.named_modules():
                names.setdefault(id(module), f"{name}.{path}" if path else name)
    if not names:
        raise ManifestError(
            f"{type(of).__name__} has no modules among its attributes",
            hint="give the modules by name: aotc.record(output, {'unet': unet})",
        )
    return names


def _snake(name: str) -> str:
    return "".join(
        f"-{c.lower()}" if c.isupper() and i and not name[i - 1].isupper() else c.lower() for i, c in enumerate(name)
    )


@contextmanager
def _watched(
    names: Mapping[int, str] | None, outermost: bool, add: Callable[[str, nn.Module, Any, Any], Callable[[], None]]
) -> Iterator[None]:
    """Call `add` for each call of a module in `names`, and what it returns when the call has succeeded.

    By replacing `nn.Module.__call__`, as torch.fx does to trace: hooks on all modules are not given keyword arguments.
    """
    call_module: Callable[..., Any] = nn.Module.__call__
    inside = threading.local()
    given: dict[int, tuple[nn.Module, str]] = {}

    def name_of(module: nn.Module) -> str | None:
        if names is not None:
            return names.get(id(module))
        if id(module) not in given:  # with the module, or another one might get its identity
            base, taken = _snake(type(module).__name__), {name for _, name in given.values()}
            free = (
                name for number in range(1, 10_000) if (name := base if number == 1 else f"{base}{number}") not in taken
            )
            given[id(module)] = module, next(free)
        return given[id(module)][1]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = None if outermost and getattr(inside, "any", False) else name_of(module)
        if name is None:
            return call_module(module, *args, **kwargs)
        done = add(name, module, args, kwargs)
        before, inside.any = getattr(inside, "any", False), True
        try:
            result = call_module(module, *args, **kwargs)
        finally:
            inside.any = before
        done()
        return result

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = call_module  # type: ignore[method-assign]


@contextmanager
def _watched_method(name: str, method: MethodType, add: Callable[..., Callable[[], None]]) -> Iterator[None]:
    """The same for a method, which is looked up in the module's own attributes first."""
    own = vars(method.__self__)
    before = own.get(method.__name__)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        done = add(name, method.__self__, args, kwargs, method)
        result = method(*args, **kwargs)
        done()
        return result

    own[method.__name__] = call
    try:
        yield
    finally:
        del own[method.__name__]
        if before is not None:
            own[method.__name__] = before
