"""The log of the last run of a suite that is not of CI: `last_run.json` in the suite's folder, which is committed."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

BEGAN = time.monotonic()


def write_log(
    folder: Path,
    facts: Mapping[str, str],
    terminalreporter: Any,
    exitstatus: int,
    config: pytest.Config,
    marker: str = "",
) -> None:
    """Write the log after a run of all tests of `folder`, which those of `marker` are. With pytest-xdist, its first
    process does so. `facts` are of the machine and its versions."""
    if not _is_whole(config, folder, marker) or exitstatus not in (0, 1):
        return
    log = folder / "last_run.json"
    commit = _commit(folder)
    if not commit:
        terminalreporter.write_line(f"{log} is not written: set AOTC_COMMIT to the commit of this tree")
        return
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    run = {
        "commit": commit,
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        **facts,
        "passed": counts["passed"],
        "failed": counts["failed"] + counts["error"],
        "skipped": counts["skipped"],
        "seconds": round(time.monotonic() - BEGAN),
    }
    log.write_text(json.dumps(run, indent=2) + "\n")
    terminalreporter.write_line(f"written: {log}")


def _is_whole(config: pytest.Config, folder: Path, marker: str) -> bool:
    if config.option.collectonly or hasattr(
        config, "workerinput"
    ):  # or a worker of pytest-xdist that has lost the first process
        return False
    options = config.option
    chosen = options.keyword or options.markexpr != marker or options.maxfail or getattr(options, "deselect", None)
    return not chosen and [Path(each).resolve() for each in config.args] == [folder.resolve()]


def _commit(folder: Path) -> str:
    """$AOTC_COMMIT, for a copy of the tree without its history; or that of the checkout, with "+" if files differ."""
    if given := os.environ.get("AOTC_COMMIT", ""):
        return given
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/aotc", ".")
        return commit + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
