"""A function that takes its module first, as the forward of a module that holds that one.

A build makes such a module by `with_function`, which its manifest names as the factory.
"""

from __future__ import annotations

import importlib
import inspect
from types import FunctionType
from typing import Any

from torch import nn


class FunctionOf(nn.Module):
    """A function whose first argument is `module`. Each function has a class of its own, with its name and its file: so
    the function's code is among the code of the module's classes."""

    function: FunctionType
    module: nn.Module


def function_of(function: FunctionType, module: nn.Module) -> FunctionOf:
    """A module whose forward is this function of that module."""

    def forward(self: FunctionOf, *args: Any, **kwargs: Any) -> Any:
        return function(self.module, *args, **kwargs)

    forward.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]  # its first argument is `self`
    own = {"__module__": function.__module__, "__qualname__": function.__qualname__, "forward": forward}
    made: FunctionOf = type(function.__name__, (FunctionOf,), {**own, "function": staticmethod(function)})()
    made.module = module
    return made


def with_function(function: str, module: nn.Module, decorators: int = 0) -> FunctionOf:
    """As `function_of`, of a function by its name `package.module:function`, with so many of its innermost decorators:
    those that stand below `@aotc.compile`."""
    name, _, attribute = function.partition(":")
    return function_of(undecorated(getattr(importlib.import_module(name), attribute))[decorators], module)


def undecorated(function: Any) -> list[Any]:
    """A function without decorators, and with one, two, and so on."""
    inner = getattr(function, "__wrapped__", None)
    return [*(undecorated(inner) if inner is not None else ()), function]
