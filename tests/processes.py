"""Processes that tests start: the command line, and Python with aotc and the zoo's models importable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ZOO = ROOT / "tests" / "zoo"
TIMEOUT = 300
"""Seconds that any process of a test may take."""

_PYTHON = (sys.executable, "-W", "ignore:Failed to initialize NumPy")


def environment(**changes: str) -> dict[str, str]:
    paths = [str(ROOT), str(ZOO), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def start(*command: object, cwd: Path = ROOT, stdin: int = subprocess.DEVNULL, **changes: str) -> subprocess.Popen[str]:
    """Start Python with these arguments; both of its streams are pipes."""
    return subprocess.Popen(
        [*_PYTHON, *map(str, command)],
        cwd=cwd,
        env=environment(**changes),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_let_ctrl_c_end_it,
    )


def _let_ctrl_c_end_it() -> None:
    """Tests that a shell runs in the background were told to ignore it, and so would everything that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_aotc(*arguments: object, cwd: Path = ROOT, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command line, to its end."""
    return finish(start("-m", "aotc", *arguments, cwd=cwd, **changes))


def run_python(code: str, *arguments: object, **changes: str) -> str:
    """What `code` prints; an AssertionError with its errors where it fails."""
    ran = finish(start("-c", code, *arguments, **changes))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def processes_that_name(text: str, variable: str = "") -> list[str]:
    """The command lines of all running processes in which `text` stands; of those with `variable` in their environment,
    as `NAME=VALUE`, if it is given."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            environment = (folder / "environ").read_bytes().split(b"\0") if variable else []
        except OSError:
            continue
        if variable and variable.encode() not in environment:
            continue
        if text in command and folder.name != str(os.getpid()):
            found.append(command)
    return found


def wait_until_none_names(text: str, seconds: float, variable: str = "") -> list[str]:
    """Wait for those processes to end; the ones that are left after `seconds`."""
    deadline = time.monotonic() + seconds
    while (left := processes_that_name(text, variable)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left
