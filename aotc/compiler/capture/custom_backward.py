"""A `torch.autograd.Function` is captured as one call of an operator, so that its backward is not lost.

torch.export traces what such a function computes, and forgets its backward and the hooks of tensors. Here it sees an
operator with the function's number, tensors and symbolic sizes. AOTAutograd decomposes the operator when it traces
forward and backward together: that is, applies the function again, and follows its own backward. Hooks are refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import Function, _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from aotc.compiler.explain_failure import lines_shown
from aotc.compiler.scoped import replaced
from aotc.errors import BuildError

_library: Any = cast("Any", torch.library).Library("aotc", "FRAGMENT")
_library.define("custom_backward(int number, Tensor[] tensors, SymInt[] sizes) -> Tensor[]")


@dataclass
class _Application:
    """One call of a function's `apply`: its arguments, flattened, with None where a tensor or a symbolic size is."""

    function: type[Function]
    leaves: list[Any]
    structure: Any
    tensors: list[int]
    sizes: list[int]
    line: str
    result: tuple[list[Any], Any] = field(default=([], None))
    """What the function returns, flattened, with `_TENSOR` for each tensor, once it has run."""

    def run(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, value in (*zip(self.tensors, tensors, strict=True), *zip(self.sizes, sizes, strict=True)):
            leaves[place] = value
        apply: Any = self.function.apply
        with nullcontext() if self.result[1] is not None else self._first_run(tensors):
            returned, structure = pytree.tree_flatten(apply(*pytree.tree_unflatten(leaves, self.structure)))
        if any(isinstance(each, _SYMBOLIC) for each in returned):
            raise self._refused("returns a size", "return tensors, and compute the size outside of it")
        self.result = [_TENSOR if isinstance(each, Tensor) else each for each in returned], structure
        return [each for each in returned if isinstance(each, Tensor)]

    @contextmanager
    def _first_run(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Raises BuildError where the function reads other tensors than its arguments, or writes to an argument."""
        versions = [each._version for each in tensors]
        with _Known(tensors) as known:
            yield
        if known.has_read_others:
            raise self._refused("reads a tensor that is not among its arguments", "pass that tensor to `apply`")
        if versions != [each._version for each in tensors]:
            raise self._refused("writes to its argument", "let it compute a new tensor")

    def _refused(self, what: str, hint: str) -> BuildError:
        return BuildError(
            f"the backward of `{self.function.__qualname__}` cannot be compiled: its forward {what}",
            hint=hint,
            stage="export",
            source=self.line,
        )


_TENSOR = object()
_SYMBOLIC = torch.SymInt, torch.SymFloat, torch.SymBool
_applications: list[_Application] = []
"""By the number that the operator takes."""

_library.impl("custom_backward", lambda number, *given: _applications[number].run(*given), "CompositeImplicitAutograd")


class _Known(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, notes whether an operator takes a tensor that is neither among `tensors` nor another's result."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {id(each): each for each in tensors}
        self.has_read_others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = [each for each in pytree.tree_leaves((args, kwargs or {})) if isinstance(each, Tensor)]
        if func is not torch.ops.aten.lift_fresh.default:  # of what `torch.tensor` gives
            self.has_read_others |= any(id(each) not in self._known for each in taken)
        result = func(*args, **(kwargs or {}))
        self._known |= {id(each): each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)}
        return result


@contextmanager
def backwards_kept() -> Iterator[None]:
    """While active, torch.export traces each `Function.apply` of the model's code as one operator, where gradients are
    enabled."""
    with replaced(_SingleLevelFunction, "apply", classmethod(_apply), create=True):  # in front of C's
        yield


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    if function.__module__.startswith("torch.") and "ModIndex" in function.__name__:  # of FlexAttention: `aten.index`
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)
    within_operator = get_proxy_mode() is None
    leaves, structure = pytree.tree_flatten([tuple(each) if isinstance(each, torch.Size) else each for each in args])
    wrapped = any(isinstance(each, Tensor) and is_traceable_wrapper_subclass(each) for each in leaves)
    if within_operator or wrapped or not torch.is_grad_enabled():
        return super(_SingleLevelFunction, function).apply(*args, **kwargs)
    line = lines_shown(traceback.extract_stack())
    if issubclass(function, BackwardHookFunction):
        raise BuildError(
            "a module has full backward hooks, which compiled code would not call",
            hint="remove them before the build",
            stage="export",
            source=line,
        )
    tensors = [place for place, each in enumerate(leaves) if isinstance(each, Tensor)]
    sizes = [place for place, each in enumerate(leaves) if isinstance(each, torch.SymInt)]
    others = [None if isinstance(each, Tensor | torch.SymInt) else each for each in leaves]
    application = _Application(function, others, structure, tensors, sizes, line)
    if any(isinstance(each, _SYMBOLIC) for each in others):
        raise application._refused("takes a number that is computed from sizes", "compute it within the function")
    _applications.append(application)
    number = len(_applications) - 1
    given = iter(
        torch.ops.aotc.custom_backward(number, [leaves[place] for place in tensors], [leaves[place] for place in sizes])
    )
    returned, returned_structure = application.result
    return pytree.tree_unflatten([next(given) if each is _TENSOR else each for each in returned], returned_structure)


def _refuse_hook(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return method(*args, **kwargs)
    raise BuildError(
        f"forward calls `{method.__name__}` of a tensor: compiled code calls no hooks, and keeps gradients of "
        "parameters and inputs only",
        hint="register hooks on results, after the call; or write the backward as a torch.autograd.Function",
        stage="export",
        source=lines_shown(traceback.extract_stack()),
    )


HOOKS: Mapping[Any, Callable[..., Any]] = {
    method: partial(_refuse_hook, method)
    for method in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
}
"""Replacements of torch's functions while a model is captured."""
