"""What torch.export makes of a model's code, where eager does something else."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def rows_are_set_by_integer_tensors() -> AbstractContextManager[Any]:
    """A context in which `x[i] = row` takes an integer tensor without axes as one of one axis.

    Export would ask for the integer's value.
    """
    assign = Tensor.__setitem__

    def assigned(x: Tensor, index: Any, value: Any) -> None:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, Tensor) and first.dim() == 0 and first.dtype in _INTEGERS:
            index = (first[None], *rest)
        assign(x, index, value)

    return mock.patch.object(Tensor, "__setitem__", assigned)


def dropout_of_nothing_is_no_copy() -> AbstractContextManager[Any]:
    """A context in which dropout that drops nothing is the tensor that it is given.

    Export would copy it: what forward then writes to the one would not be seen in the other.
    """
    dropout = torch._VF.dropout

    def dropped(x: Tensor, p: float, train: bool) -> Tensor:
        return dropout(x, p, train) if train and p > 0 else x

    return mock.patch.object(torch._VF, "dropout", dropped)


def pooled_sizes_are_floored() -> AbstractContextManager[Any]:
    """A context in which the size of a pooled range is one for all of it.

    torch corrects the quotient that it is of, as C++'s needs and Python's, which is floored, does not; so it asks for a
    remainder, which only some sizes of the range have.
    """
    return mock.patch.object(torch._meta_registrations, "div_rtn", operator.floordiv)


def refusals_need_no_advice() -> AbstractContextManager[Any]:
    """A context in which torch.export says which conditions a range does not meet also where it cannot say what to
    change.

    A bound that is not an integer, like `25/12 <= rows` of 24 elements a row, ends its advice with an AssertionError.
    """
    from torch.fx.experimental.symbolic_shapes import DimConstraints

    advise = DimConstraints.prettify_results

    def advice(*args: Any) -> str:
        with suppress(AssertionError):
            return advise(*args)
        return ""

    return mock.patch.object(DimConstraints, "prettify_results", advice)
