"""The second draw: example inputs with extreme values, where the manifest leaves them free.

Small random numbers of both signs hide what a compiler does wrong: a minimum over nine positive integers that takes a
0 from behind the end, `x * 0` of NaN, a function that overflows before its result does. So a build's smoke run and
`aotc verify` call the model once more, with these in the place of the ordinary values (`aotc.models.decided_values`
says which differences are wrong):

- floats without an `init`, or with `randn`: by rows (along the first of at least two axes that are longer than 1) all
  negative; all positive; with NaN; with inf; with the largest numbers, denormals and zeros of both signs. Of fewer rows
  the last one has all of these. Huge numbers of one tensor have one sign, since sums of both are decided by their
  order. In float64 they are as large as float32's, so that the reference has room above them.
- integers without an `init`: by rows all negative and all positive, at small numbers and at the limits of the dtype,
  and never 0. Those of 32 and 64 bits, which may be indices, only on a CPU, where a wrong index is an error; and not
  at their very least number, by which eager's `x // -1` ends the process.
- bools without an `init`: a row without any, a row of all, others at random.
- a mask that its `init` fills with ones, or with `padding`: the last row masks everything.
- `{randint: [low, high]}`: of integers of 8 and 16 bits, and where `low` is negative, as without an `init`, within
  these limits; else the ordinary values with both ends, since they may be indices.

All other values are the ordinary ones, as are those of an `init` of ones, zeros, a constant, a function, recorded
values or `randint` up to a dim (indices and lengths), complex numbers, and floats of 8 bits.

The edges, which `verify` tries too, are these without NaN and infinities: in a deep model those are soon everywhere.

A range is called at a length that is one more than a multiple of the vector's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from aotc.manifest.inputs import TensorInput, parse_inputs
from aotc.manifest.types import ModelSpec
from aotc.models.input_forms import MASK
from aotc.records import Bucket, Dims, Signature, SizeRange


class Freedom(NamedTuple):
    """What an input may be filled with, beside its ordinary values; `ends` are the least and the greatest integer of
    `both ends`."""

    how: Literal["any", "a masked row", "both ends", "none"] = "none"
    ends: tuple[int, int] = (0, 0)


Draw = Literal["extreme", "edges"]

OFF_VECTOR = (65, 33, 17, 9, 5, 3)
"""Lengths off by one from those of vectors, of 64 elements at most."""

_EVERY = 5
"""Every so manieth element of a row, and the last one, has a special value."""

_Kind = Literal["negative", "positive", "nan", "inf", "limits", "all", "finite"]


def freedoms(spec: ModelSpec, signature: Signature) -> list[Freedom]:
    """Of each leaf of the model's signature, by its `init`."""
    _, inputs = parse_inputs(spec.inputs)
    by_path = {leaf.path: _freedom(leaf) for leaf in inputs if isinstance(leaf, TensorInput)}
    return [by_path.get(leaf.path, Freedom()) for leaf in signature.leaves]


def freedoms_of_region(leaves: Sequence[Any]) -> list[Freedom]:
    """Of the leaves of a call that the model makes to a region: integers are positions and indices there."""
    floats = [isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.dtype == torch.bool) for leaf in leaves]
    return [Freedom("any" if each else "none") for each in floats]


def _freedom(leaf: TensorInput) -> Freedom:
    match leaf.inits[0]:
        case None | "randn":
            return Freedom("any")
        case {"randint": [int(low), int(high)]}:
            return Freedom("both ends", (low, high - 1))
        case "padding":
            return Freedom("a masked row")
        case "ones" if leaf.path.endswith(MASK):
            return Freedom("a masked row")
    return Freedom()


def off_vector(bucket: Bucket, tuned: Dims) -> Dims:
    """One size of each dim: of a range without steps the first of OFF_VECTOR that is in it and at most twice as long as
    it is tuned, so that the call takes no longer; else as it is tuned."""

    def size_of(dim: str) -> int:
        size = bucket[dim]
        if not isinstance(size, SizeRange) or size.multiple_of != 1:
            return tuned[dim]
        return next((each for each in OFF_VECTOR if each in size and each <= 2 * tuned[dim]), tuned[dim])

    return {dim: size_of(dim) for dim in bucket}


def extreme_leaves(
    leaves: Sequence[Any], free: Sequence[Freedom], draw: Draw, *, wide_integers: bool = True
) -> list[Any]:
    """These ordinary leaves with the values of the draw, in their layouts and on their devices. The same leaves give
    the same values. Without `wide_integers`, integers of 32 and 64 bits stay as they are."""
    return [
        _laid_out_as(leaf, _filled(leaf.detach().cpu(), how, draw, place, wide_integers))
        if isinstance(leaf, Tensor) and how.how != "none" and leaf.numel() and leaf.layout == torch.strided
        else leaf
        for place, (leaf, how) in enumerate(zip(leaves, free, strict=True))
    ]


