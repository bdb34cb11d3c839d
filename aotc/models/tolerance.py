"""The rule by which compiled outputs count as right.

Neither eager nor compiled code is exact, so both are judged against the same model computed in float64, also where the
model asks for less (`aotc.models.float64_reference`). The rule is that of PyTorch's own benchmark suite
(`torch._dynamo.utils.same`): the compiled error may be at most a small multiple of eager's own error, plus a floor. Two
norms are used, since each sees what the other hides: the root mean square of the error, in which a systematic deviation
shows, and its maximum, in which a single wrong element does.

    rms(compiled - reference) ≤ 2 · rms(eager - reference) + floor · rms(reference)
    max|compiled - reference| ≤ 4 · max|eager - reference| + 8 · floor · max|reference|

`floor` is rounding alone: 4 machine epsilons of the output's dtype, but half a one for 16 bits, where compiled code
computes in float32 and rounds once (4 would be 3 % for bfloat16, and hide an error of 1 %). A reference of the output's
own dtype (float64, or a model that runs in no other) says nothing of eager's error: then `floor` is at least the rtol
of `torch.testing.assert_close`.

What is infinite must be so in eager too; a reference beyond the dtype's range counts as what the dtype makes of it. NaN
counts as right only where eager and the reference are both NaN. Where it fails for a few rows alone, the verdict says
so. Outputs that are not floating-point numbers must be equal to eager's or to the reference's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from aotc.tensors.rounding import largest, rms

RMS_MULTIPLE = 2.0
MAX_MULTIPLE = 4.0
MAX_FLOOR_MULTIPLE = 8.0
_EPSILONS = 4.0
_EPSILONS_16_BITS = 0.5


class Judgement(msgspec.Struct, frozen=True):
    """One output's verdict: errors relative to the reference's size (rms), what was allowed, and why it failed.

    `finite`: whether eager has any finite element; where it has none, there are no errors to compare.
    """

    ok: bool
    error: float
    eager_error: float
    allowed: float
    detail: str = ""
    finite: bool = True


def floor_of(dtype: torch.dtype) -> float:
    """The relative error that rounding alone explains; see the module's docstring."""
    info = torch.finfo(dtype)
    return (_EPSILONS if info.bits > 16 else _EPSILONS_16_BITS) * info.eps


_ASSERT_CLOSE_RTOL = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}


QUANTISED = 1 / 256
"""The floor for a model that rounds values of a call to 8 bits, as dynamic quantisation does: the last bit of a float
decides there between two levels."""

TF32 = 2**-10
"""The floor for convolutions of float32 on a GPU: torch lets cuDNN round their operands to TF32, whose epsilon this is,
and cuDNN does so or not by layout, which compiled code chooses for itself."""


def may_use_tf32(module: nn.Module) -> bool:
    """Whether cuDNN may round to TF32 in this module: `torch.backends.cudnn.allow_tf32`, and a convolution of float32.

    >>> may_use_tf32(nn.Conv2d(3, 8, 3))  # on a CPU
    False
    """
    return torch.backends.cudnn.allow_tf32 and any(
        isinstance(layer, nn.modules.conv._ConvNd)
        and layer.weight.device.type == "cuda"
        and layer.weight.dtype == torch.float32
        for layer in module.modules()
    )


