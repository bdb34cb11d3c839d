"""Whether two results of one model on the same inputs differ by rounding alone: one rule for a build's checks.

A result of a model is a list of tensors and other values, which are taken apart (`aotc.tensors.contents`). Two tensors
of one form are measured in two norms: the root mean square of the error, in which a systematic deviation shows, and its
maximum, in which a single wrong element does.

    rms(other - first)  relative to  rms · rms(first) + floor
    max|other - first|  relative to  spread · rms(first) + largest · max|first| + floor

and by the share of elements that are not finite in one of them, relative to `share`; of tensors of integers and bools
by the share of elements that differ, relative to `share`. More than 1 is another result. What is allowed is one of two:

- `ROUNDED`, where another program computes the same (the captured graph, the compiled code): rounding errors of
  bfloat16 in a deep model stay below; a wrong axis, a branch that was not taken or a row that was not written do not.
  `floor` is 4 machine epsilons of float32: sums that cancel leave such numbers. Nothing else is absolute: probabilities
  of many classes are small.
- `REPEATED`, where the same program computes again: half of the digits, of the largest number, since sums are not
  always taken in the same order.

(`aotc verify` has float64 results as well, and allows a multiple of eager's own error in the same norms:
`aotc.models.tolerance`.)

Some models are not continuous (a router of experts, an argmax, a floor), or random. So where results differ, the model
is run again, up to three times, with all results of its operators rounded otherwise and with another seed of the random
numbers: where that changes the result by a quarter as much, nothing is said of it. Whole numbers, as a token that is
chosen, may change in few of such runs: they may also be those of one of 16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.tensors.contents import contents, same_values

TRIES = 3
TRIES_OF_CHOICES = 16
MULTIPLE = 4

Result = Sequence[Any]


class Allowed(NamedTuple):
    """By how much two tensors may differ, as the module's docstring says; `largest` is a number, or with `digits` that
    share of the dtype's digits."""

    rms: float
    spread: float
    largest: float
    floor: float
    share: float
    digits: float = inf


ROUNDED = Allowed(rms=0.05, spread=0.5, largest=0.05, floor=4 * torch.finfo(torch.float32).eps, share=0.05)
REPEATED = Allowed(rms=inf, spread=0.0, largest=0.0, floor=0.0, share=0.0, digits=0.5)


def first_difference(result: Result, other: Result, run: Callable[[int], Result]) -> int | None:
    """The position of the first part of `other` that rounding does not explain; None where there is none.

    `run` gives the result again, with random numbers of that seed. The results must be of one length.
    """
    measured = [difference(*pair) for pair in zip(result, other, strict=True)]
    suspected = [position for position, measure in enumerate(measured) if measure > 1]
    for seed in range(1, TRIES + 1):
        if not suspected:
            return None
        again = rounded_otherwise(run, seed)
        if len(again) != len(result):
            return None
        suspected = [
            position
            for position in suspected
            if measured[position] > MULTIPLE * difference(result[position], again[position])
        ]
    return next((position for position in suspected if not _is_a_choice(result, other, position, run)), None)


def _is_a_choice(result: Result, other: Result, position: int, run: Callable[[int], Result]) -> bool:
    """Whether that part of `other` has whole numbers of the result, or of one of its runs that were rounded
    otherwise."""
    first, second = result[position], other[position]
    if not isinstance(first, Tensor) or first.is_floating_point() or first.is_complex() or first.shape != second.shape:
        return False
    seen = second == first
    for seed in range(1, TRIES_OF_CHOICES + 1):
        seen |= second == rounded_otherwise(run, seed)[position]
    return bool((~seen).double().mean() <= ROUNDED.share)


def said_of(first: Any, other: Any) -> str:
    """How `other` differs, as the end of a sentence: by how much, or that only one of the two has nan."""
    parts, others = contents(first), contents(other)
    for path, one in parts.items():
        if difference(one, two := others.get(path)) > 1 and has_nan(one) is not has_nan(two):
            has = ["nan" if has_nan(part) else "numbers" for part in (one, two)]
            return f"has {has[0]} in the model and {has[1]} in the compiled code"
    return f"differs by {difference(first, other):.3g} × the tolerance for rounding"


def has_nan(part: Any) -> bool:
    dense = isinstance(part, Tensor) and part.layout == torch.strided and part.is_floating_point()
    return dense and bool(part.isnan().any())