def _laid_out_as(leaf: Tensor, values: Tensor) -> Tensor:
    filled = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    return filled.copy_(values).requires_grad_(leaf.requires_grad)


def _filled(ordinary: Tensor, free: Freedom, draw: Draw, place: int, wide_integers: bool) -> Tensor:
    rows, is_number = _rows(ordinary), not ordinary.is_complex() and ordinary.dtype != torch.bool
    if free.how == "both ends" and ordinary.element_size() > 2 and free.ends[0] >= 0:
        rows[0, 0], rows[-1, -1] = free.ends
    elif free.how == "a masked row":
        if len(rows) > 1:
            rows[-1] = 0
    elif ordinary.dtype == torch.bool:
        _fill_bools(rows, draw)
    elif is_number and ordinary.is_floating_point() and ordinary.element_size() > 1:
        for row, kind in zip(rows, _kinds(len(rows), draw, place), strict=True):
            row.copy_(_floats(row, kind))
    elif is_number and not ordinary.is_floating_point():
        least, most = free.ends if free.how == "both ends" else _limits(ordinary.dtype, wide_integers)
        for index, row in enumerate(rows if least < most else ()):
            row.copy_(_integers(row, least, most, negative=(index + place + (draw == "edges")) % 2 == 0))
    return _unrowed(rows, ordinary)


def _rows(tensor: Tensor) -> Tensor:
    """A copy as rows: along the first axis that is longer than 1, if another one is, too; else one row."""
    longer = [axis for axis, size in enumerate(tensor.shape) if size > 1]
    if len(longer) < 2:
        return tensor.clone().reshape(1, -1)
    moved = tensor.movedim(longer[0], 0)
    return moved.clone(memory_format=torch.contiguous_format).reshape(moved.shape[0], -1)


def _unrowed(rows: Tensor, like: Tensor) -> Tensor:
    longer = [axis for axis, size in enumerate(like.shape) if size > 1]
    if len(longer) < 2:
        return rows.reshape(like.shape)
    moved = like.movedim(longer[0], 0)
    return rows.reshape(moved.shape).movedim(0, longer[0])


def _kinds(count: int, draw: Draw, place: int) -> list[_Kind]:
    """What each row is filled with. The last one of few has everything."""
    signs: tuple[_Kind, _Kind] = ("negative", "positive") if place % 2 == 0 else ("positive", "negative")
    if draw == "edges":
        some: list[_Kind] = [signs[0], "limits", signs[1]]
        return [some[row % len(some)] for row in range(count)] if count > 1 else ["finite"]
    every: list[_Kind] = [*signs, "nan", "inf", "limits"]
    return [every[row % len(every)] for row in range(count)] if count >= len(every) else [*every[: count - 1], "all"]


def _floats(row: Tensor, kind: _Kind) -> Tensor:
    info = torch.finfo(row.dtype)
    huge, denormal = min(info.max, torch.finfo(torch.float32).max), info.tiny / 8
    if kind in ("negative", "positive"):
        return row.abs() if kind == "positive" else -row.abs()
    special: dict[_Kind, Sequence[float]] = {
        "nan": (torch.nan,),
        "inf": (torch.inf,),
        "limits": (huge, -0.0, denormal, huge / 8, 0.0),
        "all": (torch.nan, huge, -0.0, torch.inf, denormal, huge / 8, 0.0, -torch.inf),
        "finite": (huge / 8, denormal),
    }
    base = row.abs() if kind == "finite" else row.clone()
    places = [*range(_EVERY // 2, row.numel() - 1, _EVERY), row.numel() - 1]
    chosen = [special[kind][index % len(special[kind])] for index in range(len(places))]
    base[places] = torch.tensor(chosen, dtype=torch.float64).to(row.dtype)
    return base


def _limits(dtype: torch.dtype, wide_integers: bool) -> tuple[int, int]:
    """The least and the greatest integer that may be drawn; of wide integers none where they are left as they are."""
    info = torch.iinfo(dtype)
    if info.bits < 32:
        return info.min, info.max
    return (min(info.min + 1, 0), min(info.max, 2**63 - 1)) if wide_integers else (0, 0)


def _integers(row: Tensor, least: int, most: int, negative: bool) -> Tensor:
    """Numbers of one sign, of size 2 to 20, and that sign's limit; of the other sign if the dtype lacks this one."""
    numbers = torch.arange(row.numel()) * 7 % 19 + 2
    negative = (negative and least < 0) or most <= 0
    numbers[_EVERY - 1 :: _EVERY] = -least if negative else most
    return (-numbers if negative else numbers).clamp(least, most).to(row.dtype)


def _fill_bools(rows: Tensor, draw: Draw) -> None:
    if draw == "extreme" or len(rows) > 1:
        rows[0] = False
    if len(rows) > 2:
        rows[1] = True
