"""The fork server: imports torch and its compiler once, and forks a process for each request of
`aotc.compiler.workers.unit_servers`. `python -m aotc.compiler.workers.fork_server`.

CUDA cannot be used in a fork of a process that has initialised it, so imports here ask NVML, not CUDA, whether there
are GPUs. If CUDA is initialised all the same, each forked process starts a fresh interpreter.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NoReturn

import msgspec

from aotc.compiler.cross_compile import stand_in
from aotc.compiler.messages import ForkRequest
from aotc.garbage import no_collection
from aotc.machine.processes import child_command, die_with_parent

ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With 1, `torch.cuda.is_available()` does not initialise CUDA (torch's docs, "CUDA environment variables")."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"

LENGTH = 8
"""Bytes of the length that precedes each request."""


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._statuses: dict[int, int] = {}
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake)

    def serve(self) -> None:
        """Answer requests until the build closes the connection or dies."""
        while True:
            connection = self._connection.fileno()
            ready, _, _ = select.select([connection, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 1 << 10)
                self._tell_who_ended()
            if connection in ready and not self._answer():
                break
        for pid in self._statuses:  # the whole process group: compilers do not die with their parents
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _answer(self) -> bool:
        header, given, _, _ = socket.recv_fds(self._connection, LENGTH, 3)
        if not header:
            return False
        length, request = int.from_bytes(header, "big"), bytearray()
        while len(request) < length:
            part = self._connection.recv(length - len(request))
            if not part:
                return False
            request += part
        *streams, status = given
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # running processes are not affected
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._become(server, given, msgspec.json.decode(request, type=ForkRequest))
        _write(status, pid)
        for descriptor in streams if pid > 0 else given:
            os.close(descriptor)
        if pid > 0:
            self._statuses[pid] = status
        return True

    def _become(self, server: int, given: Sequence[int], request: ForkRequest) -> NoReturn:
        code = 1
        try:
            die_with_parent(server)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            nothing = os.open(os.devnull, os.O_RDONLY)
            for standard, stream in enumerate((nothing, *given[:2])):
                os.dup2(stream, standard)
            self._connection.close()
            for descriptor in (self._woken, self._wake, *self._statuses.values(), nothing, *given):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request.environment)
            if _cuda_is_spoilt():
                command = child_command(request.module, *request.arguments)
                os.execve(command[0], command, request.environment)
            sys.argv[:] = [request.module, *request.arguments]
            runpy.run_module(request.module, run_name="__main__", alter_sys=True)
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
            if (descriptor := self._statuses.pop(pid, None)) is not None:  # else `pid` is another module's server
                with suppress(ProcessLookupError, PermissionError):  # its children hold its streams open
                    os.killpg(pid, signal.SIGKILL)
                _write(descriptor, os.waitstatus_to_exitcode(status))
                os.close(descriptor)


def _cuda_is_spoilt() -> bool:
    """Whether this process was forked from one that had initialised CUDA: torch then refuses to initialise it here."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _write(descriptor: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the build has closed its end
        os.write(descriptor, f"{number}\n".encode())


def main() -> int:
    common, asked, stand_ins = json.loads(sys.argv[1])
    os.environ.setdefault(ASK_NVML, "1")
    if stand_ins:
        os.environ[ASK_NVML] = "1"  # a process that asks CUDA for GPUs is one whose forks torch refuses to use
        stand_in.load(stand_ins)
    _prepare(common)
    serve(asked)
    return 0


def serve(asked: Sequence[Any]) -> None:
    """Become the servers of these modules, one process each: import the module's own needs, serve its connection."""
    _, descriptor, preload = _one_of(asked)
    _prepare(preload)
    # The server ends when the build's end of the connection is closed, however the build dies.
    with socket.socket(fileno=descriptor) as connection:
        _Server(connection).serve()


def _one_of(asked: Sequence[Any]) -> Any:
    """Fork a process for each server but the last. Returns the server that the current process becomes."""
    *others, mine = asked
    importer = os.getpid()
    for other in others:
        if os.fork() == 0:
            die_with_parent(importer)
            mine = other
            break
    for server in asked:
        if server is not mine:
            os.close(server[1])
    return mine


def _prepare(wanted: Sequence[str]) -> None:
    """Import modules, and call functions given as `module:function`."""
    with no_collection(), _gpus_hidden() if _cuda_would_be_asked() else nullcontext():
        for name in wanted:
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        gc.collect()
        gc.freeze()  # so that forks keep sharing the memory of imported modules


def _cuda_would_be_asked() -> bool:
    """Whether torch would query CUDA for GPUs, because NVML is not available. Without a driver there are none."""
    torch: Any = sys.modules.get("torch")
    if stand_in.is_loaded():
        return True
    return torch is not None and torch.backends.cuda.is_built() and torch.cuda._device_count_nvml() < 0


@contextmanager
def _gpus_hidden() -> Iterator[None]:
    """While active, torch sees no GPUs and does not query the driver, as importing Inductor of torch 2.11 and 2.12
    would. Each forked process queries it itself."""
    visible = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    try:
        yield
    finally:
        del os.environ[_VISIBLE]
        if visible is not None:
            os.environ[_VISIBLE] = visible


if __name__ == "__main__":
    sys.exit(main())
