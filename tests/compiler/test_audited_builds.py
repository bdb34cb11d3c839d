"""A store whose artifacts were built without some patches: `tests/benchmarks/audit.py` with few of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from in_process import run_here

from tests.benchmarks.audit_counts import measured
from tests.benchmarks.audit_models import manifest

COUNT, SEED = 3, 47
"""A selection of rows that is not bounded to few torches, an ELU, a remainder; and a concatenation, which is right."""


def test_an_audit_names_what_is_wrong_and_not_what_has_the_patch_or_lacks_the_operator(tmp_path: Path) -> None:
    (path := tmp_path / "models.yaml").write_text(json.dumps(manifest(COUNT, SEED)))
    ran = run_here("build", path, "--store", tmp_path / "store", "--jobs", "1", "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "the patch `negative_indices` is off, by the manifest" in ran.stdout
    counts, others, unbuilt = measured(tmp_path / "store", COUNT, SEED)
    total: Counter[str] = sum(counts.values(), Counter())
    assert (total["missed"], others, unbuilt) == (0, 0, [])
    assert counts["negative_indices"]["wrong"] == counts["rounded_quotients"]["wrong"] == 1
    assert total["wrong"] <= total["hits"] < total["without"]
