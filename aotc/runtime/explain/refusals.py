"""What compiled code refuses to be in a module's place: each error says what to do instead."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import nn

from aotc.errors import BindError
from aotc.runtime.compiled import Compiled


def tracing_refused(_: object) -> BindError:
    return BindError(
        "compiled code cannot be traced or scripted: it has no Python code that torch could follow",
        hint="trace the module: compiled.module",
    )


def forward_is_fixed(compiled: Compiled) -> BindError:
    return BindError(
        f"the forward of {compiled!r} cannot be replaced: its calls would not run it",
        hint="put a module of your own that calls it in its place; libraries that wrap forwards to move weights "
        "(accelerate's offloading) cannot be used with compiled code",
    )


def hook_refused(compiled: Compiled) -> BindError:
    return BindError(
        f"no hook can be registered on {compiled!r}: its calls would not run it",
        hint="register it on a module that runs eagerly around it; one that is part of the model, before `aotc build`",
    )


def compile_refused(compiled: Compiled) -> BindError:
    return BindError(
        f"{compiled!r} is compiled already, and torch.compile would import its compilers into this process",
        hint="leave out the call of compile(); to compile the module itself, call compiled.module.compile()",
    )


def call_refused(compiled: Compiled) -> BindError:
    method = compiled.artifact.method
    return BindError(
        f"{compiled!r} was compiled for the method `{method}`, and a call of it would be another than the module's",
        hint=f"call compiled.{method}(…); compiled.module(…) runs the module's own forward",
    )


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


def become_method(owner: nn.Module, name: str, compiled: Compiled) -> None:
    """Let `compiled` take the place of a method of its owner. Raises BindError where the owner is compiled code."""
    if isinstance(owner, Compiled):
        raise forward_is_fixed(owner)
    if inspect.isroutine(getattr(type(owner), name)):
        cast("dict[str, Any]", owner._modules)[name] = _BecomesMethod(owner, name, compiled)
