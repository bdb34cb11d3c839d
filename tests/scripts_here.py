"""Scripts whose `aotc` commands run in the test's process, which has imported torch and its compiler (`in_process`)."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from in_process import run_here
from processes import TIMEOUT

COMMANDS = ("advise", "audit", "build", "gc", "init", "merge", "push", "verify")
"""Those that run here. Others are fast, or start a process that takes their place."""

_ASK = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1:2] and sys.argv[1] in {commands}:
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect({address!r})
        asked.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
        asked.shutdown(socket.SHUT_WR)
        code, out, err = json.loads(b"".join(iter(lambda: asked.recv(1 << 16), b"")))
    sys.stderr.write(err)
    sys.stdout.write(out)
    sys.exit(code)
os.execv({python!r}, [{python!r}, "-W", "ignore", "-m", "aotc", *sys.argv[1:]])
"""
_OF_A_SHELL = ("PWD", "OLDPWD", "SHLVL", "_")
_numbers = itertools.count()


def run_script(command: Sequence[object], cwd: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, to its end; both of its streams are `stdout`. The `aotc` that it finds on PATH asks
    this process to run `COMMANDS`. ConnectionError, said by the command, where it goes on after its end."""
    address = f"\0aotc-tests-{os.getpid()}-{next(_numbers)}"
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as output,
        socket.socket(socket.AF_UNIX) as asked,
    ):
        asked.bind(address)
        asked.listen()
        asked.settimeout(0.05)
        aotc = Path(folder, "aotc")
        aotc.write_text(_ASK.format(python=sys.executable, commands=COMMANDS, address=address))
        aotc.chmod(0o755)
        given = {**variables, "PATH": f"{folder}{os.pathsep}{variables['PATH']}"}
        words = [str(word) for word in command]
        with subprocess.Popen(words, cwd=cwd, env=given, stdout=output, stderr=subprocess.STDOUT) as process:
            try:
                while process.poll() is None:
                    _answer(asked, variables)
            finally:
                process.kill()
        output.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, output.read())


def _answer(asked: socket.socket, variables: dict[str, str]) -> None:
    """Run a command that is asked for, with the variables that the script has changed."""
    try:
        connection, _ = asked.accept()
    except TimeoutError:
        return
    with connection:
        connection.settimeout(TIMEOUT)
        arguments, folder, environment = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
        changes = {
            name: value
            for name, value in environment.items()
            if os.environ.get(name) != value and name not in (*_OF_A_SHELL, "PYTHONPATH")
        }
        ran = run_here(*arguments, cwd=Path(folder), **changes)
        connection.sendall(json.dumps([ran.returncode, ran.stdout, ran.stderr]).encode())
