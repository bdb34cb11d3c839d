"""Processes of the benchmarks start from empty caches, or from those that an earlier one filled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

_FOREIGN = ("TORCHINDUCTOR", "INDUCTOR", "TRITON_CACHE", "AOTC", "XDG", "CUDA_CACHE")
_FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "AOTC_CACHE_DIR": "aotc",
    "HOME": "home",
    "TMPDIR": "tmp",
}


def environment(caches: Path) -> dict[str, str]:
    """The caller's environment with every cache in the folder `caches`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    for folder in _FOLDERS.values():
        (caches / folder).mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **kept,
        **{name: str(caches / folder) for name, folder in _FOLDERS.items()},
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONWARNINGS": "ignore",
    }


class Failed(Exception):
    """A process of the benchmark ended with an error; the text is the end of what it wrote."""


def spawn(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run Python to its end. Raises Failed."""
    variables = {**variables, "BENCHMARK_SPAWNED": repr(time.time())}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed("\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]) or f"exit {done.returncode}")
