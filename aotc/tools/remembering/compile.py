"""`aotc.compile`: torch.compile that remembers."""

from __future__ import annotations

import copy
import functools
import html
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Literal, cast, get_args

from torch import nn

from aotc.digest import canonical_json
from aotc.errors import BindError, ManifestError
from aotc.records import Mode
from aotc.runtime.compiled import Compiled, class_for
from aotc.runtime.options import options_error
from aotc.store.cache_folder import cache_folder
from aotc.store.extras import install_hint
from aotc.store.reference import is_remote
from aotc.tools.remembering.by_mode import ByMode, remembering_like, remembering_of
from aotc.tools.remembering.caches.cache_arguments import ByCache, takes_caches
from aotc.tools.remembering.call_counts import CallCounts
from aotc.tools.remembering.compile_options import Options, When
from aotc.tools.remembering.compile_state import CompileState
from aotc.tools.remembering.methods import RememberedMethod, decorated, of_method
from aotc.tools.remembering.remembering import Remembering
from aotc.tools.remembering.torch_arguments import check_torch_arguments

_log = logging.getLogger("aotc")


class Remembered(nn.Module):
    """A module in the place of another one, whose attributes it has, as `aotc.Compiled` has them: only a call differs.

    A copy of it is one of the module's copy, which the same code runs. What is pickled of it is the module itself.
    """

    __slots__ = ("_remembering",)
    _remembering: Remembering | ByMode | ByCache

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the `__init_subclass__` of the module's class: this class is not a model of its own."""

    @property  # type: ignore[override]
    def __class__(self) -> type[nn.Module]:
        """The module's own class: callers ask for it, and pickle compares it with that of the copy."""
        return type(self.module)

    @__class__.setter
    def __class__(self, cls: type[nn.Module]) -> None:
        self.module.__class__ = cls

    @property
    def module(self) -> nn.Module:
        """The module that it stands for."""
        return self._remembering.module

    def explain(self) -> CompileState:
        """What is remembered, what is loaded, what is being built, and why calls run in eager; with `train=True`, of
        calls in the mode that the module is in."""
        return self._remembering.state()

    def stats(self) -> CallCounts:
        """The calls since `aotc.compile`, compiled and in eager, by form, in both modes; of each form in eager, why its
        last call was. Counts are this process's, and only grow.

        Example:
            >>> model = aotc.compile(module, store="aotc-store", build="never")
            >>> with torch.no_grad():
            ...     y = model(torch.randn(4, 128, 256))
            >>> model.stats().compiled + model.stats().eager
            1
        """
        return self._remembering.stats()

    def _repr_html_(self) -> str:
        """As a notebook shows it: the module, and what `explain()` tells."""
        return f"<pre>{html.escape(repr(self))}</pre>{self.explain()._repr_html_()}"

    def wait(self, timeout: float | None = None) -> bool:
        """Build what has no code yet, in another process, and wait for it. Whether all that was seen has code now."""
        return self._remembering.wait(timeout)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.module.__reduce_ex__(protocol)

    def __copy__(self) -> Remembered:
        return self._in_place_of(copy.copy(self.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Remembered:
        return self._in_place_of(copy.deepcopy(self.module, memo))

    def _in_place_of(self, copied: nn.Module) -> Remembered:
        calls = self._remembering
        return in_place_of(
            copied, calls.like(copied) if isinstance(calls, ByCache) else remembering_like(calls, copied, None)
        )


Remembered.__call__ = Remembered._remembering  # type: ignore[method-assign]


def in_place_of(module: nn.Module, remembering: Remembering | ByMode | ByCache) -> Remembered:
    """What stands in the place of a module, whose calls these are."""
    base = RememberedGenerator if takes_caches(module) else Remembered
    cls = class_for(cast("type[Compiled]", base), type(module), "")
    remembered = cast("Remembered", object.__new__(cls))
    object.__setattr__(remembered, "_remembering", remembering)
    object.__setattr__(remembered, "__dict__", vars(module))
    return remembered


class RememberedGenerator(Remembered):
    """A model of transformers: on a GPU, `generate()` with a static cache asks for a call by torch.compile."""

    __slots__ = ()

    def get_compiled_call(self, compile_config: Any = None) -> nn.Module:
        """The model, whose calls are compiled as they are."""
        return self


def default_store() -> str:
    """`$AOTC_STORE`, else a store of its own in the cache folder."""
    return os.environ.get("AOTC_STORE") or str(cache_folder() / "remembered")


def _is_json(value: Any) -> bool:
    try:
        return isinstance(value, Mapping) and bool(canonical_json(value))
    except (TypeError, ValueError):
        return False


def _are_ranges(value: Any) -> bool:
    """Whether these are two sizes for each dim."""
    return isinstance(value, Mapping) and all(
        isinstance(ends, list | tuple) and [type(end) for end in ends] == [int, int] and ends[0] <= ends[1]
        for ends in value.values()
    )


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) and each for each in value) and bool(value)


