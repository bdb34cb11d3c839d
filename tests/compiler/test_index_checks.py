"""A request with an index that is out of bounds, or an integer divisor of 0, gets an error, and the next its result.

Calls are made in processes of their own: what is tested ended the process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import indexing_forms
import pytest
import yaml
from in_process import run_here

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexing")
    for name in ("indexing_forms.py", "guarded_calls.py"):
        (folder / name).write_text((HERE / name).read_text())
    models = {
        "forms": {"inputs": indexing_forms.inputs(), "buckets": [{"n": 35}]},
        "divisions": {"inputs": indexing_forms.division_inputs(), "buckets": [{"n": [1, 64]}]},
        "epilogue": {"inputs": indexing_forms.EPILOGUE_INPUTS, "buckets": [{"n": 35}], "mode": "max-autotune"},
    }
    models = {
        name: {"mode": "default", "factory": f"indexing_forms.py:{name}", **model} for name, model in models.items()
    }
    (folder / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}, sort_keys=False))
    ran = run_here("build", folder / "manifest.yaml", "--store", folder / "store", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return folder


@pytest.mark.parametrize("what", ["forms start", "forms end", "divisions", "epilogue"])
def test_calls_with_values_that_eager_refuses_fail_alone_and_touch_no_memory(built: Path, what: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2" if what == "epilogue" else "1"}
    ran = subprocess.run(
        [sys.executable, built / "guarded_calls.py", *what.split()],
        cwd=built, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, f"exit status {ran.returncode}\n{ran.stdout}{ran.stderr[-2000:]}"


def test_a_table_that_is_too_short_for_the_bucket_is_named_as_such(built: Path, tmp_path: Path) -> None:
    inputs = {
        **indexing_forms.EPILOGUE_INPUTS,
        "words": {"shape": ["n"], "dtype": "int64", "init": {"randint": [0, 200]}},
    }
    model = {"factory": "indexing_forms.py:epilogue", "mode": "default", "inputs": inputs, "buckets": [{"n": 32}]}
    (built / "beyond.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"beyond": model}}))
    ran = run_here("build", built / "beyond.yaml", "--store", tmp_path / "store", cwd=built)
    assert ran.returncode == 1
    assert "hint: an index is out of range" in ran.stderr, ran.stderr
