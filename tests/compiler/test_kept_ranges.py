"""Code for a range of sizes is for all of them, or fails to build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sympy
import yaml
from in_process import run_here
from torch.utils._sympy.value_ranges import ValueRanges

from aotc.compiler.patches.sizes_taken_for_fixed import _holds

ROWS, COLUMNS = sympy.symbols("rows columns", integer=True, positive=True)


@pytest.mark.parametrize(
    ("rows", "sizes", "condition"),
    [
        ("rows", {"range": [8, 16], "multiple_of": 2}, "((1/2)*input.shape[0]) == 8"),
        ("2*rows+2", {"range": [3, 7]}, "((-1) + (1/2)*input.shape[0]) == 7"),  # of `rows`, tuned at 7
    ],
)
def test_a_range_that_inductor_takes_for_one_size_fails_the_build(
    rows: str, sizes: dict[str, Any], condition: str, tmp_path: Path
) -> None:
    """Gated linear units, which halve the size of the range."""
    model = {
        "factory": "torch.nn:GLU",
        "kwargs": {"dim": 0},
        "mode": "default",
        "inputs": {"input": {"shape": [rows, 8]}},
        "buckets": [{"rows": sizes}],
    }
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"halves": model}}))
    ran = run_here("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", "--json", cwd=tmp_path)
    assert ran.returncode == 1
    (unit,) = json.loads(ran.stdout)["units"]
    assert unit["status"] == "failed"
    assert f"does not hold for all sizes of the range: it needs `{condition}`" in unit["error"]


@pytest.mark.parametrize("largest", [64, 1 << 20], ids=["each is tried", "by bounds"])
@pytest.mark.parametrize(
    ("relation", "holds"),
    [
        (sympy.Eq(ROWS, 20, evaluate=False), False),
        (sympy.Eq(ROWS, COLUMNS), False),
        (sympy.Eq(sympy.Mod(ROWS * (ROWS + 1), 2), 0), True),
        (sympy.Le(ROWS, COLUMNS), False),
        (sympy.Le(ROWS, COLUMNS + 2 * ROWS), True),
        (sympy.Ge(ROWS * COLUMNS, 64), True),
        (sympy.Ge(ROWS * COLUMNS, 65), False),
    ],
)
def test_a_relation_holds_where_all_sizes_meet_it(relation: Any, holds: bool, largest: int) -> None:
    """In ranges of which each size is tried, and in larger ones."""
    assert _holds(relation, dict.fromkeys((ROWS, COLUMNS), ValueRanges(8, largest))) is holds


def test_a_relation_of_more_sizes_than_can_be_tried_holds_only_where_it_is_proved() -> None:
    """Of three sizes the first combinations alone meet it: only those with many rows do not."""
    pages = sympy.Symbol("pages", integer=True, positive=True)
    large = {symbol: ValueRanges(1, 4096) for symbol in (ROWS, COLUMNS, pages)}
    assert not _holds(sympy.Le(100_000 * ROWS + COLUMNS + pages, 300_000_000), large)
    assert _holds(sympy.Le(100_000 * ROWS + COLUMNS + pages, 409_608_192), large)
    assert not _holds(sympy.Le(100_000 * ROWS + COLUMNS + pages, 409_608_191), large)
