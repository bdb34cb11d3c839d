"""Model code that behaves differently under torch.export than in eager."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def rows_are_set_by_integer_tensors() -> AbstractContextManager[Any]:
    """While active, `x[i] = row` treats an integer tensor without axes as one of one axis.

    Export would need the integer's value.
    """
    assign = Tensor.__setitem__

    def assigned(x: Tensor, index: Any, value: Any) -> None:
        first, *rest = index if isinstance(index, tuple) else (index,)
        if isinstance(first, Tensor) and first.dim() == 0 and first.dtype in _INTEGERS:
            index = (first[None], *rest)
        assign(x, index, value)

    return mock.patch.object(Tensor, "__setitem__", assigned)


def dropout_of_nothing_is_no_copy() -> AbstractContextManager[Any]:
    """While active, dropout that drops nothing returns its input itself.

    Export would copy it: later writes to one of the two would not be seen in the other.
    """
    dropout = torch._VF.dropout

    def dropped(x: Tensor, p: float, train: bool) -> Tensor:
        return dropout(x, p, train) if train and p > 0 else x

    return mock.patch.object(torch._VF, "dropout", dropped)


def pooled_sizes_are_floored() -> AbstractContextManager[Any]:
    """While active, the pooled size of a range is one expression for the whole range.

    torch corrects the quotient, as C++ needs it; Python's is floored, and needs no correction. The correction checks a
    remainder, which only some sizes of the range have.
    """
    return mock.patch.object(torch._meta_registrations, "div_rtn", operator.floordiv)


def refusals_need_no_advice() -> AbstractContextManager[Any]:
    """While active, torch.export reports the conditions that a range violates even if it cannot suggest a fix.

    A bound that is not an integer, like `25/12 <= rows` for 24 elements a row, makes its suggestion fail with an
    AssertionError.
    """
    from torch.fx.experimental.symbolic_shapes import DimConstraints

    advise = DimConstraints.prettify_results

    def advice(*args: Any) -> str:
        with suppress(AssertionError):
            return advise(*args)
        return ""

    return mock.patch.object(DimConstraints, "prettify_results", advice)
