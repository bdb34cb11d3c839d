"""Code for a range of sizes is for all of them, or fails to build."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sympy
import yaml
from processes import run_aotc
from torch.utils._sympy.value_ranges import ValueRanges

from aotc.build.kept_ranges import _fails

ROWS, COLUMNS = sympy.symbols("rows columns", integer=True, positive=True)


def test_a_range_that_inductor_takes_for_one_size_fails_the_build(tmp_path: Path) -> None:
    """Gated linear units, which halve the size of the range."""
    model = {
        "factory": "torch.nn:GLU",
        "kwargs": {"dim": 0},
        "mode": "default",
        "inputs": {"input": {"shape": ["rows", 8]}},
        "buckets": [{"rows": {"range": [8, 16], "multiple_of": 2}}],
    }
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"halves": model}}))
    ran = run_aotc("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", "--json", cwd=tmp_path)
    assert ran.returncode == 1
    (unit,) = json.loads(ran.stdout)["units"]
    assert unit["status"] == "failed"
    assert "not for all sizes of the range: it needs `((1/2)*input.shape[0]) == 8`" in unit["error"]


@pytest.mark.parametrize("largest", [64, 1 << 20], ids=["each", "a few"])
@pytest.mark.parametrize(
    ("condition", "fails"),
    [
        (sympy.Eq(ROWS, 20), True),
        (sympy.Eq(ROWS, COLUMNS), True),
        (sympy.Eq(sympy.Mod(ROWS * (ROWS + 1), 2), 0), False),
        (sympy.Eq(sympy.Min(ROWS, COLUMNS) * sympy.Max(ROWS, COLUMNS), ROWS * COLUMNS), False),
        (sympy.Eq(sympy.Symbol("elsewhere"), 20), False),
    ],
)
def test_a_condition_fails_where_some_sizes_do_not_meet_it(condition: sympy.Basic, fails: bool, largest: int) -> None:
    """In ranges of which each size is tried, and in larger ones."""
    assert _fails(condition, dict.fromkeys((ROWS, COLUMNS), ValueRanges(8, largest))) is fails
