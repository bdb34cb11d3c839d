"""Building what the tests of models share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
from in_process import run_here
from processes import run_aotc

FOLDER = Path(__file__).parent
OPERATORS = FOLDER / "operators"
LIBRARY = tuple(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "llama", "t5", "whisper", "llava"))
"""What the processes of a build of transformers' models would each import, for up to 5 s."""


@dataclass(frozen=True)
class Built:
    """A store, what `aotc build --json` said, and the environment variables with which its models can be imported."""

    store: Path
    report: dict[str, Any]
    variables: dict[str, str]

    def unit(self, model: str) -> dict[str, Any]:
        return next(unit for unit in self.report["units"] if unit["model"] == model)


def build(folder: Path, manifest: Path, variables: dict[str, str], imports: tuple[str, ...] = ()) -> Built:
    """Once for all processes of pytest-xdist. Units may fail. `imports` are of `in_process.shared_servers`."""
    store = folder / f"{manifest.parent.name}-{manifest.stem}-store"
    report = store.with_suffix(".json")
    with filelock.FileLock(store.with_suffix(".lock")):
        if not report.exists():
            options = ("build", manifest, "--store", store, "--jobs", "2", "--json")
            ran = run_aotc(*options, **variables) if variables else run_here(*options, imports=imports)
            assert ran.stdout.startswith("{"), ran.stdout + ran.stderr
            report.write_text(ran.stdout)
    return Built(store, json.loads(report.read_text()), variables)
