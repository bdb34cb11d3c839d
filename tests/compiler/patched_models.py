"""Models that torch compiles wrongly, or refuses, without patches of aotc: parts of one model, so that one unit
compiles them all. Of each part: its inputs, as a manifest has them, and the sizes of its dims, which no other part has.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan


class Part(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: dict[str, dict[str, Any]]
    dims: dict[str, Any]


PARTS: dict[str, Part] = {}


def part(name: str, dims: dict[str, Any] | None = None, **inputs: dict[str, Any]) -> Callable[[Any], Any]:
    def add(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        PARTS[name] = Part(make, inputs, dims or {})
        return make

    return add


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: part.make() for name, part in PARTS.items()})

    def forward(self, given: dict[str, dict[str, Tensor]]) -> dict[str, Any]:
        return {name: part(**given[name]) for name, part in self.parts.items()}


def of(*shape: int | str, **more: Any) -> dict[str, Any]:
    return {"shape": [*shape], **more}


def indices(*shape: int | str, below: int) -> dict[str, Any]:
    return of(*shape, dtype="int64", init={"randint": [0, below]})


def sizes(least: int, most: int, tune_at: int) -> dict[str, Any]:
    return {"range": [least, most], "tune_at": tune_at}


# -- numbers and indices ----------------------------------------------------------------------------------------------


@part("assigned", {"assigned_rows": sizes(2, 8, 4)}, x=of("assigned_rows", 3))
class Assigned(nn.Module):
    def forward(self, x: Tensor) -> Any:
        doubled, empty = x * 2, torch.zeros(x.shape[0], 3)
        doubled[0, 0] = 1
        doubled[-1, -1] = float("-inf")
        empty[0, 0] = 3
        empty[:, 1] = torch.tensor(4)
        empty[-1][2] += 5
        empty[0].copy_(6)
        x[0, 0] = 1
        return doubled, empty, x + 1


@part("masks", {"mask_rows": sizes(2, 8, 4)}, x=of("mask_rows", 3))
class Masks(nn.Module):
    def forward(self, x: Tensor) -> Any:
        ones = ~torch.zeros(x.shape[0], 3).to(torch.bool)
        nones = ~ones
        return (
            torch.where(ones == True, x, -x),  # noqa: E712
            torch.where(ones == False, x, -x),  # noqa: E712
            torch.where(nones != True, x, -x),  # noqa: E712
            torch.where(nones != False, x, -x),  # noqa: E712
            torch.where(ones == (x > 0), x, 2 * x),
            torch.where(nones == (x > 0), x, 2 * x),
        )


@part("powers", {"powers_n": sizes(2, 16, 4)}, x=indices("powers_n", below=9))
class Powers(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return 2**x, 3 ** x.to(torch.int32) + 1, (-2) ** x.to(torch.int8), 2 ** x.to(torch.uint8), 2 ** (x > 0)


class Quotients(nn.Module):
    def forward(self, x: Tensor, y: Tensor, n: Tensor) -> Any:
        return (
            *(x // y, x // 0.1, 1.0 // y, n // y, x // n, torch.div(x, y, rounding_mode="trunc"), n // 3),
            *(x % y, x % 0.1, 1.0 % y, n % y, x % n, n % 3, (x[:, None] // y)[0], x // x.shape[0], x % x.shape[0]),
        )


for dtype in ("float32", "float64"):
    n = f"{dtype}_n"
    named = of(n, dtype=dtype)
    part(f"quotients_{dtype}", {n: sizes(2, 300, 16)}, x=named, y=named, n=of(n, dtype="int64", init="ones"))(Quotients)


@part("complex", {"complex_n": sizes(2, 8, 4)}, z=of("complex_n", 3, dtype="complex64"), x=of("complex_n", 3))
class Complex(nn.Module):
    def forward(self, z: Tensor, x: Tensor) -> Any:
        differences = z - z.flip(0), x - z, torch.sub(z, x, alpha=3), z - 2, 1j - z, x - x.flip(0)
        quotients = z / 2, z / 2j, x / 2j, 2 / z, z.sum() / 3, x / x.shape[0]
        chosen = torch.where(x > 0, z, 0), z.masked_fill(x > 0, 1j), z != 1j, z == 2, x != 2
        filled = torch.full_like(z, 2j), torch.full((2,), 1j), torch.zeros(3, dtype=z.dtype) + z, z.clone().fill_(3)
        return differences, quotients, chosen, filled, torch.full((2,), 1.5), torch.scalar_tensor(2)


@part(
    "added",
    hidden=of(6, 8, dtype="bfloat16"),
    experts=of(6, 8, dtype="bfloat16"),
    tokens=indices(6, below=6),
)
class Added(nn.Module):
    def forward(self, hidden: Tensor, experts: Tensor, tokens: Tensor) -> Any:
        doubled = hidden.index_add(0, tokens, experts, alpha=2)
        hidden.index_add_(0, tokens, experts)
        return doubled, hidden


# -- views and concatenations -----------------------------------------------------------------------------------------


@part("views", {"views_n": sizes(8, 16, 8)}, x=of("views_n", 5))
class Views(nn.Module):
    def forward(self, x: Tensor) -> Any:
        late = x[x.shape[0] // 2 :]
        return (
            *(late.as_strided((3, 2), (5, 1)), x.select(1, -1).as_strided((4,), (5,)), late.as_strided((3,), (1,), 2)),
            x.sin()[1:].as_strided((3, 2), (5, 1)),
        )


class Diagonals(nn.Module):
    def forward(self, x: Tensor) -> Any:
        main, doubled = x.diagonal(), x.clone()
        doubled.diagonal(1).mul_(2)
        return main @ main, torch.cat([main, x[0]]), x.diagonal(-1), doubled, torch.diag_embed(main.exp()), x.trace()


for tune_at in (4, 9):
    rows = f"diagonal_rows_{tune_at}"
    part(f"diagonals_{tune_at}", {rows: sizes(3, 12, tune_at)}, x=of(rows, 6))(Diagonals)


@part("pool", {"height": sizes(4, 20, 11)}, input=of(1, 2, "height", 6))
class Pool(nn.MaxPool2d):
    def __init__(self) -> None:
        super().__init__(3, stride=2, padding=1)


@part("joined", {"joined_n": sizes(4, 8, 4)}, x=of("joined_n", 5), index=indices(3, below=4))
class Joined(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Any:
        first, second, third = x * 2, x.exp(), x.sin()
        rows = torch.cat([first, x])
        columns = torch.cat([second, x + 1], 1)
        stacked = torch.stack([third, x])
        first[index] = 7
        second.index_put_((index,), x[:3], accumulate=True)
        third.diagonal()[index] = 1
        return rows, columns, stacked, first, second, third


@part(
    "beside_nothing",
    {"beside_n": {"range": [2, 6]}},
    x=of("beside_n", 5, 4, 8),
    image=of(2, 3, 4, 4, layout="channels_last"),
)
class BesideNothing(nn.Module):
    def forward(self, x: Tensor, image: Tensor) -> Any:
        y = x.transpose(1, 2)
        after = torch.cat([y, y[..., :0]], -1).view(-1, 5, 8)
        before = torch.cat([y.half()[:, :, :0], y], 2).view(-1, 5, 8)
        beside_a_list = torch.cat([torch.zeros(0), y], 1).view(-1, 8)
        return after + 1, before + 1, beside_a_list + 1, torch.cat([image[:, :0], image], 1) * 2


# -- what is read before it is written --------------------------------------------------------------------------------


@part("rows_read", x=of(4, 6), index=indices(4, below=4))
class RowsRead(nn.Module):
    def forward(self, x: Tensor, index: Tensor) -> Any:
        first, second, third = x.relu(), x.exp(), index + 0
        fourth, fifth = x.cos(), x.sin()
        fourth[index[:3]] = fourth[1:].clone()
        fifth[:, 1:] = fifth[:, :-1].clone()
        return (
            first.index_copy(0, index[:3], first[1:]),
            second.index_put((index,), second),
            third.index_put((third,), torch.arange(4)),
            fourth,
            fifth,
        )


@part("ordered", x=of(4, 5))
class Ordered(nn.Module):
    """With torch 2.11 a kernel that reads came after the one that writes, where both have the same loops."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.arange(100.0).view(5, 4, 5))

    def forward(self, x: Tensor) -> Any:
        before = self.last * 1
        self.last[0] = x
        before[:, 2:] *= 2
        return before


