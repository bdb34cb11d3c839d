"""Where compiled code is wrong at extreme values: at an element that eager *decides*, and only there.

At NaN, infinities and the largest and smallest numbers, two right programs may give different results: a sum that
overflows in one order does not in another one, code that keeps half precision in float32 has no infinity where eager
has one, a Welford variance of huge numbers is NaN where a two-pass one is infinite. So eager is asked again, a few
times, each time with something changed that no compiler promises to keep. These results are *witnesses*:

- `in float64`: every operator computes in float64, and the result is rounded to eager's dtype. Shows what overflows,
  underflows or is rounded within eager's own dtype.
- `flipped`: each zero and NaN that an operator computes has the other sign, and each integer that C++ leaves undefined
  (a float out of the integer's range is cast, a shift by more than the width) has other bits; what a coordinate of
  `grid_sample` that is not finite gives is of another kind, and the index of a NaN that a pooling chooses another one.
- `in a smaller range`: what an operator computes above half of the dtype's largest number is infinite, what is near its
  denormals is 0, and denormal inputs are 0. Sums and products that may overflow in another order are NaN, as are
  variances that overflow. What comes of an infinity in a running mean (beside a variance) or in an interpolation is of
  another kind: formulas differ there.
- `rounded otherwise`: each input and each result of an operator is off by an epsilon at random; up to 6 times.

An element is decided if eager and all witnesses have the same kind there (NaN, inf, -inf, or finite), and, where
finite, the same value within a relative √epsilon of the dtype; of integers and bools, if all are equal.

    wrong       a decided element of another kind, or of integers and bools another value: what has NaN or an infinity
                in eager, whatever its order, its precision and its signs of zeros, has it in compiled code, too
    wrong       a finite element that differs by more than √epsilon of eager's value, by more than 16 times what any
                witness differs there, and by more than the dtype's smallest normal number (denormals may be flushed)
    rounding    all else: also the sign and the bits of a NaN, and the sign of a zero, of which only consequences count:
                `1 / x` of an input -0.0 is -inf; of a computed zero it is either

Witnesses are computed only where compiled code and eager differ. Where the model cannot be run in float64, none of its
floating-point results is decided. Of complex numbers only their being finite is compared.

The ordinary comparisons (`aotc.models.tolerance`, `aotc.tensors.rounding`) judge rounding, which this rule does not.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from aotc.models.float64_reference import forget_failed_traces, in_double, in_float64
from aotc.tensors.contents import contents, same_values
from aotc.tensors.rounding import Result, uncompiled

_NUDGES = 6
_MULTIPLE = 16.0
_WHOLE = 2.0**16
"""Whole numbers up to this one are positions, masks and counts, which are not rounded."""

RunEagerly = Callable[[Sequence[Any]], Result]
"""Runs the model in eager on these leaves, and leaves them and the model's state as they are."""


class WrongValue(NamedTuple):
    """A part of a result that is wrong: its position in the result, the path within it, and what is wrong, as the end
    of a sentence that begins with the part's name."""

    position: int
    path: str
    said: str


