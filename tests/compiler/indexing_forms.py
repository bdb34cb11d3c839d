"""Everything that addresses memory by values of a tensor, in one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, COLUMNS = 24, 37
Form = Callable[[Tensor, Tensor, Tensor], Tensor]

WIDE: dict[str, tuple[int, Form]] = {  # an index of (n, COLUMNS), below the bound; table (ROWS, COLUMNS)
    "gather": (ROWS, lambda t, i, x: t.gather(0, i) * 2),
    "gather_columns": (COLUMNS, lambda t, i, x: x.gather(1, i) + 1),
    "gather_and_sum": (ROWS, lambda t, i, x: t.gather(0, i).sum(1)),
    "gather_bfloat16": (ROWS, lambda t, i, x: t.bfloat16().relu().gather(0, i)),
    "gather_int8": (ROWS, lambda t, i, x: t.to(torch.int8).gather(0, i)),
    "gather_bool": (ROWS, lambda t, i, x: (t > 0).gather(0, i)),
    "take": (ROWS * COLUMNS, lambda t, i, x: t.take(i)),
    "take_along_dim": (COLUMNS, lambda t, i, x: torch.take_along_dim(x, i, 1)),
    "pair_of_indices": (ROWS, lambda t, i, x: t[i, i]),
    "scatter": (ROWS, lambda t, i, x: torch.zeros_like(t).scatter(0, i, x)),
    "scatter_columns": (COLUMNS, lambda t, i, x: torch.zeros_like(x).scatter(1, i, x)),
    "scatter_value": (COLUMNS, lambda t, i, x: torch.zeros_like(x).scatter(1, i, 3.0)),
    "scatter_after_gather": (ROWS, lambda t, i, x: torch.zeros_like(t).scatter(0, i, t.gather(0, i))),
    "scatter_add": (ROWS, lambda t, i, x: torch.zeros_like(t).scatter_add(0, i, x)),
    "scatter_add_ints": (ROWS, lambda t, i, x: torch.zeros_like(t).long().scatter_add(0, i, x.long())),
    "scatter_reduce_max": (ROWS, lambda t, i, x: t.scatter_reduce(0, i, x, "amax")),
    "scatter_reduce_mean": (ROWS, lambda t, i, x: t.scatter_reduce(0, i, x, "mean", include_self=False)),
    "scatter_in_place": (ROWS, lambda t, i, x: t.scatter_(0, i, x)),
    "put": (ROWS * COLUMNS, lambda t, i, x: t.put(i, x, accumulate=True)),
}
NARROW: dict[str, tuple[int, Form]] = {  # an index of (n,)
    "embedding": (ROWS, lambda t, i, x: nn.functional.embedding(i, t)),
    "embedding_int32": (ROWS, lambda t, i, x: nn.functional.embedding(i.int(), t) * x),
    "own_rows": (ROWS, lambda t, i, x: x[i].exp()),
    "own_rows_set": (ROWS, lambda t, i, x: x.index_put((i,), x)),
    "embedding_bag": (ROWS, lambda t, i, x: nn.functional.embedding_bag(i[None], t)),
    "rows": (ROWS, lambda t, i, x: t[i]),
    "rows_and_sum": (ROWS, lambda t, i, x: t[i].sum(0)),
    "rows_and_softmax": (ROWS, lambda t, i, x: (t[i] + x).softmax(1)),
    "rows_padded": (ROWS, lambda t, i, x: nn.functional.pad(t[i], (1, 2, 3, 4))),
    "rows_beside_others": (ROWS, lambda t, i, x: torch.cat([x, t[i], x.double().float()])),
    "rows_float64": (ROWS, lambda t, i, x: t.double()[i] / 3),
    "columns": (COLUMNS, lambda t, i, x: x[:, i].contiguous()),
    "columns_transposed": (COLUMNS, lambda t, i, x: x[:, i].t().contiguous()),
    "rows_and_columns": (ROWS, lambda t, i, x: t[i][:, i]),
    "crossed": (ROWS, lambda t, i, x: t[i[:, None], i]),
    "chained": (ROWS, lambda t, i, x: t[t[:, 0].long().abs().clamp(max=ROWS - 1)[i]]),
    "sum_of_indices": (ROWS, lambda t, i, x: torch.cat([t, t])[i + i.flip(0)]),
    "square": (ROWS, lambda t, i, x: t.repeat(ROWS, 1)[i * i]),
    "absolute": (ROWS, lambda t, i, x: t[i.abs()]),
    "clamped_below": (ROWS, lambda t, i, x: t[i.clamp(min=0)]),
    "from_floats": (ROWS, lambda t, i, x: t[i.double().long()]),
    "chosen": (ROWS, lambda t, i, x: torch.where(x > 0, t[i], 0.0)),
    "index_select": (ROWS, lambda t, i, x: t.index_select(0, i)),
    "index_select_columns": (COLUMNS, lambda t, i, x: x.index_select(1, i)),
    "index_put": (ROWS, lambda t, i, x: torch.zeros_like(t).index_put((i,), x)),
    "index_put_accumulate": (ROWS, lambda t, i, x: torch.zeros_like(t).index_put((i,), x, accumulate=True)),
    "index_put_columns": (COLUMNS, lambda t, i, x: _columns_set(torch.zeros_like(t), i)),
    "index_put_pair": (ROWS, lambda t, i, x: torch.zeros_like(t).index_put((i, i), x[:, 0])),
    "index_put_in_place": (ROWS, lambda t, i, x: t.index_put_((i,), x)),
    "index_put_and_read": (ROWS, lambda t, i, x: torch.zeros_like(t).index_put((i,), x)[i].relu()),
    "index_add": (ROWS, lambda t, i, x: t.index_add(0, i, x)),
    "index_copy": (ROWS, lambda t, i, x: t.index_copy(0, i, x)),
    "index_fill": (ROWS, lambda t, i, x: t.index_fill(0, i, 2.0)),
    "index_reduce": (ROWS, lambda t, i, x: t.index_reduce(0, i, x, "amax")),
    "one_hot": (ROWS, lambda t, i, x: nn.functional.one_hot(i, ROWS)),
    "nll_loss": (COLUMNS, lambda t, i, x: nn.functional.nll_loss(x, i, reduction="none")),
    "cross_entropy": (COLUMNS, lambda t, i, x: nn.functional.cross_entropy(x, i)),
    "beside_a_product": (ROWS, lambda t, i, x: (x @ t.t()).relu() + t[i][:, :ROWS]),
    "into_a_product": (ROWS, lambda t, i, x: t[i] @ x.t()),
}


def _columns_set(matrix: Tensor, columns: Tensor) -> Tensor:
    matrix[:, columns] = 1.5
    return matrix


class Forms(nn.Module):
    """Each form of `names` with a table and an index of its own."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, values: Tensor, tables: dict[str, Tensor], indices: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: form_of(name)[1](tables[name], indices[name], values) for name in self.names}


