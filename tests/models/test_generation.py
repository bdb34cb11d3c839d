"""The examples of examples/generation: `generate()` of transformers gives the same tokens by compiled code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from built_models import Built, build
from processes import ROOT, run_python

EXAMPLES = ROOT / "examples" / "generation"


@pytest.fixture(scope="session")
def generation(shared_folder: Path) -> Built:
    pytest.importorskip("transformers")
    built = build(shared_folder, EXAMPLES / "manifest.yaml", {})
    assert not [unit["error"] for unit in built.report["units"] if unit["error"]]
    return built


@pytest.mark.parametrize("example", ["causal_lm", "t5", "whisper", "vision_language"])
def test_compiled_code_generates_the_tokens_of_eager(generation: Built, example: str) -> None:
    """Each example compares the two itself, and fails where they differ."""
    code = "import compiled_generation, runpy, sys; compiled_generation.STORE = sys.argv[2]; "
    code += "runpy.run_path(sys.argv[1], run_name='__main__')"
    shown = run_python(code, EXAMPLES / f"{example}.py", generation.store, PYTHONPATH=f"{ROOT}:{EXAMPLES}").splitlines()
    eager, compiled = (json.loads(line.partition(": ")[2]) for line in shown[-2:])
    assert eager == compiled and len(set(eager)) > 1