def _check_remote(url: str) -> None:
    """Raises BindError, StoreError where no code that is built could be pushed to this store, or loaded from it."""
    from aotc.store.opening import open_remote
    from aotc.store.remote.interface import Limits

    if os.environ.get("AOTC_TRUSTED_KEYS"):
        message = f"aotc.compile signs nothing, and $AOTC_TRUSTED_KEYS asks for signatures of code from {url}"
        raise BindError(message, hint='give build="never", to load only; build without that variable, then `aotc sign`')
    open_remote(url, Limits.from_environment())


def compile(
    module: Any = None,
    *,
    factory: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    store: str | os.PathLike[str] | None = None,
    ranges: Mapping[str, Sequence[int]] | None = None,
    mode: Mode | None = None,
    build: When = "background",
    seconds: float = 3600.0,
    cores: int = 0,
    builds: int = 8,
    retry: bool = False,
    train: bool = False,
    regions: Sequence[str] | Literal["auto"] | None = None,
    gpu: bool = False,
    on_miss: Literal["eager", "error"] = "eager",
    fullgraph: bool = False,
    dynamic: bool | None = None,
    backend: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
    **others: Any,
) -> Any:
    """Compile a module as it is used, once: later processes load the code in milliseconds, and import no compiler.

    Calls run in eager, and their forms are recorded: sizes, dtypes, constants. Another process of a low priority builds
    code for them into an ordinary store, and the next call after that runs it. A later process, whose module has the
    same class, source, attributes and forms of weights, loads it at its first call; forms that it does not cover run in
    eager and are built too, and a size that varies becomes a range. This process imports no compiler, ever.

    Calls in training mode run in eager without `train=True`, and calls in eval mode that record gradients always do.

    Args:
        module: the module, or a method of one: `model.encode = aotc.compile(model.encode)`. It is compiled as it is at
            its first call. `@aotc.compile` or `@aotc.compile(mode=…)` stands before a method in a class of modules, or
            before a function of a file whose first argument is the module.
        factory: how the build makes the module again, where its class and attributes do not say so:
            `package.module:function`, or `path/to/file.py:function`. Known are models of transformers and diffusers, by
            their configuration, and classes whose arguments can be read from the attributes of their names.
        kwargs: the arguments of `factory`, as a manifest holds them.
        store: a store's folder or URL; else `$AOTC_STORE`, else `remembered` in the cache folder (`$AOTC_CACHE_DIR`).
            Machines that name the same URL build for one another.
        ranges: the least and the greatest size of dims, by the names that `aotc.record` gives them:
            `{"seq": (1, 2048)}`.
        mode: a mode of torch.compile; None is "default".
        build: "background": seconds after the last new form, or at the end of this process, by a process that outlives
            it; "exit": at its end, which waits for it; "now": in a call of a new form, which waits for it; "never". It
            runs at a low priority, and waits for the memory that it takes.
        seconds: the longest that a build may take.
        cores: how many cores a build may use; 0: all.
        builds: how many builds there may be for one module, over all processes.
        retry: try again what could not be built, and count builds anew.
        train: compile calls in training mode, too, forward and backward. Dropout draws other numbers than in eager.
        regions: compile these submodules alone, each once for all that are alike, as `["layers.*"]`; or "auto": the
            repeated ones that the build finds. All else runs in eager. Without it, a model is compiled whole; by its
            repeated submodules where it cannot be captured whole.
        gpu: whether a build in the background may use the module's GPU while this program runs. Else what a module on a
            GPU lacks is built when the program ends.
        on_miss: "error": a call that would run in eager raises MissError with the reason; its form is remembered and
            built all the same. With `build="now"` no call runs in eager: one of a new form waits for its code.
        fullgraph: never compile by repeated submodules without being asked; a call of a form that could not be
            compiled whole raises MissError with the line that does not allow it.
        dynamic: None: a size that varies becomes a range. True: batches and lengths are ranges from the first build
            on. False: code for each size that comes.
        backend: None or "inductor". options: None. disable: give the module back. These are torch.compile's.
        others: refused, each with what to write instead.

    Returns:
        An `nn.Module` of the module's class, with its attributes, that can stand where it stood:
        `pipe.transformer = aotc.compile(pipe.transformer)`. `explain()` says what it does; `stats()` counts its calls,
        compiled and in eager; `wait()` builds, and waits. Of a method, a callable with these three; of one that is
        decorated in its class, a function. Of a function, one with `explain(module)`, `stats(module)`, `wait(module)`.

    Raises:
        ManifestError: PyYAML is not installed, and `build` is not "never".
        BindError: an argument has a value that it cannot have. What goes wrong later is a warning in the log, and calls
        run in eager.

    Example:
        >>> model = aotc.compile(module, store="aotc-store", build="never")  # `aotc.compile(module)` builds, too
        >>> with torch.no_grad():
        ...     model(torch.randn(4, 128, 256)).shape
        torch.Size([4, 128, 256])
    """
    given = {name: value for name, value in locals().items() if name not in ("module", "others")} | others
    if module is None and "model" in others:  # as torch.compile calls it
        return compile(given.pop("model"), **given)
    if module is None:
        return functools.partial(compile, **given)
    check_torch_arguments(compile, backend, options, dynamic, fullgraph, others)
    mode = mode or "default"
    checks = (
        ("build", build, build in get_args(When), f"one of {', '.join(get_args(When))}"),
        ("mode", mode, mode in get_args(Mode), f"one of {', '.join(get_args(Mode))}"),
        ("kwargs", kwargs, kwargs is None or _is_json(kwargs), "a mapping of what a manifest holds"),
        ("ranges", ranges, ranges is None or _are_ranges(ranges), 'least and greatest sizes, as {"seq": (1, 2048)}'),
        ("regions", regions, regions in (None, "auto") or _are_patterns(regions), '"auto" or a list, as ["layers.*"]'),
        ("on_miss", on_miss, on_miss in ("eager", "error"), "eager or error"),
        ("seconds", seconds, seconds > 0, "more than 0"),
        ("cores", cores, cores >= 0, "0, for all, or more"),
        ("builds", builds, builds > 0, "1 or more"),
    )
    if wrong := [(name, value, expected) for name, value, fits, expected in checks if not fits]:
        raise options_error(wrong, "compile")
    where = os.fspath(store or default_store())
    if is_remote(where) and build != "never":
        _check_remote(where)
    if build != "never" and importlib.util.find_spec("yaml") is None:
        message = "aotc.compile writes a manifest to build from, for which PyYAML is missing"
        raise ManifestError(message, hint=f'{install_hint("build")}; or give build="never" to load only')
    where = where if is_remote(where) else str(Path(where).absolute())
    asked = os.environ.get("AOTC_COMPILE", "")
    if asked == "off" or disable:
        return module
    if asked not in ("", "report"):
        _log.warning("AOTC_COMPILE is %r and may be off or report", asked)
    if isinstance(module, Remembered):
        module = module.module
    chosen = Options(
        factory,
        kwargs,
        where,
        ranges=ranges or {},
        mode=mode,
        build=build,
        seconds=seconds,
        cores=cores,
        builds=builds,
        retry=retry,
        train=train,
        regions=regions,
        gpu=gpu,
        on_miss=on_miss,
        fullgraph=fullgraph,
        dynamic=dynamic,
    )
    if isinstance(module, RememberedMethod):
        module = module.__wrapped__
    if isinstance(module, MethodType) and isinstance(owner := module.__self__, nn.Module):
        owner = owner.module if isinstance(owner, Remembered) else owner
        return of_method(owner, MethodType(module.__func__, owner), chosen)
    if not isinstance(module, nn.Module):
        return decorated(module, chosen)
    calls = ByCache(module, chosen) if takes_caches(module) else remembering_of(module, None, chosen)
    return in_place_of(module, calls)
