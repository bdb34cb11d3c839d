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
    """Adaptive pooling, whose window is as wide as the input; not so where one value is left, the mean."""
    inputs = {"input": {"shape": [1, 2, "height", 8]}}
    heights = {"height": {"range": [8, 16], "multiple_of": 2}}
    models = {
        f"to-{size}": {
            "factory": "torch.nn:AdaptiveAvgPool2d",
            "kwargs": {"output_size": size},
            "mode": "default",
            "inputs": inputs,
            "buckets": [heights],
        }
        for size in (1, 3)
    }
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    ran = run_aotc("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", "--json", cwd=tmp_path)
    assert ran.returncode == 1
    units = {unit["model"]: unit for unit in json.loads(ran.stdout)["units"]}
    assert units["to-1"]["status"] == "built"
    assert units["to-3"]["status"] == "failed"
    assert "not for all sizes of the range: it needs `((1/2)*input.shape[2]) == 8`" in json.dumps(units["to-3"])


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
