"""Builds of `aotc.compile` in forks of a process that has imported torch's compiler, with one pair of fork servers for
all of them: for programs of `forked_python.py`, each of whose builds takes seven seconds of CPU less.

A program that `python_forks.py` has forked starts `STAND_IN` in the place of Python. That passes the build's arguments,
variables and open files to this process, which it starts if it does not run, and ends with the status of the build.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

BUILD = "aotc.tools.remembering.building.build_process"
LIBRARIES = (
    *("transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert"),
    *("diffusers.models.unets.unet_2d_condition", "peft"),
)
"""What the processes of a build of a library's model would each import, for up to 5 s."""
FIRST = 64
"""The first number of this process's own files: a build has its files at the numbers that its program gave them."""

STAND_IN = """#!{python} -IS
import array, fcntl, json, os, socket, subprocess, sys, time
if {build!r} not in sys.argv:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
given = [number for number in map(int, os.listdir("/proc/self/fd")) if os.path.exists(f"/proc/self/fd/{{number}}")]
with open({lock!r}, "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        asked = socket.socket(socket.AF_UNIX)
        asked.connect({address!r})
    except ConnectionRefusedError:
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.Popen([{python!r}, *{command!r}], start_new_session=True, env={variables!r}, **quiet)
        for _ in range(3000):
            time.sleep(0.1)
            try:
                asked.connect({address!r})
                break
            except ConnectionRefusedError:
                pass
text = json.dumps([sys.argv[sys.argv.index({build!r}):], os.getcwd(), dict(os.environ), given]).encode()
asked.sendmsg([len(text).to_bytes(8, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))])
asked.sendall(text)
sys.exit(int(asked.recv(16) or 1))
"""
"""The text of that program: `python`, `build`, `lock`, `address`, `command` and `variables` are filled in."""


def stand_in(folder: Path, inherited: dict[str, str]) -> Path:
    """Write it into a folder, for programs of this process. `inherited` are the variables with which the process of
    builds starts."""
    name = f"aotc-builds-{os.getpid()}"
    file = folder / "python"
    file.write_text(
        STAND_IN.format(
            python=sys.executable,
            build=BUILD,
            lock=str(folder / "lock"),
            address=f"\0{name}",
            command=["-W", "ignore", __file__, name, str(os.getpid())],
            variables=inherited,
        )
    )
    file.chmod(0o755)
    return file


def serve(name: str, parent: int) -> None:
    """Fork a process for each build, as long as the process `parent` lives."""
    for _ in range(FIRST):
        os.open(os.devnull, os.O_RDONLY)
    shared = Shared()
    shared.of()
    for module in (BUILD, "aotc.compiler.pipeline", "aotc.compiler.mistakes", "aotc.models.factory"):
        importlib.import_module(module)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    building: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        listening.settimeout(0.05)
        while building or Path(f"/proc/{parent}").exists():
            with suppress(TimeoutError):
                asked, _ = listening.accept()
                asked.settimeout(60)
                request = _received(asked)
                servers = shared.of(*_libraries_of(request))
                child = os.fork()
                if child == 0:
                    _share(servers)
                    _become_build(request, inherited)
                    return
                building[child] = asked
                for file in request.files:
                    os.close(file)
            with suppress(ChildProcessError):
                ended, status = os.waitpid(-1, os.WNOHANG)
                if ended in building:
                    with building.pop(ended) as connection, suppress(OSError):
                        connection.sendall(str(os.waitstatus_to_exitcode(status) & 0xFF).encode())
    shared.close()


class Shared:
    """Fork servers that have imported these libraries, too, from the first build on that needs them."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, ...], Any] = {}

    def of(self, *libraries: str) -> Any:
        from aotc.compiler.workers import unit_servers

        if libraries not in self._begun:
            servers = unit_servers.ForkServers(common=(*unit_servers._COMMON, *libraries))
            importer = servers.begin()
            for library in libraries:
                importlib.import_module(library)
            self._begun[libraries] = servers
            servers.begin = lambda environment=None: importer  # type: ignore[method-assign]
        return self._begun[libraries]

    def close(self) -> None:
        for servers in self._begun.values():
            servers.close()


class Request(NamedTuple):
    """What a build is given: `files` are its open files here, `numbers` theirs in its program."""

    files: list[int]
    arguments: list[str]
    cwd: str
    variables: dict[str, str]
    numbers: list[int]


def _received(asked: socket.socket) -> Request:
    header, files, _, _ = socket.recv_fds(asked, 8, FIRST)
    text = bytearray()
    while len(text) < int.from_bytes(header, "big"):
        text += asked.recv(1 << 16)
    return Request(list(files), *json.loads(text))


def _libraries_of(request: Request) -> tuple[str, ...]:
    """Of a job that names one of them, all that are installed."""
    job = Path(request.arguments[1]).read_text()
    packages = {name.partition(".")[0] for name in LIBRARIES}
    if not any(package in job for package in packages):
        return ()
    found = {package for package in packages if importlib.util.find_spec(package)}
    return tuple(name for name in LIBRARIES if name.partition(".")[0] in found)


def _become_build(request: Request, inherited: list[str]) -> None:
    """Run the build here; Python's own end follows."""
    os.setsid()
    for file, number in zip(request.files, request.numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.variables)
    given = [path for path in request.variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*given, *(path for path in sys.path[1:] if path not in inherited)]
    sys.argv[:] = request.arguments
    sys.modules["__main__"] = ModuleType("__main__")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if level := request.variables.get("AOTC_LOG"):
        from aotc.log import log_to_stderr

        log_to_stderr(level)
    importlib.import_module(BUILD).main()


def _share(servers: Any) -> None:
    """Let the build of this process use the servers of all, one request at a time."""
    from aotc.compiler.workers import unit_servers

    servers.close = lambda: None
    unit_servers.ForkServers = lambda: servers  # type: ignore[assignment, misc]
    start = unit_servers.ForkServer.start

    def start_in_turn(self: Any, *given: Any) -> Any:
        with Path(__file__).open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return start(self, *given)

    unit_servers.ForkServer.start = start_in_turn  # type: ignore[method-assign]


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