def first_wrong_value(
    result: Result,
    given: Result,
    call: RunEagerly,
    leaves: Sequence[Any],
    step: float = 0.0,
    *,
    kinds_only: bool = False,
) -> WrongValue | None:
    """The first part of `given`, what compiled code gives for `leaves`, that is wrong by the rule of this module.

    `result` is what eager gives for them: `call(leaves)`. Both are lists of tensors and other values of any shapes and
    dtypes, on any device; `leaves` are the inputs, of which the tensors are changed for some witnesses. `step` is the
    relative rounding of an operator where that is more than its dtype's epsilon (TF32). `kinds_only`: neither integers
    nor finite values are compared, of a model that rounds to 8 bits, in which a last digit decides between two levels.

    >>> x = torch.tensor([float("nan"), 1.0])
    >>> first_wrong_value([x * 0], [torch.zeros(2)], lambda leaves: [leaves[0] * 0], [x])
    WrongValue(position=0, path='', said='is 0 at [0], nan in eager (1 of 2 elements)')
    >>> first_wrong_value([x * 0], [-(x * 0)], lambda leaves: [leaves[0] * 0], [x]) is None  # a zero's sign
    True
    """
    if len(result) != len(given):
        return WrongValue(0, "", f"is one of {len(given)} values, and eager gives {len(result)}")
    eager, compiled = _parts(result), _parts(given)
    if eager.keys() != compiled.keys():
        position, path = min(eager.keys() ^ compiled.keys())
        return WrongValue(position, path, "is in one of eager's and the compiled code's results only")
    suspects = {key: found for key, part in eager.items() if (found := _suspect(part, compiled[key])) is not None}
    if kinds_only:
        suspects = {key: mask for key, mask in suspects.items() if _are_of_other_kinds(mask, eager[key], compiled[key])}
    for witness in _witnesses(call, leaves, step):
        if not suspects:
            return None
        if witness is None:
            suspects = {key: mask for key, mask in suspects.items() if not _is_inexact(eager[key])}
            continue
        there = _parts(witness)
        left = {
            key: _still(mask, eager[key], compiled[key], there[key]) for key, mask in suspects.items() if key in there
        }
        suspects = {key: mask for key, mask in left.items() if mask is not None}
    if not suspects:
        return None
    key = min(suspects)
    return WrongValue(*key, _said(suspects[key], eager[key], compiled[key]))


_Key = tuple[int, str]


def _parts(result: Result) -> dict[_Key, Any]:
    return {(position, path): part for position, value in enumerate(result) for path, part in contents(value).items()}


# -- elements ---------------------------------------------------------------------------------------------------------


def _suspect(eager: Any, compiled: Any) -> Tensor | None:
    """The mask of the elements that differ; of no dimension where the whole part does. None where nothing does."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        return None if same_values(eager, compiled) or _are_close(eager, compiled) else torch.tensor(True)
    if not _same_form(eager, compiled):
        return torch.tensor(True)
    mask = _differ(eager, compiled, _near(eager))
    return mask if bool(mask.any()) else None


def _are_of_other_kinds(mask: Tensor, eager: Any, compiled: Any) -> bool:
    """Whether a part has another form, or of floating-point numbers elements that differ in being NaN or infinite."""
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor) or not _same_form(eager, compiled):
        return True
    if not _is_inexact(eager):
        return False
    mask &= ~(_numbers(eager).isfinite() & _numbers(compiled).isfinite())
    return bool(mask.any())


def _still(mask: Tensor, eager: Any, compiled: Any, witness: Any) -> Tensor | None:
    """The differing elements that this witness still counts as decided; None if it counts none."""
    if not isinstance(eager, Tensor) or not isinstance(witness, Tensor) or not isinstance(compiled, Tensor):
        return mask if same_values(eager, witness) else None
    if eager.shape != witness.shape:
        return None
    if not _same_form(eager, compiled):
        return mask
    decided = ~_differ(eager, witness, _near(eager))
    if _is_inexact(eager) and not eager.is_complex():
        mine, theirs, other = _numbers(compiled), _numbers(eager), _numbers(witness.to(eager.dtype))
        finite = mine.isfinite() & theirs.isfinite()
        decided = torch.where(finite, (mine - theirs).abs() > _MULTIPLE * (other - theirs).abs(), decided)
        decided &= ~finite | other.isfinite()
    mask = mask & decided
    return mask if bool(mask.any()) else None


def _differ(eager: Tensor, other: Tensor, near: float) -> Tensor:
    """The mask of the elements of another kind, or of a value that differs by more than the share `near` of eager's."""
    other = other if eager.is_complex() or other.dtype == eager.dtype else other.to(eager.dtype)
    if not _is_inexact(eager):
        return _dense(eager) != _dense(other)
    one, two = _numbers(eager), _numbers(other)
    if eager.is_complex():
        return one.isfinite() != two.isfinite()
    finite = one.isfinite() & two.isfinite()
    same = (one == two) | (one.isnan() & two.isnan())
    tiny = torch.finfo(eager.dtype).tiny if eager.is_floating_point() else 0.0
    return torch.where(finite, (two - one).abs() > near * one.abs() + tiny, ~same)


