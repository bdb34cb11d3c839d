"""Processes that need not import torch and its compiler again: `python -m aotc.build.forkserver` imports them once, and
forks for each process that is asked for.

To the process this is `python -m MODULE`: a session, an environment, streams and caches of its own. CUDA cannot be used
in a fork of a process that has initialised it: so what is imported here asks NVML, not CUDA, whether there are GPUs.
Where CUDA is initialised all the same, each process imports everything itself.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any, NoReturn

from aotc.processes import child_command, child_environment, die_with_parent

WORKER = "aotc.build.worker"
SMOKE = "aotc.verify.smoke"

_PRELOADED = {
    WORKER: ("aotc.build.unit", "aotc.build.failure", "aotc.build.observe", "torch._inductor.compile_fx"),
    SMOKE: ("aotc.manifest.factory", "aotc.runtime.load", "aotc.verify.launch", "aotc.verify.region_cost"),
}
"""What a unit's processes import, imported once for all units. No compiler in what runs the result, as in a service."""

_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Where it is 1, `torch.cuda.is_available()` does not initialise CUDA (torch's docs, "CUDA environment variables")."""

_LENGTH = 8
"""Bytes before each request, which say how long it is."""


# -- the side of the build --------------------------------------------------------------------------------------------


class Forked:
    """A process in a session of its own that a fork server has started: its standard streams."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str], status: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._status = status
        self._lock = threading.Lock()
        self._code: int | None = None

    def wait(self) -> int:
        """Wait for its end; its exit status, or less than 0 for the signal that killed it."""
        with self._lock:
            if self._code is None:
                ended = self._status.readline()  # nothing, where the server has been killed, and it with it
                self._code = int(ended) if ended else -signal.SIGKILL
                self._status.close()
            return self._code


class ForkServer:
    """Starts `module`, as `python -m` would, in processes that have imported the modules `preload` already.

    It imports in the background from the moment on that it is made.
    """

    def __init__(self, module: str, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._module = module
        self._lock = threading.Lock()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                child_command(__name__, str(theirs.fileno()), module, *preload),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]) -> Forked:
        """A process with these arguments, in a session of its own. Raises OSError where the server has died."""
        request = json.dumps({"arguments": [*arguments], "environment": {**environment}}).encode()
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        ours_status, theirs_status = os.pipe()
        given = [theirs_in, theirs_out, errors.fileno(), theirs_status]
        stdin, stdout, status = os.fdopen(ours_in, "w"), os.fdopen(ours_out), os.fdopen(ours_status)
        with suppress(BrokenPipeError), self._lock:  # it has died: then nothing is read below
            socket.send_fds(self._connection, [len(request).to_bytes(_LENGTH, "big")], given)
            self._connection.sendall(request)
        for descriptor in (theirs_in, theirs_out, theirs_status):
            os.close(descriptor)
        if started := status.readline():
            return Forked(int(started), stdin, stdout, status)
        for stream in (stdin, stdout, status):
            stream.close()
        raise ChildProcessError(f"the process that starts {self._module} has died: {self._said()}")

    @property
    def has_died(self) -> bool:
        return self._server.poll() is not None

    def close(self) -> None:
        """End the server, and with it what it has started."""
        self._connection.close()
        self._server.kill()
        self._server.wait()
        self._errors.close()

    def _said(self) -> str:
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self._server.wait(10)
            self._errors.seek(0)
            return self._errors.read().decode(errors="replace")[-2000:].strip()
        return ""


class ForkServers:
    """What a unit's processes are forked from; each is made when it is needed first, or before, by `begin`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: dict[str, ForkServer] = {}
        self._closed = False

    def begin(self) -> None:
        """Let them import what the processes need, in the background."""
        for module in _PRELOADED:
            self.server(module, unit_environment())

    def server(self, module: str, environment: Mapping[str, str]) -> ForkServer:
        """The server of this module, made in this environment if none lives. Raises OSError once closed."""
        with self._lock:
            if self._closed:
                raise ChildProcessError("the build has ended")
            if module in self._servers and self._servers[module].has_died:  # the out-of-memory killer takes anything
                self._servers.pop(module).close()
            if module not in self._servers:
                self._servers[module] = ForkServer(module, _PRELOADED[module], environment)
            return self._servers[module]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for server in self._servers.values():
                server.close()
            self._servers.clear()


def unit_environment() -> dict[str, str]:
    """The environment of a unit's processes, with nothing that would make the code depend on this machine."""
    environment = child_environment()
    environment.pop("ATEN_CPU_CAPABILITY", None)
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # it names the build's folders
    return environment


# -- the server -------------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, connection: socket.socket, module: str) -> None:
        self._connection, self._module = connection, module
        self._statuses: dict[int, int] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> None:
        """Until the build closes the connection, or has died."""
        while True:
            connection = self._connection.fileno()
            ready, _, _ = select.select([connection, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                self._tell_who_ended()
            if connection in ready and not self._answer():
                break
        for pid in self._statuses:  # what they have started, too: compilers do not die with their parents
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _answer(self) -> bool:
        header, given, _, _ = socket.recv_fds(self._connection, _LENGTH, 4)
        if not header:
            return False
        length, request = int.from_bytes(header, "big"), bytearray()
        while len(request) < length:
            part = self._connection.recv(length - len(request))
            if not part:
                return False
            request += part
        *streams, status = given
        pid = os.fork()
        if pid == 0:
            self._become(given, json.loads(request))
        for descriptor in streams:
            os.close(descriptor)
        self._statuses[pid] = status
        _write(status, pid)
        return True

    def _become(self, given: Sequence[int], request: Mapping[str, Any]) -> NoReturn:
        code = 1
        try:
            die_with_parent()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            for standard in range(3):
                os.dup2(given[standard], standard)
            self._connection.close()
            for descriptor in (self._woken, self._wake, *self._statuses.values(), *given):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environment"])
            if _cuda_is_spoilt():
                command = child_command(self._module, *request["arguments"])
                os.execve(command[0], command, request["environment"])
            sys.argv[:] = [self._module, *request["arguments"]]
            runpy.run_module(self._module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def _tell_who_ended(self) -> None:
        while self._statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            descriptor = self._statuses.pop(pid)
            _write(descriptor, os.waitstatus_to_exitcode(status))
            os.close(descriptor)


def _cuda_is_spoilt() -> bool:
    """Whether this process was forked from one that had initialised CUDA: torch then refuses to, in this one."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _write(descriptor: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the build does not want to know
        os.write(descriptor, f"{number}\n".encode())


def main() -> int:
    # It ends when the build's end of the connection does, however the build dies.
    descriptor, module, *preload = sys.argv[1:]
    os.environ.setdefault(_ASK_NVML, "1")
    with socket.socket(fileno=int(descriptor)) as connection:
        for name in preload:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()  # so that forks go on sharing the memory of what is imported
        _Server(connection, module).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
