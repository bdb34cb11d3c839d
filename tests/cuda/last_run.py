"""The log of the last run of the whole suite on a GPU, `last_run.json` beside this file, which is committed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent
LOG = FOLDER / "last_run.json"
BEGAN = time.monotonic()


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the log after a run of this folder's tests, all of them. With pytest-xdist, its first process does so."""
    if not _is_whole(config) or exitstatus not in (0, 1) or not torch.cuda.is_available():
        return
    commit = _commit()
    if not commit:
        terminalreporter.write_line(
            "tests/cuda/last_run.json is not written: set AOTC_COMMIT to the commit of this tree"
        )
        return
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    run = {
        "commit": commit,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "torch": str(torch.__version__),
        "gpu": torch.cuda.get_device_name(),
        "passed": counts["passed"],
        "failed": counts["failed"] + counts["error"],
        "skipped": counts["skipped"],
        "seconds": round(time.monotonic() - BEGAN),
    }
    LOG.write_text(json.dumps(run, indent=2) + "\n")
    terminalreporter.write_line(f"written: {LOG}")


def _is_whole(config: pytest.Config) -> bool:
    if hasattr(config, "workerinput"):  # a worker of pytest-xdist that has lost the first process
        return False
    options = config.option
    chosen = options.keyword or options.markexpr or options.maxfail or getattr(options, "deselect", None)
    return not chosen and [Path(each).resolve() for each in config.args] == [FOLDER.resolve()]


def _commit() -> str:
    """$AOTC_COMMIT, for a copy of the tree without its history; or that of the checkout, with "+" if files differ."""
    if given := os.environ.get("AOTC_COMMIT", ""):
        return given
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + "+" * bool(_git("status", "--porcelain", "--untracked-files=no", "--", "aotc", "tests/cuda"))
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(FOLDER.parents[1]), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
