"""A call of a model and one of its compiled code, with extreme values: for a build's smoke run and `aotc verify`.

Eager decides what is right (`aotc.models.decided_values`). A model that fails there with such values, or whose results
are random or have sizes that depend on values, is not compared, with a reason.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.models.calls import Called, has_drawn, names_of
from aotc.models.decided_values import ends_the_process, first_wrong_value
from aotc.models.extreme_inputs import Draw, Freedom, extreme_leaves
from aotc.models.factory import told
from aotc.tensors.rounding import Result, uncompiled


class AtExtremes(NamedTuple):
    """The result of one draw: what is wrong, as a sentence; or why nothing was compared. Both are empty if all is
    right. `leaves` are the values of the draw."""

    wrong: str = ""
    skipped: str = ""
    leaves: Sequence[Any] = ()


def compare_at_extreme_values(
    eager: Called,
    compiled: Callable[[Sequence[Any]], Result],
    free: Sequence[Freedom],
    device: torch.device,
    draw: Draw = "extreme",
    step: float = 0.0,
) -> AtExtremes:
    """Call `eager` with its leaves made extreme, then `compiled`, which calls the compiled code with such leaves and
    returns what `Called.call` does. `step` is as in `first_wrong_value`."""
    is_cpu = device.type == "cpu"
    reason, leaves, result = "", list(eager.leaves), None
    watching = WatchedCall()  # type: ignore[no-untyped-call]
    for wide_integers in (True, False) if is_cpu else (False,):
        leaves = extreme_leaves(eager.leaves, free, draw, wide_integers=wide_integers)
        if _same_leaves(leaves, eager.leaves):
            return AtExtremes(skipped="no input is free to have extreme values")
        try:
            with uncompiled(), watching:
                result = _call(eager, leaves)
            synchronize(device)  # a wrong index on a GPU
            break
        except Exception as error:  # the model's own
            traceback.print_exc()
            reason = str(error) if isinstance(error, NotTried) else f"the model fails in eager: {told(error)}"
    if result is None:
        return AtExtremes(skipped=reason, leaves=leaves)
    if has_drawn(device):
        return AtExtremes(skipped="the model draws random numbers", leaves=leaves)
    try:
        given = compiled(leaves)
        synchronize(device)
    except Exception as error:
        traceback.print_exc()
        if "CUDA error" in str(error):
            return AtExtremes(f"it ends with {told(error)}", leaves=leaves)
        return AtExtremes(skipped=f"the compiled code raises, and eager does not: {told(error)}", leaves=leaves)

    def call(others: Sequence[Any]) -> Result:
        return _call(eager, others)

    found = first_wrong_value(result, given, call, leaves, step, kinds_only=watching.rounds)
    if found is not None and is_cpu:  # the order of several writes to one element is undefined
        with one_thread():
            found = first_wrong_value(call(leaves), compiled(leaves), call, leaves, step, kinds_only=watching.rounds)
    if found is None:
        return AtExtremes(leaves=leaves)
    names = names_of(result, eager.signature, eager.written)
    name = names[found.position] if len(given) == len(result) else "the result"
    return AtExtremes(f"{name}{found.path} {found.said}", leaves=leaves)


def _call(called: Called, leaves: Sequence[Any]) -> Result:
    return called._replace(leaves=leaves).call(called.module)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _same_leaves(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(
        torch.equal(one, other) if isinstance(one, Tensor) else True for one, other in zip(some, others, strict=True)
    )


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- sizes that depend on values --------------------------------------------------------------------------------------


class NotTried(RuntimeError):
    """The model cannot be run with extreme values."""


_BOUNDED = frozenset(
    {
        *("index", "nonzero", "masked_select", "unique", "_unique", "_unique2", "unique_dim", "unique_consecutive"),
        *("equal", "allclose", "is_nonzero", "_is_all_true", "_is_any_true"),
    }
)
"""Operators whose results are not larger than their operands and indices, or only true or false."""


class _Refusing:
    supports_higher_order_operators = True
    rounds = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tags = getattr(func, "tags", ())
        reads = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if reads and getattr(func, "_opname", "") not in _BOUNDED and not _is_bool(args):
            raise NotTried(f"the model reads a value as a number, perhaps a size: {func}")
        if ends_the_process(func, args):
            raise NotTried(f"{func} of NaN or infinities may end the process in eager")
        result = func(*args, **(kwargs or {}))
        self.rounds = self.rounds or rounds_to_8_bits(args, result)
        return result


def rounds_to_8_bits(given: Any, result: Any) -> bool:
    """Whether an operator makes numbers of 8 bits of wider floats, as dynamic quantisation does of activations."""
    made, taken = ([each for each in pytree.tree_leaves(of) if isinstance(each, Tensor)] for of in (result, given))
    if not any(each.element_size() == 1 and each.dtype is not torch.bool for each in made):
        return False
    return any(each.is_floating_point() and each.element_size() > 1 for each in taken)


def _is_bool(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.bool


class WatchedCall(_Refusing, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises NotTried before a value becomes a number of Python, such as a size (of a huge one, all memory would not be
    enough), and before an operator of LAPACK gets numbers that are not finite. The handler is inherited, as torch
    imports its compiler for a class that defines one."""
