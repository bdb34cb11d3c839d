"""Python processes of our own: they import the same aotc, wherever it is installed or checked out.

One protocol for all of them. A child is given a job, a file of JSON that its first argument names, and sends messages,
each a line of JSON on its standard output. Whatever else it prints, a model's code included, goes to standard error,
which is a log. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, AnyStr, Self, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

# -- the parent -------------------------------------------------------------------------------------------------------


def child_environment() -> dict[str, str]:
    """This process's environment, with the folder of this aotc first on the child's path. A module is what it is there,
    also where its class or its factory calls `aotc.compile`."""
    environment = dict(os.environ)
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environment |= {"PYTHONUNBUFFERED": "1", "AOTC_COMPILE": "off"}
    return environment


def with_variables(environment: Mapping[str, str], variables: Mapping[str, str | None]) -> dict[str, str]:
    """The environment with these variables set; those that are None are unset."""
    changed = {**environment, **variables}
    return {name: value for name, value in changed.items() if value is not None}


def child_command(module: str, *arguments: str) -> list[str]:
    """The command line of `python -m module`, quiet about what torch says where NumPy is not installed.

    Without `-P` the working folder comes first on the child's path, and a folder `triton` in it before the package.
    """
    return [sys.executable, "-P", "-W", "ignore:Failed to initialize NumPy", "-m", module, *arguments]


class Child:
    """A child process, as a context: leaving the context kills the child if it still runs."""

    def __init__(
        self,
        module: str,
        job: msgspec.Struct,
        folder: Path,
        environment: Mapping[str, str],
        *,
        silent: bool = False,
        log: IO[bytes] | None = None,
    ) -> None:
        """Run `python -m module` with a job that is written to `folder`. `silent`: its messages are those of another
        child. Without `log`, its log is the caller's standard error. Raises OSError."""
        path = folder / "job.json"
        path.write_bytes(msgspec.json.encode(job))
        self._process = subprocess.Popen(
            child_command(module, str(path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if silent else subprocess.PIPE,
            stderr=log,
            env=environment,
        )

    def messages(self, kind: type[T]) -> Iterator[T]:
        """Its messages as they arrive, until it ends."""
        assert self._process.stdout is not None
        return (msgspec.json.decode(line, type=kind) for line in whole_lines(self._process.stdout))

    def ended(self) -> str:
        """Wait for its end. "" if all is well, else how it ended."""
        return how_ended(self._process.wait())

    def cpu_seconds(self) -> float:
        """What its main thread has used; 0 where it has ended, or the system has no /proc."""
        pid = self._process.pid
        try:
            fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, proc_pid_stat(5)

    def kill(self) -> None:
        """Kill it now, which also ends `messages`."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._process.__exit__(None, None, None)


def answer_of(module: str, job: msgspec.Struct, kind: type[T], folder: Path, environment: Mapping[str, str]) -> T:
    """Run a child that sends one message, and return that. Raises ChildProcessError where it ended without: how, and
    the last lines of its log."""
    path = folder / "log"
    with path.open("wb") as log, Child(module, job, folder, environment, log=log) as child:
        answers = [*child.messages(kind)]
        ended = child.ended()
    if ended or not answers:
        raise ChildProcessError("\n".join([ended or "ended without an answer", *last_lines(path)]))
    return answers[0]


CRASHES = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""The signals by which wrong code ends its process; others come from outside."""


def how_ended(status: int) -> str:
    """The end of a process in words, for its exit status; "" if all is well."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}" if status else ""


def last_lines(log: Path, count: int = 15) -> list[str]:
    return log.read_text(errors="replace").strip().splitlines()[-count:]


def whole_lines(stream: IO[AnyStr]) -> Iterator[AnyStr]:
    """The lines of a child as they arrive. An incomplete last line, of a child that was killed while writing, is
    dropped."""
    return (line for line in stream if line[-1:] in ("\n", b"\n"))


# -- the child --------------------------------------------------------------------------------------------------------


class Parent:
    """The process that started this one. From its creation on, this process ends with its parent, and standard output
    carries messages only."""

    def __init__(self) -> None:
        die_with_parent()
        self._stream = os.fdopen(os.dup(1), "wb")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def job(self, kind: type[T]) -> T:
        return msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=kind)

    def send(self, message: msgspec.Struct) -> None:
        """From any thread."""
        with self._lock:
            self._stream.write(msgspec.json.encode(message) + b"\n")
            self._stream.flush()


PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, linux/prctl.h."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to end this process when its parent ends, however it ends: a killed build leaves no orphan.

    With the parent's number it ends at once where that one has ended already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