def judge(compiled: Tensor, eager: Tensor, reference: Tensor, least: float = 0.0) -> Judgement:
    """Compare one output; `reference` is float64, or the highest precision that could be run. `least` is the floor's.

    A reference of another shape than eager's is left out: rounding decides which elements are chosen (`x[x > 0]`).
    """
    if (compiled.shape, compiled.dtype) != (eager.shape, eager.dtype):
        return failed(
            f"eager gives {eager.dtype} {list(eager.shape)}, compiled gives {compiled.dtype} {list(compiled.shape)}"
        )
    if compiled.layout != eager.layout:
        return failed(f"eager gives a {eager.layout} tensor, compiled gives a {compiled.layout} one")
    reference = reference if reference.shape == eager.shape else eager
    compiled, eager, reference = (_dense(tensor.detach().cpu()) for tensor in (compiled, eager, reference))
    if compiled.numel() == 0:
        return Judgement(True, 0.0, 0.0, 0.0)
    if not (compiled.is_floating_point() or compiled.is_complex()):
        return _judge_exact(compiled, eager, reference.to(eager.dtype))
    if compiled.is_complex():
        reference = reference if reference.is_complex() else reference.to(torch.complex128)
        compiled, eager, reference = map(_parts, (compiled, eager, reference))
    floor = max(floor_of(compiled.dtype), least)
    if reference.dtype == compiled.dtype:
        floor = max(floor, _ASSERT_CLOSE_RTOL.get(compiled.dtype, floor))
    return _judge_floating(compiled, eager, reference.to(torch.float64), floor)


def _judge_exact(compiled: Tensor, eager: Tensor, reference: Tensor) -> Judgement:
    wrong = int(((compiled != eager) & (compiled != reference)).sum())
    if wrong:
        return failed(f"{wrong} of {compiled.numel()} elements are neither eager's nor the reference's")
    return Judgement(True, 0.0, 0.0, 0.0)


def _judge_floating(compiled: Tensor, eager: Tensor, reference: Tensor, floor: float) -> Judgement:
    # What is beyond the dtype's range becomes what the dtype has for it: an infinity, NaN, or its largest number.
    beyond = reference.abs() > torch.finfo(compiled.dtype).max
    reference = torch.where(beyond, reference.to(compiled.dtype).to(torch.float64), reference)
    if compiled.dtype.itemsize == 1:  # torch compares no floats of 8 bits; float32 holds each of them
        compiled, eager = compiled.float(), eager.float()
    finite = torch.isfinite(reference) & torch.isfinite(eager)
    invented = torch.isnan(compiled) & ~torch.isnan(reference)
    odd = int((torch.where(finite, ~torch.isfinite(compiled), ~_same(compiled, eager)) | invented).sum())
    if odd:
        return failed(f"{odd} of {compiled.numel()} elements are NaN or infinite, and eager's are not, or the reverse")
    if not finite.any():
        return Judgement(True, 0.0, 0.0, 0.0, finite=bool(torch.isfinite(eager).any()))
    errors = _Errors(compiled.to(torch.float64) - reference, eager.to(torch.float64) - reference, reference, floor)
    all_of_it = errors.among(finite)
    detail = "" if all_of_it.ok else f"{all_of_it.detail}{errors.where(finite)}"
    return msgspec.structs.replace(all_of_it, detail=detail)