def is_repeated(result: Result, again: Result) -> bool:
    """Whether `again` is what the same program gives once more."""
    return len(result) == len(again) and all(
        difference(first, other, REPEATED) <= 1 for first, other in zip(result, again, strict=True)
    )


def rounded_otherwise(run: Callable[[int], Result], seed: int) -> Result:
    """What `run` gives with this seed, where all results of its operators are rounded otherwise."""
    try:
        with uncompiled(), _RoundedOtherwise():  # type: ignore[no-untyped-call]
            return run(seed)
    except Exception:  # of operators that take no such mode
        return run(seed)


def difference(first: Any, other: Any, allowed: Allowed = ROUNDED) -> float:
    """More than 1 where `other` is another value, `inf` where it is of another form."""
    parts, others = contents(first), contents(other)
    if parts.keys() != others.keys():
        return inf
    return max((_difference(part, others[path], allowed) for path, part in parts.items()), default=0.0)


def _difference(first: Any, other: Any, allowed: Allowed) -> float:
    if not isinstance(first, Tensor) or not isinstance(other, Tensor):
        return 0.0 if same_values(first, other) else inf
    if any(getattr(first, form) != getattr(other, form) for form in ("shape", "dtype", "layout", "device")):
        return inf
    if first.numel() == 0:
        return 0.0
    if not (first.is_floating_point() or first.is_complex() or first.is_quantized):
        return _relative(float((first != other).float().mean()), allowed.share)
    one, two = numbers(first), numbers(other)
    finite = one.isfinite()
    if bool((finite & ~two.isfinite()).any()):
        return inf
    odd = 0.0
    if not bool(finite.all()):
        odd = float((~finite & ~((one == two) | (one.isnan() & two.isnan()))).float().mean())
        odd = _relative(odd, allowed.share)
        finite &= two.isfinite()
        one, two = one[finite], two[finite]
        if one.numel() == 0:
            return odd
    error = two - one
    size, most = rms(one), largest(one)
    digits = 2 * torch.finfo(one.dtype if first.is_quantized else first.dtype).eps ** allowed.digits
    return max(
        odd,
        _relative(rms(error), (allowed.rms * size if size else 0.0) + allowed.floor),
        _relative(largest(error), allowed.spread * size + (allowed.largest + digits) * most + allowed.floor),
    )


def _relative(error: float, allowed: float) -> float:
    return error / allowed if allowed else inf if error else 0.0


def numbers(tensor: Tensor) -> Tensor:
    """In float32 or float64, dense; of a complex tensor both parts side by side, along the last axis."""
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    if tensor.is_complex():
        parts = torch.view_as_real(tensor.resolve_conj())
        tensor = parts.flatten(-2) if parts.dim() > 1 else parts
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def rms(values: Tensor) -> float:
    most = largest(values)  # whose square may be more than the dtype holds
    return most * float((values / most).square().mean().sqrt()) if most else 0.0


def largest(values: Tensor) -> float:
    return float(values.abs().max())


class _RoundedOtherwise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Each new floating-point result of an operator is off by a machine epsilon of its dtype. Whole numbers stay:
    they are positions, masks, counts."""

    supports_higher_order_operators = True  # FlexAttention is one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is None or any(item.alias_info is not None for item in schema.returns):
            return result
        return pytree.tree_map_only(Tensor, _off_by_an_epsilon, result)


def uncompiled() -> AbstractContextManager[Any]:
    """While active, what eager hands to Dynamo by itself (`torch.cond`, loops, FlexAttention) does without it: Dynamo
    takes no dispatch mode, and up to torch 2.13 a call after one fails, too."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _off_by_an_epsilon(tensor: Tensor) -> Tensor:
    if (
        type(tensor) is not Tensor
        or tensor.is_nested
        or tensor.layout != torch.strided
        or not tensor.is_floating_point()
        or tensor._is_zerotensor()  # has no memory, which is read here
    ):
        return tensor
    if tensor.element_size() == 1:  # torch computes with no floats of 8 bits
        return tensor
    step = torch.finfo(tensor.dtype).eps
    factors = torch.where(torch.rand(tensor.shape, device=tensor.device) < 0.5, 1 - step, 1 + step).to(tensor.dtype)
    return torch.where(tensor == tensor.round(), tensor, tensor * factors)
