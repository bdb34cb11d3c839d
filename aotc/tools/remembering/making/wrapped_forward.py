"""A forward of the class within wrappers that were put on the module: autocast, and accelerate's conversion of results.

`accelerate.prepare` with mixed precision, and so each `Trainer` with bf16, replaces `module.forward`. What these
wrappers do is known: they are run around the compiled code, which is that of the class's forward under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn
from torch.amp.autocast_mode import autocast_decorator

from aotc.tools.remembering.region_calls import InPlace

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class _OfForward(NamedTuple):
    method: str = ""


class WrappedForward(InPlace):
    """Stands in the place of such a forward, and does what it does. `aotc.reads` knows it by its `module` and
    `artifact.method`: a build does not have to make such an attribute."""

    artifact = _OfForward()

    def __init__(self, module: nn.Module, forward: Callable[..., Any], wraps: list[Wrap]) -> None:
        self.module, self.__wrapped__, self._wraps = module, forward, wraps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The wrappers, with another call within them."""
        for wrap in reversed(self._wraps):
            call = wrap(call)
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a copied module, which has no attributes yet when this is called: so that is its class's.
        return getattr, (self.module, "forward")


def wrapped_forward(module: nn.Module) -> WrappedForward | None:
    """What stands in the place of the module's forward, if that is the class's within known wrappers only."""
    forward = vars(module).get("forward")
    if forward is None or isinstance(forward, WrappedForward):
        return forward
    wraps: list[Wrap] = []
    inner = forward
    while inner is not None and inner is not type(module).forward:
        if isinstance(inner, MethodType):
            inner = inner.__func__
            continue
        if (wrap := _wrap_of(inner)) is None:
            return None
        wraps.append(wrap)
        inner = inner.__wrapped__
    if inner is None or not wraps:
        return None
    found = vars(module)["forward"] = WrappedForward(module, forward, wraps)
    return found


def _wrap_of(function: Any) -> Wrap | None:
    """What a wrapper does, if it is known."""
    cls = type(function)
    if cls.__name__ == "ConvertOutputsToFp32" and cls.__module__ == "accelerate.utils.operations":
        return cls
    if not isinstance(function, FunctionType) or not hasattr(function, "__wrapped__"):
        return None
    name, of = function.__code__.co_qualname, function.__globals__.get("__name__")
    if (name, of) == ("convert_outputs_to_fp32.<locals>.forward", "accelerate.utils.operations"):
        return _as_it_is  # it calls the other one
    if (name, of) == ("autocast_decorator.<locals>.decorate_autocast", "torch.amp.autocast_mode"):
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        autocast = cells["autocast_instance"].cell_contents
        return lambda call: autocast_decorator(autocast, call)  # type: ignore[no-untyped-call]
    return None


def _as_it_is(call: Callable[..., Any]) -> Callable[..., Any]:
    return call
