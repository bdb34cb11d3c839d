"""A request with an index that is out of bounds gets an error, and the next request its result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import run_aotc

import aotc

MODEL = """
import torch
from torch import nn

class Indexing(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 48)
        self.linear = nn.Linear(48, 48)

    def forward(self, words, short, columns, rows):
        found = nn.functional.gelu(self.linear(self.words(words) + self.words(short)))
        picked = found.flatten(0, 1).gather(1, columns) * 2
        padded = nn.functional.pad(self.words.weight[rows], (0, 0, 1, 1)).sum(1)
        written = torch.zeros(64, 48).index_put((rows[:4],), found[:4, 0].relu())
        return found, picked, padded, written
"""
INPUTS = {
    "words": {"shape": [16, "n"], "dtype": "int64", "init": {"randint": [0, 100]}},
    "short": {"shape": [16, "n"], "dtype": "int32", "init": {"randint": [0, 100]}},
    "columns": {"shape": ["16*n", 5], "dtype": "int64", "init": {"randint": [0, 48]}},
    "rows": {"shape": [64], "dtype": "int64", "init": {"randint": [0, 64]}},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("indexing")
    (folder / "indexing_model.py").write_text(MODEL)
    model = {"factory": "indexing_model.py:Indexing", "mode": "default", "inputs": INPUTS, "buckets": [{"n": 32}]}
    (folder / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"indexing": model}}))
    ran = run_aotc("build", folder / "manifest.yaml", "--store", folder / "store", cwd=folder)
    assert ran.returncode == 0, ran.stderr
    return folder


def calls() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(*form["init"]["randint"], shape, generator=generator, dtype=getattr(torch, form["dtype"]))
        for (name, form), shape in zip(INPUTS.items(), [(16, 32), (16, 32), (512, 5), (64,)], strict=True)
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("words", 100),
        ("words", -101),
        ("words", 2**40),
        ("short", 100),
        ("columns", 48),
        ("rows", 100),
        ("rows", -101),
    ],
)
def test_an_index_out_of_bounds_fails_the_call_alone(
    built: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str, value: int
) -> None:
    monkeypatch.syspath_prepend(str(built))
    import indexing_model

    module: Any = indexing_model.Indexing().eval()
    compiled = aotc.load("indexing", module, store=built / "store", cache=built / "cache")
    good, bad = calls(), calls()
    bad[name].view(-1)[bad[name].numel() // 2 + 1] = value
    with torch.no_grad():
        expected = module(**good)
        with pytest.raises((IndexError, RuntimeError)):
            module(**bad)
        for _ in range(2):
            with pytest.raises(aotc.LibraryError):
                compiled(**bad)
            assert "index out of bounds" in capfd.readouterr().err
            for one, other in zip(compiled(**good), expected, strict=True):
                torch.testing.assert_close(one, other)


def test_a_table_that_is_too_short_for_the_bucket_is_named_as_such(built: Path, tmp_path: Path) -> None:
    inputs = {**INPUTS, "words": {**INPUTS["words"], "init": {"randint": [0, 200]}}}
    model = {"factory": "indexing_model.py:Indexing", "mode": "default", "inputs": inputs, "buckets": [{"n": 32}]}
    (built / "beyond.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"beyond": model}}))
    ran = run_aotc("build", built / "beyond.yaml", "--store", tmp_path / "store", cwd=built)
    assert ran.returncode == 1
    assert "hint: an index is beyond what it indexes" in ran.stderr, ran.stderr
