"""Small models, of which some meet a bug of torch that aotc has a patch for: a factory for `audit.py`, and the oracle.

A part is a function of `x`, `y` (float32 [4, 8]) and `i` (int64 [3], 0 to 3). `MENDS` names the patch without which a
part is wrong for some of `draws`. Every other part is right without it, also those that use one of the same operators.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Part = Callable[[Tensor, Tensor, Tensor], Any]

ROWS, COLUMNS, INDICES = 4, 8, 3


def _written(x: Tensor, y: Tensor, i: Tensor) -> list[Tensor]:
    first = x * 2
    rows = torch.cat([first, y])
    first[i] = 7
    return [rows, first]


PARTS: Mapping[str, Part] = {
    "floor": lambda x, y, i: torch.div(x, y, rounding_mode="floor"),
    "floor_divide": lambda x, y, i: x // y,
    "remainder": lambda x, y, i: x % y,
    "quotient": lambda x, y, i: x / (y.abs() + 1),
    "fmod": lambda x, y, i: torch.fmod(x, y),
    "floor_of_integers": lambda x, y, i: (i + 7) // 2,
    "remainder_of_integers": lambda x, y, i: (i + 7) % 3,
    "index_select": lambda x, y, i: x.index_select(0, i) * 2,
    "index_add": lambda x, y, i: x.index_add(0, i, y[:INDICES]),
    "advanced_index": lambda x, y, i: x[i] * 2,
    "expm1": lambda x, y, i: torch.expm1(x),
    "elu": lambda x, y, i: F.elu(x),
    "exp": lambda x, y, i: torch.exp(x) * 2,
    "gelu": lambda x, y, i: F.gelu(x),
    "written_cat": _written,
    "cat": lambda x, y, i: torch.cat([x * 2, y]) + 1,
    "stack": lambda x, y, i: torch.stack([x, y * 2]).sum(0),
    "softmax": lambda x, y, i: x.softmax(-1),
    "layer_norm": lambda x, y, i: F.layer_norm(x, (COLUMNS,)),
    "product": lambda x, y, i: x @ y.mT,
}

MENDS: Mapping[str, str] = {
    **dict.fromkeys(("floor", "floor_divide", "remainder"), "rounded_quotients"),
    **dict.fromkeys(("index_select", "index_add"), "negative_indices"),
    **dict.fromkeys(("expm1", "elu"), "small_exponentials"),
    "written_cat": "written_parts_of_concatenations",
}

PATCHES = tuple(dict.fromkeys(MENDS.values()))


class Parts(nn.Module):
    """Gives the results of each part."""

    def __init__(self, parts: Sequence[str]) -> None:
        super().__init__()
        self.parts = list(parts)

    def forward(self, x: Tensor, y: Tensor, i: Tensor) -> list[Any]:
        return [PARTS[name](x, y, i) for name in self.parts]


def chosen(count: int, seed: int) -> Iterator[tuple[list[str], list[str]]]:
    """For each model its parts, and the patches that it is built without."""
    draw = random.Random(seed)
    for _ in range(count):
        yield draw.sample(sorted(PARTS), 2), [patch for patch in PATCHES if draw.random() < 0.5]


def manifest(count: int, seed: int) -> dict[str, Any]:
    """Of a model `m07` for each of `chosen`, as data.

    The inputs have an `init` of their own, so that smoke runs draw no extreme values: these find some of the bugs, and
    what is audited is what an aotc without them built.
    """
    numbers = {"shape": [ROWS, COLUMNS], "init": f"{__name__}:normal"}
    shapes = {"x": numbers, "y": numbers}
    indices = {"shape": [INDICES], "dtype": "int64", "init": {"randint": [0, ROWS]}}
    models = {
        f"m{number:02}": {
            "factory": f"{__name__}:Parts",
            "kwargs": {"parts": parts},
            "mode": "default",
            "inputs": {**shapes, "i": indices},
            "buckets": [{}],
            "patches": dict.fromkeys(off, False),
        }
        for number, (parts, off) in enumerate(chosen(count, seed))
    }
    return {"version": 1, "models": models}


def normal(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """The `init` of the inputs."""
    return torch.randn(*shape, dtype=dtype, generator=generator)


def draws() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs for which each bug shows: numbers of which `expm1` has few digits, quotients that are nearly integers, an
    infinite divisor, and an index that is negative."""
    small = (torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) - 15.5) * 1e-6
    whole, tenths = torch.arange(1.0, 1 + ROWS * COLUMNS).view(ROWS, COLUMNS), torch.full((ROWS, COLUMNS), 0.1)
    index = torch.tensor([3, 0, 3])
    yield small, whole, index
    yield whole, tenths, index
    yield whole, torch.full((ROWS, COLUMNS), math.inf), index
    yield whole, tenths, torch.tensor([1, -1, 2])


def wrong_parts(model: Parts, compiled: Callable[..., Any]) -> set[str]:
    """The parts of which compiled code gives other results than eager, or a result where eager raises an error."""
    wrong: set[str] = set()
    with torch.no_grad():
        for given in draws():
            refused = [name for name in model.parts if isinstance(_called(PARTS[name], given), Exception)]
            found = _called(compiled, given)
            if refused:
                wrong |= set() if isinstance(found, Exception) else {*refused}
                continue
            for name, result, expected in zip(model.parts, found, model(*given), strict=True):
                wrong |= set() if _is_close(result, expected) else {name}
    return wrong


def _called(call: Callable[..., Any], given: tuple[Tensor, ...]) -> Any:
    try:
        return call(*(value.clone() for value in given))
    except (RuntimeError, IndexError) as error:
        return error


def _is_close(result: Any, expected: Any) -> bool:
    pairs = zip(*([each] if isinstance(each, Tensor) else each for each in (result, expected)), strict=True)
    return all(torch.allclose(one, other, rtol=1e-3, atol=1e-12, equal_nan=True) for one, other in pairs)
