"""`aotc.compile` of a method of a module, and as a decorator: calls are compiled, for each module."""

from __future__ import annotations

import copy
import functools
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from aotc.errors import BindError
from aotc.tools.remembering.by_mode import ByMode, remembering_like, remembering_of
from aotc.tools.remembering.call_counts import CallCounts
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.compile_state import CompileState
from aotc.tools.remembering.compiled_functions import CompiledFunction
from aotc.tools.remembering.region_calls import InPlace
from aotc.tools.remembering.remembering import Remembering


class _Named(NamedTuple):
    method: str


class RememberedMethod(InPlace):
    """A method in the place of a module's own: `model.encode = aotc.compile(model.encode)`. `aotc.reads` knows it by
    its `module` and by `artifact.method`. A deep copy of the module has one of its own; what is pickled of it has the
    class's."""

    def __init__(self, method: MethodType, remembering: Remembering | ByMode) -> None:
        self._remembering = remembering
        self.artifact = _Named("" if method.__name__ == "forward" else method.__name__)
        self.__wrapped__ = method
        self.__name__ = method.__name__

    @property
    def module(self) -> nn.Module:
        """The module whose method it is."""
        return self._remembering.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._remembering(*args, **kwargs)

    def explain(self) -> CompileState:
        """As of a module that was compiled."""
        return self._remembering.state()

    def stats(self) -> CallCounts:
        """As of a module that was compiled."""
        return self._remembering.stats()

    def wait(self, timeout: float | None = None) -> bool:
        """As of a module that was compiled."""
        return self._remembering.wait(timeout)

    def __deepcopy__(self, memo: dict[int, Any]) -> RememberedMethod:
        module = copy.deepcopy(self.module, memo)
        method = MethodType(self.__wrapped__.__func__, module)
        return RememberedMethod(method, remembering_like(self._remembering, module, method))

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of a copied module, which has no attributes yet when this is called: so that is its class's.
        return getattr, (self.module, self.__name__)


def of_method(module: nn.Module, method: MethodType, options: Options) -> RememberedMethod:
    """Raises BindError for a method that is not its class's."""
    own = getattr(type(module), method.__name__, None)
    if own is not method.__func__:
        raise BindError(
            f"{method.__name__} is not a method of the class {type(module).__name__}, and a build would not find it",
            hint="define it in the class",
        )
    return RememberedMethod(method, remembering_of(module, method, options))


class _Decorated:
    """A method of a class, as `@aotc.compile` finds it there. The class keeps its own method, and each module that is
    made gets one in its place: what forward reads of the class is what a build finds."""

    def __init__(self, function: FunctionType, options: Options) -> None:
        self.function, self.options = function, options

    def __set_name__(self, owner: type[nn.Module], name: str) -> None:
        function, options, make = self.function, self.options, owner.__init__

        @functools.wraps(make)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            make(module, *args, **kwargs)
            if getattr(type(module), name) is function:  # no class below has another one
                vars(module)[name] = of_method(module, MethodType(function, module), options)

        setattr(owner, name, function)
        owner.__init__ = init  # type: ignore[assignment, method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise BindError(
            f"another decorator stands above @aotc.compile of {self.function.__qualname__}",
            hint="let @aotc.compile stand above all others, and call the method within torch.no_grad()",
        )


def decorated(function: Any, options: Options) -> Any:
    """What stands before a method in its class, or in the place of a function that takes its module first. Raises
    BindError for what a build cannot find."""
    name = getattr(function, "__qualname__", repr(function))
    if not isinstance(function, FunctionType) or "<" in name:
        raise BindError(
            f"{name} is not a module, nor a method of a class of modules or a function in a file",
            hint="give a module, its method (model.encode), or decorate a method in its class, or a function of a file "
            "that takes its module first",
        )
    return _Decorated(function, options) if "." in name else CompiledFunction(function, options)
