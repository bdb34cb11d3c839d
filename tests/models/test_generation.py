"""The examples of examples/generation: `generate()` of transformers gives the same tokens by compiled code."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path

import pytest
from built_models import LIBRARY, Built, build
from in_process import code_forgotten
from processes import ROOT

EXAMPLES = ROOT / "examples" / "generation"


@pytest.fixture(scope="session")
def generation(shared_folder: Path) -> Built:
    pytest.importorskip("transformers")
    built = build(shared_folder, EXAMPLES / "manifest.yaml", {}, LIBRARY)
    assert not [unit["error"] for unit in built.report["units"] if unit["error"]]
    return built


@pytest.mark.parametrize("example", ["causal_lm", "flex_attention", "t5", "whisper", "vision_language"])
def test_compiled_code_generates_the_tokens_of_eager(
    generation: Built, example: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each example compares the two itself, and fails where they differ."""
    with code_forgotten(EXAMPLES.parent):
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(importlib.import_module("compiled_generation"), "STORE", generation.store)
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    shown = capsys.readouterr().out.splitlines()
    eager, compiled = (json.loads(line.partition(": ")[2]) for line in shown[-2:])
    assert eager == compiled and len(set(eager)) > 1
