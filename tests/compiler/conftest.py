"""Small builds: for tests that look at how builds run, and of models of a test's own."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import build_here
from processes import ZOO

import aotc

Compile = Callable[..., tuple[aotc.Compiled, Any]]


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """Two units of the zoo's smallest model; the code lies beside the manifest, and only there."""
    folder = tmp_path / "models"
    folder.mkdir()
    shutil.copy(ZOO / "models.py", folder)
    linear = {
        "factory": "models.py:Linear",
        "inputs": {"x": {"shape": ["batch", 8]}},
        "buckets": [{"batch": 2}, {"batch": 3}],
        "mode": "default",
    }
    (folder / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"linear": linear}}))
    return folder / "manifest.yaml"


FAKE_COMPILER = """#!/bin/sh
# Copies the source to what follows -o, and counts compiles.
case " $* " in *" --version "*) echo "fake 1.0"; exit;; esac
for word in "$@"; do
  case "$word" in *.cpp) source=$word;; esac
  [ "$last" = -o ] && target=$word
  last=$word
done
cat "$source" > "$target"
case " $* " in *" -E "*) ;; *) echo "$source" >> "{log}";; esac
"""


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "fake-c++"
    path.write_text(FAKE_COMPILER.format(log=tmp_path / "log"))
    path.chmod(0o755)
    return path


@pytest.fixture
def compile_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """Builds and loads the class `Model` of a file's text, with what a manifest says of it."""

    def compile_model(text: str, **fields: Any) -> tuple[aotc.Compiled, Any]:
        (tmp_path / "own_model.py").write_text(text)
        spec = {"factory": "own_model.py:Model", "mode": "default", **fields}
        (tmp_path / "own.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"own": spec}}))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "own_model", raising=False)
        report = build_here(tmp_path / "own.yaml", tmp_path / "store", jobs=1, share=False)
        assert not report.failed, [outcome.error for outcome in report.failed]
        module = importlib.import_module("own_model").Model().eval()
        return aotc.load("own", module, store=tmp_path / "store", cache=tmp_path / "cache"), module

    return compile_model