def _near(eager: Tensor) -> float:
    return torch.finfo(eager.dtype).eps ** 0.5 if eager.is_floating_point() else 0.0


def _are_close(eager: Any, compiled: Any) -> bool:
    """Whether two Python numbers, read from tensors, are close."""
    if type(eager) is not float or type(compiled) is not float:
        return False
    return not bool(_differ(torch.tensor(eager), torch.tensor(compiled), _near(torch.tensor(eager))))


def _same_form(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.layout) == (other.shape, other.dtype, other.layout)


def _is_inexact(part: Any) -> bool:
    if not isinstance(part, Tensor):
        return isinstance(part, float | complex)
    return part.is_floating_point() or part.is_complex() or part.is_quantized


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.detach().cpu()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _numbers(tensor: Tensor) -> Tensor:
    """In float64, on the CPU. Of complex numbers the sum of their parts' sizes, which is finite where both are."""
    tensor = _dense(tensor)
    return torch.view_as_real(tensor.resolve_conj()).double().abs().sum(-1) if tensor.is_complex() else tensor.double()


def _said(mask: Tensor, eager: Any, compiled: Any) -> str:
    if not isinstance(eager, Tensor) or not isinstance(compiled, Tensor):
        return f"is {compiled!r:.100}, {eager!r:.100} in eager"
    if not _same_form(eager, compiled):
        forms = [f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for each in (compiled, eager)]
        return f"is {forms[0]}, {forms[1]} in eager"
    place = mask.nonzero()[0].tolist()
    mine, theirs = (_dense(each)[tuple(place)].item() for each in (compiled, eager))
    at = f" at {place}" if place else ""
    shown = [f"{each:.9g}" if isinstance(each, float) else str(each) for each in (mine, theirs)]
    return f"is {shown[0]}{at}, {shown[1]} in eager ({int(mask.sum())} of {mask.numel()} elements)"


# -- witnesses --------------------------------------------------------------------------------------------------------


def _witnesses(call: RunEagerly, leaves: Sequence[Any], step: float) -> Iterator[Result | None]:
    """What eager gives with something changed; None where it cannot be run in float64."""
    wide = _witness(call, [*map(in_double, leaves)], in_float64())
    # A module may compare its input's dtype with its weights', which stay as they are.
    yield _witness(call, leaves, in_float64()) if wide is None else wide
    others: list[tuple[_Changed, Sequence[Any]]] = [
        (_Flipped(), leaves),  # type: ignore[no-untyped-call]
        (_SmallerRange(), [*map(_without_denormals, leaves)]),  # type: ignore[no-untyped-call]
    ]
    for seed in range(_NUDGES):
        nudge = _Nudge(seed, step)
        others.append((_RoundedBy(nudge), [*map(nudge, leaves)]))
    for mode, given in others:
        if (found := _witness(call, given, mode)) is not None:
            yield found


def _witness(call: RunEagerly, leaves: Sequence[Any], mode: AbstractContextManager[Any]) -> Result | None:
    try:
        with uncompiled(), mode:
            return call(leaves)
    except Exception:  # the model's operators may raise anything
        traceback.print_exc()
        forget_failed_traces()
        return None


_OF_LAPACK = ("linalg_", "_linalg_", "geqrf", "ormqr", "orgqr", "lu_", "cholesky", "triangular_solve", "lstsq")
_NOT_OF_LAPACK = frozenset({"linalg_vector_norm", "linalg_cross", "linalg_vecdot", "linalg_diagonal"})


