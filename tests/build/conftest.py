"""A small build for tests that look at how builds run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from processes import ZOO


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
