"""Whether two results of one model on the same inputs are the same but for rounding: one rule for the build's checks.

A result of a model is a list of tensors and plain values. Two tensors of one form are measured by

    rms(other - first)  relative to  0.05 · rms(first) + floor
    max|other - first|  relative to  0.5 · rms(first) + 0.05 · max|first| + floor

and by the share of elements that are not finite in one of them, relative to 0.05; of tensors of integers and bools by
the share of elements that differ, relative to 0.05. More than 1 is another result. `floor` is 4 machine epsilons of
float32: sums that cancel leave such numbers. Rounding errors of bfloat16 in a deep model stay below; a wrong axis, a
branch that was not taken or a row that was not written do not.

Some models are not continuous (a router of experts, an argmax, a floor), or random. So where results differ, the model
is run again, up to three times, with all results of its operators rounded otherwise and with another seed of the random
numbers: where that changes the result by a quarter as much, nothing is said of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SHARE = 0.05
LARGEST = 0.5
FLOOR = 4 * torch.finfo(torch.float32).eps
TRIES = 3
MULTIPLE = 4

Result = Sequence[Any]


def first_difference(result: Result, other: Result, run: Callable[[int], Result]) -> int | None:
    """The position of the first part of `other` that rounding does not explain; None where there is none.

    `run` gives the result again, with random numbers of that seed. The results must be of one length.
    """
    measured = [difference(*pair) for pair in zip(result, other, strict=True)]
    suspected = [position for position, measure in enumerate(measured) if measure > 1]
    for seed in range(1, TRIES + 1):
        if not suspected:
            return None
        again = _rounded_otherwise(run, seed)
        if len(again) != len(result):
            return None
        suspected = [
            position
            for position in suspected
            if measured[position] > MULTIPLE * difference(result[position], again[position])
        ]
    return next(iter(suspected), None)


def _rounded_otherwise(run: Callable[[int], Result], seed: int) -> Result:
    try:
        with _RoundedOtherwise():  # type: ignore[no-untyped-call]
            return run(seed)
    except Exception:  # of operators that take no such mode
        return run(seed)


def difference(first: Any, other: Any) -> float:
    """More than 1 where `other` is another value, `inf` where it is of another form."""
    if not isinstance(first, Tensor) or not isinstance(other, Tensor):
        return 0.0 if type(first) is type(other) and bool(first == other) else inf
    if any(getattr(first, form) != getattr(other, form) for form in ("shape", "dtype", "layout", "device")):
        return inf
    if first.numel() == 0:
        return 0.0
    if not (first.is_floating_point() or first.is_complex() or first.is_quantized):
        return float((first != other).float().mean()) / SHARE
    one, two = _numbers(first), _numbers(other)
    finite = one.isfinite()
    if bool((finite & ~two.isfinite()).any()):
        return inf
    odd = 0.0
    if not bool(finite.all()):
        odd = float((~finite & ~((one == two) | (one.isnan() & two.isnan()))).float().mean()) / SHARE
        finite &= two.isfinite()
        one, two = one[finite], two[finite]
        if one.numel() == 0:
            return odd
    error = two - one
    size, largest = _rms(one), _largest(one)
    return max(
        odd,
        _rms(error) / (SHARE * size + FLOOR),
        _largest(error) / (LARGEST * size + SHARE * largest + FLOOR),
    )


def _numbers(tensor: Tensor) -> Tensor:
    """In float32 or float64; of a complex tensor both parts."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _rms(values: Tensor) -> float:
    largest = _largest(values)  # whose square may be more than the dtype holds
    return largest * float((values / largest).square().mean().sqrt()) if largest else 0.0


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


class _RoundedOtherwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each new floating-point result of an operator is off by a machine epsilon of its dtype, but for whole numbers:
    positions, masks, counts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is None or any(item.alias_info is not None for item in schema.returns):
            return result
        return pytree.tree_map_only(Tensor, _off_by_an_epsilon, result)


def _off_by_an_epsilon(tensor: Tensor) -> Tensor:
    if (
        type(tensor) is not Tensor
        or tensor.is_nested
        or tensor.layout != torch.strided
        or not tensor.is_floating_point()
    ):
        return tensor
    if tensor.element_size() == 1:  # torch computes with no floats of 8 bits
        return tensor
    step = torch.finfo(tensor.dtype).eps
    factors = torch.where(torch.rand(tensor.shape, device=tensor.device) < 0.5, 1 - step, 1 + step).to(tensor.dtype)
    return torch.where(tensor == tensor.round(), tensor, tensor * factors)