def ends_the_process(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator may end the process in eager: some of LAPACK's crash (segmentation fault) on NaN and
    infinities."""
    name = _name(func)
    if not name.startswith(_OF_LAPACK) or name in _NOT_OF_LAPACK:
        return False
    tensors = [each for each in pytree.tree_leaves(args) if isinstance(each, Tensor) and _is_inexact(each)]
    return not all(bool(each.isfinite().all()) for each in tensors)


class _Handler:
    """What `torch.utils._python_dispatch` calls: inherited, as torch imports its compiler for a class that defines
    it."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if ends_the_process(func, args):
            raise ValueError(f"{func} of what is not finite")
        result = func(*args, **kwargs)
        schema = getattr(func, "_schema", None)
        if schema is None or any(item.alias_info is not None for item in schema.returns):
            return result
        return self.changed_result(result, func, args, kwargs)

    def changed_result(self, result: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return pytree.tree_map_only(Tensor, lambda each: self.changed(each, func, args, kwargs), result)

    def changed(self, result: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        raise NotImplementedError


class _Changed(_Handler, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes the new tensors that operators give."""


_CASTS = frozenset(
    {
        *(torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype, torch.ops.aten.to.dtype_layout),
        torch.ops.prims.convert_element_type.default,
    }
)
_SHIFTS = frozenset({"bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"})


class _Flipped(_Changed):  # type: ignore[no-untyped-call]
    def changed_result(self, result: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        changed = super().changed_result(result, func, args, kwargs)
        if "max_pool" not in _name(func) or isinstance(result, Tensor) or len(result) != 2:
            return changed
        return changed[0], torch.where(result[0].isnan(), ~result[1], result[1])

    def changed(self, result: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        if not _has_numbers(result) or result.dtype == torch.bool:
            return result
        if _name(func).startswith("grid_sampler") and _is_float(result):  # casts coordinates to integers
            wild = ~args[1].isfinite().all(-1).unsqueeze(1)
            return torch.where(wild, torch.where(result.isnan(), 0.0, torch.nan).to(result.dtype), result)
        if _is_float(result):
            return torch.where((result == 0) | result.isnan(), -result, result)
        if func in _CASTS and isinstance(args[0], Tensor) and _is_float(args[0]):
            info, given = torch.iinfo(result.dtype), args[0].double()
            fits = (given > float(info.min) - 1) & (given < float(info.max) + 1)
            return torch.where(fits, result, ~result)
        if _name(func) in _SHIFTS:
            count = args[1] if isinstance(args[1], Tensor) else torch.tensor(args[1])
            return torch.where((count >= 0) & (count < torch.iinfo(result.dtype).bits), result, ~result)
        return result


_SUMS = frozenset(
    {
        *(
            "sum",
            "mean",
            "nansum",
            "nanmean",
            "trace",
            "cumsum",
            "dot",
            "vdot",
            "mv",
            "addmv",
            "mm",
            "bmm",
            "addmm",
            "baddbmm",
            "addbmm",
        ),
        *("linear", "matmul", "einsum", "_grouped_mm", "convolution"),
    }
)
_PRODUCTS = frozenset({"prod", "cumprod"})
_NORMALISATIONS = ("batch_norm", "group_norm", "layer_norm", "rms_norm")
_VARIANCES = frozenset({"var", "std", "var_mean", "std_mean", "_softmax_backward_data"})
"""Of numbers whose squares overflow, a variance is infinite or NaN, by its formula, and so is a softmax's gradient. A
running mean (Welford's) that meets an infinity is so by the order of the elements; the first result of a normalisation
is NaN there anyway."""
_MIXING = ("upsample_", "_upsample_", "grid_sampler", "lerp")
"""Of operators that mix values by weights: `a + (b - a) * t` and `a * (1 - t) + b * t` differ at infinities."""


class _SmallerRange(_Changed):  # type: ignore[no-untyped-call]
    def changed_result(self, result: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        changed = super().changed_result(result, func, args, kwargs)
        name = _name(func)
        normalises = any(part in name for part in _NORMALISATIONS)
        if not (normalises or name in _VARIANCES or name.startswith(_MIXING)):
            return changed

        def without(which: Callable[[Tensor], Tensor], value: float) -> list[Tensor]:
            found = func(*_replaced(args, which, value), **_replaced(kwargs, which, value))
            return [found] if isinstance(found, Tensor) else list(found)

        own, parts = ([each] if isinstance(each, Tensor) else list(each) for each in (result, changed))
        first = int(normalises)
        poisoned, finite = without(Tensor.isinf, torch.nan)[first:], without(Tensor.isinf, 1.0)[first:]
        parts[first:] = map(_of_another_kind, parts[first:], own[first:], poisoned, finite)
        if normalises or name in _VARIANCES:
            parts = [*map(_of_another_kind, parts, own, without(_square_overflows, torch.nan), own)]
        return parts[0] if isinstance(result, Tensor) else tuple(parts)

    def changed(self, result: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        if not _is_float(result):
            return result
        info = torch.finfo(result.dtype)
        for bound in _bounds_of(func):
            most = func(*_mapped(bound, args), **_mapped(bound, kwargs))
            result = torch.where(most <= info.max / 2, result, torch.nan)
        result = torch.where(result.abs() > info.max / 2, torch.full_like(result, torch.inf).copysign(result), result)
        return torch.where(result.abs() < 4 * info.tiny, torch.zeros_like(result).copysign(result), result)


def _replaced(operands: Any, which: Callable[[Tensor], Tensor], value: float) -> Any:
    def of(tensor: Tensor) -> Tensor:
        return torch.where(which(tensor), value, tensor) if _is_float(tensor) else tensor

    return pytree.tree_map_only(Tensor, of, operands)


def _square_overflows(tensor: Tensor) -> Tensor:
    most: float = (torch.finfo(tensor.dtype).max / max(tensor.numel(), 1)) ** 0.5
    return tensor.isfinite() & (tensor.abs() > most)


def _of_another_kind(changed: Tensor, result: Tensor, poisoned: Tensor, finite: Tensor) -> Tensor:
    """The elements to which what is poisoned contributes: NaN, or infinite where the result is NaN. Not those that are
    NaN in `finite`, too."""
    other = torch.where(result.isnan(), torch.inf, torch.nan).to(result.dtype)
    return torch.where(poisoned.isnan() & ~finite.isnan(), other, changed)


def _bounds_of(func: Any) -> tuple[Callable[[Tensor], Tensor], ...]:
    """What makes of the operands of a sum or a product those with which it is not smaller in any order."""
    if _name(func) in _SUMS:
        return (torch.abs,)
    return (_at_least_1, _inverse) if _name(func) in _PRODUCTS else ()


def _at_least_1(tensor: Tensor) -> Tensor:
    return tensor.abs().clamp(min=1)


def _inverse(tensor: Tensor) -> Tensor:
    return (1 / tensor.abs()).nan_to_num(posinf=1.0).clamp(min=1)


def _mapped(bound: Callable[[Tensor], Tensor], operands: Any) -> Any:
    """Of the finite elements: what is NaN or infinite makes the result so in every order."""

    def of(tensor: Tensor) -> Tensor:
        if not _is_float(tensor):
            return tensor
        return torch.where(tensor.isfinite(), bound(tensor.nan_to_num(1.0, 1.0, 1.0)), 1.0).to(tensor.dtype)

    return pytree.tree_map_only(Tensor, of, operands)


class _Nudge:
    """A floating-point tensor whose elements are off by an epsilon, except small whole numbers; the finite ones stay
    so."""

    def __init__(self, seed: int, step: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._step = step

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not _is_float(value):
            return value
        step = max(torch.finfo(value.dtype).eps, self._step)
        drawn = torch.rand(value.shape, generator=self._generator).to(value.device)
        other = value * torch.where(drawn < 0.5, 1 - step, 1 + step).to(value.dtype)
        whole = (value == value.round()) & (value.abs() <= _WHOLE)
        return torch.where(whole | ~other.isfinite(), value, other)


class _RoundedBy(_Changed):  # type: ignore[no-untyped-call]
    def __init__(self, nudge: _Nudge) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._nudge = nudge

    def changed(self, result: Tensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        changed: Tensor = self._nudge(result)
        return changed


def _name(func: Any) -> str:
    return str(getattr(func, "_opname", ""))


def _has_numbers(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.layout == torch.strided
        and not tensor._is_zerotensor()
    )


def _is_float(tensor: Tensor) -> bool:
    """Whether torch computes with it: not of 8 bits or less."""
    return _has_numbers(tensor) and tensor.is_floating_point() and tensor.element_size() > 1


def _without_denormals(value: Any) -> Any:
    if not isinstance(value, Tensor) or not _is_float(value):
        return value
    tiny = torch.finfo(value.dtype).tiny
    return torch.where(value.abs() < tiny, torch.zeros_like(value).copysign(value), value)
