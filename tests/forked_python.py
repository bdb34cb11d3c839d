"""Python processes forked from one that has imported torch, and nothing else that `python -c` does not: each takes two
seconds of CPU less. A child is as a fresh process in all that a program sees, but for its command line.

`python_forks.py` is that process.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import tempfile
from pathlib import Path

from processes import ROOT, TIMEOUT, environment, finish, start

READ_LATER = ("ACME_", "AOTC_", "AWS_", "COSIGN_", "PATH", "PYTEST_", "PYTHONPATH")
"""Variables that begin so are read after torch is imported. Of others torch may make something as it is imported."""

_servers: list[tuple[subprocess.Popen[str], dict[str, str]]] = []

CHILDREN = """
import os, signal, threading, traceback

def child(action):
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # ends it where it hangs
        try:
            os._exit(0 if action() else 1)
        except BaseException:
            traceback.print_exc()
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def beside(action):
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread
"""
"""For programs that fork: `child(action)` is a child's status, 0 where the action gives true there; `beside` starts a
thread."""


def run_forked(
    code: str, *arguments: object, file: Path | None = None, cwd: Path = ROOT, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run Python's `code`, to its end, as `python -c CODE` or `python FILE` does. Where other variables than
    `READ_LATER` have changed, it is that."""
    if not _servers:
        _servers.append((start(Path(__file__).with_name("python_forks.py"), stdin=subprocess.PIPE), environment()))
        atexit.register(_servers[0][0].kill)
    ((server, before),) = _servers
    variables = environment(**changes)
    changed = [name for name in {*variables, *before} if variables.get(name) != before.get(name)]
    if not all(name.startswith(READ_LATER) for name in changed):
        return finish(start(*(("-c", code) if file is None else (file,)), *arguments, cwd=cwd, **changes))
    assert server.stdin is not None and server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("stdout", "stderr")]
        asked = {
            "code": code,
            "arguments": [str(file or "-c"), *map(str, arguments)],
            "cwd": str(cwd),
            "environment": variables,
            "streams": list(map(str, streams)),
            "seconds": TIMEOUT,
        }
        server.stdin.write(f"{json.dumps(asked)}\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(asked["arguments"], status, *(path.read_text() for path in streams))


def forked_python(code: str, *arguments: object, **changes: str) -> str:
    """What `code` prints; an AssertionError with its errors where it fails. As `run_python`."""
    ran = run_forked(code, *arguments, **changes)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout
