"""Writes down which restored files a process opens, and which compilers it starts, for `aotc cache receipt`.

Of the standard library only. `sitecustomize` begins it where PYTHONPATH has this folder, `aotc.tools.caches.receipt`
in a process that runs already.

    AOTC_RECEIPT        the folder of the receipt: a line of JSON for each file and each compiler, in `log`
    AOTC_NO_COMPILER    1: a compiler that starts is a RuntimeError, which names what it would have compiled
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from typing import Any

_COMPILER = re.compile(
    r"(.*-)?(gcc|g\+\+|cc|c\+\+|clang|clang\+\+|cc1|cc1plus|nvcc|cicc|ptxas|hipcc|icpx|icx)(-[\d.]+)?"
)
_SOURCE = re.compile(r"[^-].*\.(c|cc|cpp|cxx|cu|h|hpp|hip|ptx|s|S|ll)")
_STARTS = {"subprocess.Popen": 1, "os.posix_spawn": 1, "os.exec": 1, "os.system": 0}
"""Events of processes that start, and which of their arguments is the command."""


_PAUSED = threading.local()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """While active, files that this thread opens are not recorded: inspecting files is not using them."""
    before, _PAUSED.on = getattr(_PAUSED, "on", False), True
    try:
        yield
    finally:
        _PAUSED.on = before


def _command(given: Any) -> list[str]:
    if isinstance(given, bytes | str):
        text = os.fsdecode(given)
        with contextlib.suppress(ValueError):
            return shlex.split(text)
        return text.split()
    return [os.fsdecode(each) for each in given]


class _Log:
    """Appends lines, each once: a file that is opened twice is used."""

    def __init__(self, folder: str) -> None:
        with open(os.path.join(folder, "restored.json"), encoding="utf-8") as stream:  # noqa: PTH118, PTH123
            self._files = {each["path"] for each in json.load(stream)["files"]}
        self._descriptor = os.open(
            os.path.join(folder, "log"),  # noqa: PTH118
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC,
            0o666,
        )
        self._written: set[str] = set()
        self.write({"started": sys.argv[:1] or [sys.executable]})

    def write(self, what: dict[str, Any]) -> None:
        line = json.dumps(what)
        if line not in self._written:
            self._written.add(line)
            os.write(self._descriptor, f'{line[:-1]}, "pid": {os.getpid()}}}\n'.encode())

    def used(self, path: Any) -> None:
        if not isinstance(path, bytes | str) or getattr(_PAUSED, "on", False):
            return
        name = os.path.realpath(os.fsdecode(path))
        if name in self._files:
            self.write({"used": name})

    def mapped(self) -> None:
        """Shared libraries that C++ code has opened, which Python's audit hooks do not see."""
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as stream:  # noqa: PTH123
            for line in stream:
                self.used("".join(line.split(maxsplit=5)[5:]).rstrip("\n"))


def _watch(log: _Log | None, refuses: bool) -> None:
    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and log is not None:
            if not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                log.used(arguments[0])
        elif event == "ctypes.dlopen" and log is not None:
            log.used(arguments[0])
        elif event == "import" and log is not None:
            log.used(arguments[1])
        elif event in _STARTS:
            command = _command(arguments[_STARTS[event]])
            sources = [each for each in command[1:] if _SOURCE.fullmatch(each)]
            if not command or not sources or not _COMPILER.fullmatch(os.path.basename(command[0])):  # noqa: PTH119
                return
            if log is not None:
                log.write({"compiler": command[0], "sources": sources})
            if refuses:
                raise RuntimeError(f"{command[0]} was started for {', '.join(sources)}, and AOTC_NO_COMPILER is 1")

    sys.addaudithook(hook)
    if log is not None:
        atexit.register(log.mapped)


def start() -> None:
    """Watch this process and what it forks, if the environment asks for it. To be called once."""
    folder, refuses = os.environ.get("AOTC_RECEIPT"), os.environ.get("AOTC_NO_COMPILER") == "1"
    log = None
    if folder:
        try:
            log = _Log(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            sys.stderr.write(f"aotc: AOTC_RECEIPT is {folder}, and nothing can be written down there: {error}\n")
    if log is not None or refuses:
        _watch(log, refuses)