class _Errors(NamedTuple):
    """The errors of compiled code and of eager, in float64, and what they are errors of."""

    compiled: Tensor
    eager: Tensor
    exact: Tensor
    floor: float

    def among(self, elements: Tensor) -> Judgement:
        """The rule, for the elements that this mask has."""
        every = bool(elements.all())  # then no copies are made
        error, eager_error, exact = (each if every else each[elements] for each in self[:3])
        size = rms(exact) or 1.0
        allowed = RMS_MULTIPLE * rms(eager_error) + self.floor * size
        allowed_max = MAX_MULTIPLE * largest(eager_error) + MAX_FLOOR_MULTIPLE * self.floor * largest(exact)
        found, found_max = rms(error), largest(error)
        ok = found <= allowed and found_max <= allowed_max
        said = f"rms error {found:.3e}, allowed {allowed:.3e}; largest {found_max:.3e}, allowed {allowed_max:.3e}"
        said += f" (absolute, of values of rms {size:.3e})"
        return Judgement(ok, found / size, rms(eager_error) / size, allowed / size, "" if ok else said)

    def where(self, elements: Tensor) -> str:
        """Which rows along the last axis are wrong, where it is right without an eighth of them at most."""
        if self.exact.dim() < 2:
            return ""
        worst = torch.where(elements, self.compiled.abs(), 0).amax(-1)
        rows = worst.flatten().argsort(descending=True)

        def is_right_without(count: int) -> bool:
            right = torch.ones(rows.numel(), dtype=torch.bool)
            right[rows[:count]] = False
            rest = elements & right.view(worst.shape)[..., None]
            return bool(rest.any()) and self.among(rest).ok

        few = range(1, rows.numel() // 8 + 1)
        count = bisect_left(few, True, key=is_right_without) + 1
        if count not in few:
            return ""
        at = [int(index) for index in torch.unravel_index(rows[0], worst.shape)]
        return f"; without {count} of {rows.numel()} rows, the worst at {at}, it is right: {_LIKE_A_CHOICE}"


_LIKE_A_CHOICE = "as where rounding decides between two, like a router's experts, or where an index is wrong"


def _parts(tensor: Tensor) -> Tensor:
    """The real and imaginary parts side by side, along the last axis."""
    parts = torch.view_as_real(tensor.resolve_conj())
    return parts.flatten(-2) if parts.dim() > 1 else parts


def _dense(tensor: Tensor) -> Tensor:
    """The dense form of a sparse tensor, the dequantised one of a quantised tensor."""
    if tensor.is_quantized:
        return tensor.dequantize()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (torch.isnan(a) & torch.isnan(b))


def failed(detail: str) -> Judgement:
    """The verdict on an output for which no error can be computed."""
    return Judgement(False, float("inf"), float("nan"), 0.0, detail)


# -- gradients --------------------------------------------------------------------------------------------------------


def judge_gradients(
    names: Sequence[str],
    compiled: Sequence[Tensor | None],
    eager: Sequence[Tensor | None],
    exact: Sequence[Tensor | None],
    least: float = 0.0,
) -> list[Judgement]:
    """One judgement for each gradient, or parameter that was trained; `least` is the floor's.

    A gradient that is 0 apart from rounding, as that of a bias before a normalisation, is noise in all three. So an
    error is also allowed if it is at most eager's largest error in any gradient, or the rounding of the largest
    gradient. This holds for gradients that are noise in eager, too, and for others up to a quarter of their size.
    """
    found = []
    largest = max((size_of(each) for each in exact), default=0.0)
    noise = max((size_of(error_of(one, true)) for one, true in zip(eager, exact, strict=True)), default=0.0)
    for name, given, own, true in zip(names, compiled, eager, exact, strict=False):
        if given is None or own is None or true is None:
            missing = "" if given is own is None else "eager has one, compiled code none, or the reverse"
            found.append(Judgement(not missing, 0.0, 0.0, 0.0, f"{name}: {missing}" if missing else ""))
            continue
        rounding = floor_of(own.dtype) * largest
        judgement = judge(given, own, true, least)
        error, own_error, size = size_of(error_of(given, true)), size_of(error_of(own, true)), size_of(true)
        is_noise = own_error > 0.1 * size or size <= floor_of(true.dtype) * largest
        if error <= max(noise, rounding) and (is_noise or (error <= 0.25 * size and not judgement.ok)):
            judgement = Judgement(True, 0.0, 0.0, 0.0)
        found.append(named(name, judgement))
    return found


def error_of(one: Tensor | None, true: Tensor | None) -> Tensor | None:
    return None if one is None or true is None else one.detach().double() - true.detach().double()


def size_of(tensor: Tensor | None) -> float:
    """The root mean square; 0 for an empty tensor."""
    return rms(tensor.detach().double()) if tensor is not None and tensor.numel() else 0.0


def named(name: str, judgement: Judgement) -> Judgement:
    return msgspec.structs.replace(judgement, detail=f"{name}: {judgement.detail}") if judgement.detail else judgement