@part("shifted", x=of(2, 2))
class Shifted(nn.Module):
    """What was written and is read is known as the tensor that is written next."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.arange(64.0).view(4, 16))

    def forward(self, x: Tensor) -> Any:
        self.last.diagonal().fill_(3)
        self.last[1:] = self.last[:-1].clone()
        self.last[0] = -2
        x.index_add_(1, torch.tensor([0, 0]), x.clone())
        x[1:] *= 2
        return torch.nn.functional.rms_norm(x, (2,))


def _fill_row(into: Tensor, x: Tensor) -> None:
    into[1] = x[0]


if hasattr(torch.ops.aotc_old_values, "fill_row"):  # this file is imported as a model's, too: a second definition
    fill_row = torch.ops.aotc_old_values.fill_row  # would take the first one's operator away
else:
    fill_row = torch.library.custom_op("aotc_old_values::fill_row", _fill_row, mutates_args=("into",))
    fill_row.register_fake(lambda into, x: None)


@part("kept", x=of(1, 3), at=of(1, dtype="int64", init={"constant": 1}), memory=of(4, 3))
class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for number in range(9):
            self.register_buffer(f"memory_{number}", torch.arange(12.0).view(4, 3) + number)

    def forward(self, x: Tensor, at: Tensor, memory: Tensor) -> Any:
        *memories, before, filled = (self.get_buffer(f"memory_{number}") for number in range(9))
        first = memories[0].slice_scatter(x, 0, 1, 2)
        second = torch.diagonal_scatter(memories[1], x[0])
        third = memories[2].index_copy(0, at, x)
        fourth = memories[3].index_put((at,), x)
        fifth = memories[4].index_add(0, at, x)
        half = memories[5].slice_scatter(x, 0, 1, 2)
        sixth = half.slice_scatter(x + 1, 0, 2, 3)
        seventh = memories[6].slice_scatter(x, 0, 1, 2)
        changed = memory.slice_scatter(x, 0, 1, 2)
        for old, new in zip(memories, (first, second, third, fourth, fifth, sixth, seventh), strict=True):
            old.copy_(new)
        memory.copy_(changed)
        seventh.add_(1)
        fill_row(filled, x)
        before.copy_(filled)
        was = filled.clone()
        filled.copy_(x.expand(4, 3))
        parts = [first[1:], *second.split(2), third.t()]
        more = (half, sixth, seventh, changed, was)
        return {"whole": [first, second, third, fourth, fifth], "parts": parts, "more": more}


# -- loops ------------------------------------------------------------------------------------------------------------


@part(
    "scanned",
    {"scanned_rows": sizes(2, 6, 3), "carried_rows": sizes(2, 6, 5)},
    x=of("scanned_rows", 3),
    y=of("carried_rows", 3),
)
class Scanned(nn.Module):
    """The sizes of what a loop gives are those of two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return scan(lambda carried, row: (carried.clone(), (carried - row).square().sum(1)), y, x, dim=0)[1]


# -- errors -----------------------------------------------------------------------------------------------------------


class Repeated(nn.Module):
    def forward(self, x: Tensor, counts: Tensor) -> Any:
        return torch.repeat_interleave(x, counts, 0, output_size=2 * x.shape[0]).sin()


COUNTS = {"dtype": "int64", "init": {"constant": 2}}
part("repeats", x=of(3, 4), counts=of(3, **COUNTS))(Repeated)
part("ranged_repeats", {"many": sizes(2, 8, 4)}, x=of("many", 4), counts=of("many", **COUNTS))(Repeated)


def manifest() -> dict[str, Any]:
    model = {
        "factory": f"{Path(__file__).name}:Model",
        "mode": "default",
        "inputs": {"given": {name: part.inputs for name, part in PARTS.items()}},
        "buckets": [{name: size for part in PARTS.values() for name, size in part.dims.items()}],
    }
    return {"version": 1, "models": {"patched": model}}
