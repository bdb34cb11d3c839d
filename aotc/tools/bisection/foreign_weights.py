"""Weights of an artifact that are not the module's: bound in another order, or held in the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from aotc.compiler.wrong_code.bisection_records import Culprit
from aotc.compiler.wrong_code.search import numbers_of
from aotc.records import Argument
from aotc.verify.comparison import Comparison, CouldNotRun
from aotc.verify.other_weights import copy_state

MOST = 300
"""Weights that are changed one by one: each costs a call of eager, of the reference and of compiled code."""


def wrongly_bound(
    stored: Sequence[Argument], captured: Sequence[Argument], tensors: Mapping[str, Tensor]
) -> Culprit | None:
    """The first weight in whose place the artifact's record binds another."""
    if len(stored) != len(captured):
        return None
    for position, (mine, right) in enumerate(zip(stored, captured, strict=True)):
        if mine.state is None or right.state is None or mine.state == right.state:
            continue
        return Culprit(
            kind="weight",
            names=(right.state,),
            numbers=numbers_of(tensors.get(mine.state), tensors.get(right.state), tensors.get(right.state)),
            detail=f"argument {position} of the library is `{right.state}`, and the artifact's record binds "
            f"`{mine.state}` there",
        )
    return None


def not_followed(comparison: Comparison, names: Sequence[str], is_right: Callable[[], bool]) -> Culprit | None:
    """The first weight that compiled code does not follow when it is changed, since it holds an older value of it.

    `is_right` compares a call of the compiled code with eager. The weights are as before afterwards.
    """
    own = {**dict(comparison.eager.named_parameters()), **dict(comparison.eager.named_buffers())}
    for name in names[:MOST]:
        tensor = own.get(name)
        if tensor is None or not tensor.is_floating_point():
            continue
        before = tensor.detach().clone()
        generator = torch.Generator(tensor.device).manual_seed(1)
        factors = torch.empty(tensor.shape, dtype=torch.float32, device=tensor.device)
        tensor.data.mul_(factors.uniform_(0.5, 1.5, generator=generator))
        try:
            if torch.equal(before, tensor.data):
                continue
            _follow(comparison)
            right = is_right()
        except CouldNotRun:  # with such weights
            continue
        finally:
            numbers = numbers_of(before, tensor, tensor)
            tensor.data.copy_(before)
            _follow(comparison)
        if not right:
            return Culprit(
                kind="weight",
                names=(name,),
                numbers=numbers,
                detail=f"eager follows a change of `{name}`, and compiled code does not: it holds an older value",
            )
    return None


def _follow(comparison: Comparison) -> None:
    copy_state(comparison.eager, comparison.reference)
    copy_state(comparison.eager, comparison.module)