def forms(names: tuple[str, ...] = (*WIDE, *NARROW)) -> Forms:
    return Forms(tuple(names)).eval()


def inputs(names: tuple[str, ...] = (*WIDE, *NARROW)) -> dict[str, Any]:
    """The manifest's inputs."""
    return {
        "values": {"shape": ["n", COLUMNS]},
        "tables": {name: {"shape": [ROWS, COLUMNS]} for name in names},
        "indices": {
            name: {
                "shape": ["n", COLUMNS] if name in WIDE else ["n"],
                "dtype": "int64",
                "init": {"randint": [0, form_of(name)[0]]},
            }
            for name in names
        },
    }


def form_of(name: str) -> tuple[int, Form]:
    return WIDE[name] if name in WIDE else NARROW[name]


DIVIDED = (torch.int16, torch.int32, torch.int64, torch.int8, torch.uint8)
DIVISIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "truncated": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "floored": lambda a, b: a // b,
    "remainder": lambda a, b: a % b,
    "fmod": torch.fmod,
    "number": lambda a, b: 100 // b,
    "number_remainder": lambda a, b: 100 % b,
    "padded": lambda a, b: nn.functional.pad(a // b, (1, 2)),
    "summed": lambda a, b: (a % b).sum(1),
    "columns": lambda a, b: a[:, 0] // b[:, 0],
    "overflowing": lambda a, b: a // (2 * b.relu() + 2),  # 0 where `b` is the largest
}


class Divisions(nn.Module):
    """Integer divisions of each dtype."""

    def forward(self, dividends: dict[str, Tensor], divisors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
        return {name: [divided(a, divisors[name]) for divided in DIVISIONS.values()] for name, a in dividends.items()}


def divisions() -> Divisions:
    return Divisions().eval()


def division_inputs() -> dict[str, Any]:
    """The manifest's inputs."""
    return {
        argument: {
            str(dtype).removeprefix("torch."): {
                "shape": ["n", COLUMNS],
                "dtype": str(dtype).removeprefix("torch."),
                "init": {"randint": [1, 100]},
            }
            for dtype in DIVIDED
        }
        for argument in ("dividends", "divisors")
    }


class Epilogue(nn.Module):
    """A matrix product, and what may be fused with it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, 64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, words: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
        product = self.linear(x)
        return product.relu() + self.words(words) * 2, torch.zeros(ROWS, 64).index_put(
            (words // parts,), self.linear(x), accumulate=True
        )


def epilogue() -> Epilogue:
    return Epilogue().eval()


EPILOGUE_INPUTS: dict[str, Any] = {
    "x": {"shape": ["n", 64]},
    "words": {"shape": ["n"], "dtype": "int64", "init": {"randint": [0, ROWS]}},
    "parts": {"shape": ["n"], "dtype": "int64", "init": {"randint": [1, 5]}},
}
