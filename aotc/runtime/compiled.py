"""What `aotc.load` returns: compiled code as an `nn.Module`, which stands where the module stood.

It shares the attributes of the module (its `__dict__`: parameters, submodules, flags, hooks), and its class inherits
from the module's. So `parent.child = compiled` changes no name in a `state_dict`, and what a library asks of the module
(`config`, `dtype`, `to`, `isinstance`) is answered by the module's own code. Only a call is another: it is compiled.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from aotc.errors import BindError
from aotc.runtime.call import ModelSignature
from aotc.runtime.memory_errors import tells_of_memory

if TYPE_CHECKING:
    from aotc.call_table.misses import Explanation
    from aotc.records import Artifact
    from aotc.runtime.call import CompiledCall, OnMiss
    from aotc.runtime.checkpoints.checkpoint_files import Weights
    from aotc.runtime.stats import Stats


def _refusing(error: Callable[[Any], BindError]) -> Callable[..., NoReturn]:
    """A method that raises this error of its object."""

    def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise error(self)

    return _refuse


def _tracing_refused(_: object) -> BindError:
    return BindError(
        "compiled code cannot be traced or scripted: it has no Python code that torch could follow",
        hint="trace the module: compiled.module",
    )


def _forward_is_fixed(compiled: Compiled) -> BindError:
    return BindError(
        f"the forward of {compiled!r} cannot be replaced: its calls would not run it",
        hint="put a module of your own that calls it in its place; libraries that wrap forwards to move weights "
        "(accelerate's offloading) cannot be used with compiled code",
    )


def _hook_refused(compiled: Compiled) -> BindError:
    return BindError(
        f"no hook can be registered on {compiled!r}: its calls would not run it",
        hint="register it on a module that runs eagerly around it; one that is part of the model, before `aotc build`",
    )


def _compile_refused(compiled: Compiled) -> BindError:
    return BindError(
        f"{compiled!r} is compiled already, and torch.compile would import its compilers into this process",
        hint="leave out the call of compile(); to compile the module itself, call compiled.module.compile()",
    )


def _call_refused(compiled: Compiled) -> BindError:
    method = compiled.artifact.method
    return BindError(
        f"{compiled!r} was compiled for the method `{method}`, and a call of it would be another than the module's",
        hint=f"call compiled.{method}(…); compiled.module(…) runs the module's own forward",
    )


class _Forward:
    """The compiled code in the place of a forward. torch.fx asks the class for a function to trace, and is refused."""

    def __get__(self, instance: Compiled | None, owner: type) -> Any:
        if instance is not None:
            return instance._aotc
        if sys._getframe(1).f_globals.get("__name__") == "torch.fx._symbolic_trace":
            raise _tracing_refused(instance)
        return self

    def __set__(self, instance: Compiled, forward: Any) -> NoReturn:
        raise _forward_is_fixed(instance)


class Compiled(nn.Module):
    """A compiled model with the module's calling convention, in the module's place.

    Each call is bound to the model's parameters, dispatched on its sizes, checked against every guard, and run. A call
    that no variant may run goes to `on_miss`. Many threads may call.

    As in eager: what the model writes to an input or a buffer is written to the caller's and the module's own tensor,
    through padding and copies too; an output that is an input or a buffer is that very object; an output that is a view
    of an input shares its memory, also where the input was padded or copied into the compiled layout. Compiled outputs
    require a gradient only of a model with `train: true`, whose results are copies where they would be views; what
    `on_miss="eager"` computes does, outside `torch.no_grad()`. Random operators draw
    from torch's generator, so `torch.manual_seed` makes calls repeat, but their numbers are not those that eager draws
    from the same seed; dropout in eval mode is the identity.

    It is an instance of the module's class and has the module's attributes: one that is set, a parameter that is moved
    or a flag that is changed on either is on both. A method of that class (`generate`, `to`) runs with this object as
    `self`, so what it calls by `self(...)` is compiled. The names below are this object's own, also where the module
    has an attribute of that name. Loaded without a module, it has no parameters, and nothing but these names.

    Attributes:
        artifact: the record of what was compiled: buckets, guards, options, environment.
        module: the module whose tensors are used, and that `on_miss="eager"` runs; None if none was given.
        device: where the code runs, and its inputs must lie.
        on_miss: what happens to a call that no variant may run.
        forward: the compiled code without the module around it. If a method was compiled (`method: decode`), it stands
            in its place: `compiled.decode(…)` runs it, and a call of `compiled` is refused.

    Raises:
        TypeError: the arguments do not bind to the model's forward.
        MissError: no variant may run the call, and `on_miss` is "error".
        BindError: a tensor of the module was replaced by one of another shape, dtype, stride or device; or an attribute
            that compiled code depends on, a forward or a hook is no longer what it was at the load. Also at once, where
            a hook is registered here or `forward` is replaced.
        GradientError: in training, a tensor requires a gradient that was not compiled, or a second derivative is taken.
        LibraryError: the library failed while it ran; or the caller captures a CUDA graph, and it never ran before.

    Example:
        >>> compiled = aotc.load("aotc-store#quickstart", module)
        >>> with torch.no_grad():
        ...     y = compiled(torch.randn(4, 128, 256))
        >>> y.shape, y.dtype
        (torch.Size([4, 128, 256]), torch.float32)
        >>> service = torch.nn.ModuleDict({"block": module})
        >>> service["block"] = compiled
        >>> len(service.state_dict()) == len(module.state_dict())
        True
    """

    __slots__ = ("_aotc",)
    _aotc: CompiledCall
    __call__: Callable[..., Any]
    __signature__ = ModelSignature()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the `__init_subclass__` of the module's class: this class is not a model of its own."""

    @property
    def artifact(self) -> Artifact:
        return self._aotc.artifact

    @property
    def module(self) -> nn.Module | None:
        return self._aotc.module

    @property
    def device(self) -> torch.device:
        return self._aotc.device

    @property
    def on_miss(self) -> OnMiss:
        return self._aotc.on_miss

    @on_miss.setter
    def on_miss(self, on_miss: OnMiss) -> None:
        self._aotc.on_miss = on_miss

    forward: Any = _Forward()

    __prepare_scriptable__ = _refusing(_tracing_refused)
    """torch.jit.script asks this first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == self._aotc.artifact.method and name:
            raise _forward_is_fixed(self)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return repr(self._aotc)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises TypeError: neither copies nor other processes can have what is mapped into this one."""
        return self._aotc.__reduce__()

    def __copy__(self) -> Any:
        return self._aotc.__reduce__()

    def __deepcopy__(self, memo: Any) -> Any:
        return self._aotc.__reduce__()

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What this call would run and why, without running it. Raises TypeError where the arguments do not bind.

        Example:
            >>> compiled.explain(torch.randn(4, 128, 256)).kind
            'exact'
            >>> compiled.explain(torch.randn(2, 128, 256)).rejected["batch=1,seq=128"][0].message
            'batch is 2, the bucket takes 1 and its inputs are not padded'
        """
        return self._aotc.explain(*args, **kwargs)

    @tells_of_memory
    def update_weights(self, weights: Weights) -> None:
        """Put other weights in the place of those that are served, all or nothing, while calls go on.

        Calls that have begun finish on the old weights; each later one uses the new ones; none sees a mixture. With a
        module, its parameters and buffers are replaced too, by new objects, so it and the compiled code agree; an
        optimizer or a reference to an old parameter does not follow. Old and new weights are held side by side until
        the calls that use the old ones have ended. CUDA graphs are captured for the new weights before they are served.
        Of a model by regions, later calls wait until those that have begun have ended.

        Args:
            weights: a safetensors file, a shard index, a folder that holds either, or a mapping of names to tensors.
                It may name some of the tensors only; the others stay. One name of tied weights is enough. Tensors of a
                mapping are copied, so a trainer may go on changing them.

        Raises:
            BindError: with everything that is wrong (unknown names, shapes, dtypes), or the artifact's weights are
                frozen. LibraryError: the GPU has no room for both, or the graphs cannot be captured anew.
                MemoryLimitError: the host has none. In each case the old weights are served on.

        Example:
            >>> compiled.update_weights({"feed_forward_norm.weight": torch.ones(256)})
        """
        self._aotc.update_weights(weights)

    def refresh(self) -> None:
        """Compare the whole module with the build once more, as the load did, and go on with it as it is now.

        For what no call looks at (the sources of its classes, say), and after submodules were replaced by equal ones.

        Raises BindError: with every way in which it is not what was built; then all is as before.

        Example:
            >>> module.attention = copy.deepcopy(module.attention)
            >>> compiled.refresh()
        """
        self._aotc.refresh()

    def stats(self) -> Stats:
        """A snapshot of the counters since the load.

        Example:
            >>> before = compiled.stats().calls
            >>> y = compiled(torch.randn(1, 128, 256))
            >>> compiled.stats().calls - before
            1
        """
        return self._aotc.stats()

    @property
    def buckets(self) -> list[str]:
        """The names of the buckets, in the artifact's order.

        Example:
            >>> compiled.buckets
            ['batch=1,seq=128', 'batch=4,seq=128']
        """
        return self._aotc.buckets


Compiled.__call__ = Compiled._aotc  # type: ignore[method-assign]  # saves one Python frame per call

HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook")
for _name in HOOKS:
    setattr(Compiled, f"register_{_name}", _refusing(_hook_refused))


Compiled.compile = _refusing(_compile_refused)  # type: ignore[method-assign]


_classes: weakref.WeakValueDictionary[tuple[type, type, str], type] = weakref.WeakValueDictionary()


def class_for(base: type[Compiled], model: type[nn.Module], method: str) -> type[Compiled]:
    """A class that inherits from both, called as the model's own: pipelines look models up by that name.

    Made without what the model's class, or its metaclass, does for subclasses. The base alone where the two cannot be
    laid out together, which is so for classes with slots.
    """
    if (made := _classes.get((base, model, method))) is None:
        names: dict[str, Any] = {"__module__": model.__module__, "__qualname__": model.__qualname__, "__slots__": ()}
        if method:
            names |= {method: Compiled._aotc, "__call__": _refusing(_call_refused)}
        try:
            made = type.__new__(type(model), model.__name__, (base, model), names)
        except TypeError:
            return base
        _classes[base, model, method] = made
    return cast("type[Compiled]", made)


# -- `child.forward = compiled` ---------------------------------------------------------------------------------------


class _BecomesMethod:
    """What stands in a module's table of children while `child.forward = compiled` puts `compiled` there.

    torch registers every module that is set as an attribute, and then would call the method of the class. This one is
    dropped as soon as torch has put the child in its place, and moves it to where a method is looked for first.
    """

    def __init__(self, owner: nn.Module, name: str, compiled: Compiled) -> None:
        self.owner, self.name, self.compiled = owner, name, compiled

    def __del__(self) -> None:
        self.owner._modules.pop(self.name, None)
        vars(self.owner)[self.name] = self.compiled.forward


def _before_registration(owner: nn.Module, name: str, child: nn.Module | None) -> None:
    """Let compiled code take the place of a method of its owner: only a method is looked up before the children, and a
    child called so would never be found. Raises BindError where the owner is compiled code."""
    if not isinstance(child, Compiled) or not hasattr(type(owner), name):
        return
    if isinstance(owner, Compiled):
        raise _forward_is_fixed(owner)
    if inspect.isroutine(getattr(type(owner), name)):
        cast("dict[str, Any]", owner._modules)[name] = _BecomesMethod(owner, name, child)


nn.modules.module.register_module_module_registration_hook(_before_registration)
