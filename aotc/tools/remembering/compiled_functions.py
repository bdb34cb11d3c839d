"""`aotc.compile` of a function that takes its module first: calls are compiled, for each module."""

from __future__ import annotations

import functools
import inspect
import logging
from types import FunctionType
from typing import Any

from torch import nn

from aotc.tools.remembering.by_mode import ByMode, remembering_of
from aotc.tools.remembering.call_counts import CallCounts
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.compile_state import CompileState
from aotc.tools.remembering.making.functions import function_of
from aotc.tools.remembering.region_calls import InPlace
from aotc.tools.remembering.remembering import Remembering

_log = logging.getLogger("aotc")

_KEPT = "_aotc_functions"
"""The attribute in which a module keeps its calls by compiled functions, so that they live as long as it does."""


class _Kept(InPlace):
    """The calls of one module by each function. A copy of the module has none."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.calls: dict[CompiledFunction, Remembering | ByMode] = {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, ()


class CompiledFunction:
    """In the place of a function, with its name and signature. Calls without a module in front run in eager."""

    def __init__(self, function: FunctionType, options: Options) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        patterns = options.regions
        if patterns is not None and not isinstance(patterns, str):
            options = options._replace(regions=[f"module.{pattern}" for pattern in patterns])
        self._options = options
        self._first = next(iter(inspect.signature(function).parameters), "")
        for name in ("explain", "stats", "wait"):  # a decorator above, as torch.no_grad(), takes what is in __dict__
            vars(self)[name] = getattr(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = args[0] if args else kwargs.get(self._first)
        if not isinstance(module, nn.Module):
            name, given = self.function.__qualname__, type(module).__name__
            _log.warning("aotc.compile: %s runs in eager: its first argument is %s, no module", name, given)
            return self.function(*args, **kwargs)
        if not args:
            del kwargs[self._first]
        return self._of(module)(*args[1:], **kwargs)

    def __reduce__(self) -> str:
        return self.function.__qualname__

    def explain(self, module: nn.Module) -> CompileState:
        """As of a module that was compiled: of this function's calls with that module."""
        return self._of(module).state()

    def stats(self, module: nn.Module) -> CallCounts:
        """As of a module that was compiled: of this function's calls with that module."""
        return self._of(module).stats()

    def wait(self, module: nn.Module, timeout: float | None = None) -> bool:
        """As of a module that was compiled: of this function's calls with that module."""
        return self._of(module).wait(timeout)

    def _of(self, module: nn.Module) -> Remembering | ByMode:
        if (remembering := getattr(module, "_remembering", None)) is not None:  # `aotc.compile` of the module
            module = remembering.module
        kept = vars(module).get(_KEPT)
        if not isinstance(kept, _Kept) or kept.module is not module:
            kept = vars(module)[_KEPT] = _Kept(module)
        if (of := kept.calls.get(self)) is None:
            of = kept.calls.setdefault(self, remembering_of(function_of(self.function, module), None, self._options))
        vars(of.module)["training"] = module.training
        return of
