"""Processes that need not import torch and its compiler again: `python -m aotc.build.forkserver` imports them once, and
forks for each process that is asked for.

To the process this is `python -m MODULE`: a session, an environment, streams and caches of its own. What several
modules need is imported once for all of them, before the server of each goes on to import what it alone needs. CUDA
cannot be used in a fork of a process that has initialised it: so what is imported here asks NVML, not CUDA, whether
there are GPUs. Where CUDA is initialised all the same, each process imports everything itself.
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
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from typing import IO, Any, NoReturn, Protocol

from aotc.garbage import no_collection
from aotc.processes import child_command, child_environment, die_with_parent

WORKER = "aotc.build.worker"
SMOKE = "aotc.verify.smoke"

_COMMON = ("aotc.manifest.factory", "aotc.records", "aotc.snapshot")
_PRELOADED = {
    SMOKE: ("aotc.runtime.load", "aotc.verify.launch", "aotc.verify.region_cost"),
    WORKER: (
        *("aotc.build.unit", "aotc.build.failure", "aotc.build.observe", "torch._inductor.compile_fx"),
        *("sympy.physics.units", "torch.utils.cpp_extension"),  # Inductor imports them while it compiles
        "aotc.build.beforehand:make_patterns",
    ),
}
"""What a unit's processes import, and functions of modules that they call, once for all units. No compiler in what runs
the result, as in a service: so its server leaves before the compiler is imported."""

ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Where it is 1, `torch.cuda.is_available()` does not initialise CUDA (torch's docs, "CUDA environment variables")."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_LENGTH = 8
"""Bytes before each request, which say how long it is."""


# -- the side of the build --------------------------------------------------------------------------------------------


class Forked:
    """A process in a session of its own that a fork server has started, and what it writes to its standard output."""

    def __init__(self, pid: int, stdout: IO[str], status: IO[str]) -> None:
        self.pid, self.stdout = pid, stdout
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


class Source(Protocol):
    """A process that others are forked from; `spent` once it, or a server that it has become, was found dead."""

    spent: bool

    def said(self) -> str: ...

    def close(self) -> None: ...


class ForkServer:
    """Starts one module, as `python -m` would, in processes that have already what it needs."""

    def __init__(self, module: str, source: Source, connection: socket.socket) -> None:
        self._module, self._source, self._connection = module, source, connection
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]) -> Forked:
        """A process with these arguments, in a session of its own.

        Raises ChildProcessError where the server has died, and another OSError where the system has no room for one.
        """
        asked = {"module": self._module, "arguments": [*arguments], "environment": {**environment}}
        request = json.dumps(asked).encode()
        ours_out, theirs_out = os.pipe()
        ours_status, theirs_status = os.pipe()
        given = [theirs_out, errors.fileno(), theirs_status]
        stdout, status = os.fdopen(ours_out), os.fdopen(ours_status)
        with suppress(OSError), self._lock:  # it has died: then nothing is read below
            socket.send_fds(self._connection, [len(request).to_bytes(_LENGTH, "big")], given)
            self._connection.sendall(request)
        for descriptor in (theirs_out, theirs_status):
            os.close(descriptor)
        started = int(status.readline() or 0)
        if started > 0:
            return Forked(started, stdout, status)
        for stream in (stdout, status):
            stream.close()
        if started < 0:
            raise OSError(-started, os.strerror(-started))
        self._source.spent = True
        raise ChildProcessError(f"the process that starts {self._module} has died: {self._source.said()}")

    def close(self) -> None:
        self._connection.close()


class _Importer:
    """The process that imports, and becomes the servers of `modules`: what each of them imports beside `common`.

    It imports in the background from the moment on that it is made. It is `spent` once one of the servers has died.
    """

    def __init__(
        self, modules: Mapping[str, Sequence[str]], common: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.spent = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        pairs = {module: socket.socketpair() for module in modules}
        self.servers = {module: ForkServer(module, self, ours) for module, (ours, _) in pairs.items()}
        given = {module: theirs for module, (_, theirs) in pairs.items()}
        asked = [[module, given[module].fileno(), [*preload]] for module, preload in modules.items()]
        self.process = subprocess.Popen(
            child_command(__name__, json.dumps([[*common], asked])),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=environment,
            pass_fds=[theirs.fileno() for theirs in given.values()],
            start_new_session=True,
        )
        for theirs in given.values():
            theirs.close()

    def close(self) -> None:
        """End the servers, and with them what they have started."""
        for server in self.servers.values():
            server.close()
        self.process.kill()
        self.process.wait()
        self._errors.close()

    def said(self) -> str:
        """What they wrote before they died, whichever it was."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        return _last_words(self._errors)


class Holder:
    """A fork of this process, which keeps what it has, and becomes the servers for the units of `models`.

    Make it in the main thread, before CUDA is initialised, and before other threads do anything that a fork could find
    half done. Raises OSError where the system refuses the fork.
    """

    def __init__(self, models: Collection[str]) -> None:
        self.models, self.spent = frozenset(models), False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        pairs = {module: socket.socketpair() for module in _PRELOADED}
        self.servers = {module: ForkServer(module, self, ours) for module, (ours, _) in pairs.items()}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads, which know of forks
                parent, self._pid = os.getpid(), os.fork()
        except OSError:
            self._errors.close()
            for end in chain.from_iterable(pairs.values()):
                end.close()
            raise
        if self._pid == 0:
            self._hold(parent, pairs)
        for _, theirs in pairs.values():
            theirs.close()

    def _hold(self, parent: int, pairs: Mapping[str, tuple[socket.socket, socket.socket]]) -> NoReturn:
        try:
            die_with_parent(parent)
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for standard, stream in enumerate((nothing, self._errors.fileno(), self._errors.fileno())):
                os.dup2(stream, standard)
            for ours, _ in pairs.values():
                ours.close()
            environment = {ASK_NVML: "1", **unit_environment()}
            os.environ.clear()
            os.environ.update(environment)
            _serve([[module, theirs.detach(), _PRELOADED[module]] for module, (_, theirs) in pairs.items()])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def close(self) -> None:
        """End the servers, and with them what they have started."""
        if self._errors.closed:  # twice would be another process's number
            return
        for server in self.servers.values():
            server.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._errors.close()

    def said(self) -> str:
        """What they wrote before they died, whichever it was."""
        return _last_words(self._errors)


def _last_words(errors: IO[bytes]) -> str:
    with suppress(OSError, ValueError):  # the build has ended
        errors.seek(0)
        return errors.read().decode(errors="replace")[-2000:].strip()
    return ""


class ForkServers:
    """What a unit's processes are forked from: made when one of them is needed first, or before, by `begin`.

    Those of models that `holder` keeps are forked from that one, as long as it lives.
    """

    def __init__(self, modules: Mapping[str, Sequence[str]] = _PRELOADED, common: Sequence[str] = _COMMON) -> None:
        self._modules, self._common = modules, common
        self._lock = threading.Lock()
        self._importer: _Importer | None = None
        self._spent: list[_Importer] = []
        self._closed = False
        self.holder: Holder | None = None

    def begin(self, environment: Mapping[str, str] | None = None) -> None:
        """Import what the processes need, in the background. Raises OSError once closed."""
        with self._lock:
            if self._closed:
                raise ChildProcessError("the build has ended")
            if self._importer is not None and (self._importer.spent or self._importer.process.poll() is not None):
                self._spent.append(self._importer)  # what its other server has started may run on
                self._importer = None
            if self._importer is None:
                self._importer = _Importer(self._modules, self._common, environment or unit_environment())

    def server(self, module: str, environment: Mapping[str, str], model: str = "") -> ForkServer:
        """The server of this module for a unit of this model, made in this environment if there is none, or one was
        found dead.

        Raises OSError once closed.
        """
        if self.holder is not None and model in self.holder.models and not (self.holder.spent or self._closed):
            return self.holder.servers[module]
        self.begin(environment)
        assert self._importer is not None
        return self._importer.servers[module]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sources: list[Source | None] = [*self._spent, self._importer, self.holder]
            for source in filter(None, sources):
                source.close()


def unit_environment() -> dict[str, str]:
    """The environment of a unit's processes, with nothing that would make the code depend on this machine."""
    environment = child_environment()
    environment.pop("ATEN_CPU_CAPABILITY", None)
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # it names the build's folders
    return environment


# -- the server -------------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
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
        header, given, _, _ = socket.recv_fds(self._connection, _LENGTH, 3)
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
        except OSError as error:  # what runs already is not touched
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._become(server, given, json.loads(request))
        _write(status, pid)
        for descriptor in streams if pid > 0 else given:
            os.close(descriptor)
        if pid > 0:
            self._statuses[pid] = status
        return True

    def _become(self, server: int, given: Sequence[int], request: Mapping[str, Any]) -> NoReturn:
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
            os.environ.update(request["environment"])
            module, arguments = request["module"], request["arguments"]
            if _cuda_is_spoilt():
                command = child_command(module, *arguments)
                os.execve(command[0], command, request["environment"])
            sys.argv[:] = [module, *arguments]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
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
            if (descriptor := self._statuses.pop(pid, None)) is not None:  # else it is another module's server
                with suppress(ProcessLookupError, PermissionError):  # what it leaves behind holds its streams open
                    os.killpg(pid, signal.SIGKILL)
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
    common, asked = json.loads(sys.argv[1])
    os.environ.setdefault(ASK_NVML, "1")
    _prepare(common)
    _serve(asked)
    return 0


def _serve(asked: Sequence[Any]) -> None:
    """Become the servers of these modules: each of its connection, with what it alone imports."""
    _, descriptor, preload = _one_of(asked)
    _prepare(preload)
    # It ends when the build's end of the connection does, however the build dies.
    with socket.socket(fileno=descriptor) as connection:
        _Server(connection).serve()


def _one_of(asked: Sequence[Any]) -> Any:
    """The server that this process becomes: the last, and a fork of it each of the others."""
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
    """Import modules, and call functions of modules: `module:function`."""
    with no_collection(), _gpus_hidden() if _cuda_would_be_asked() else nullcontext():
        for name in wanted:
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        gc.collect()
        gc.freeze()  # so that forks go on sharing the memory of what is imported


def _cuda_would_be_asked() -> bool:
    """Whether NVML cannot be: then torch asks CUDA whether there are GPUs. Without a driver neither knows of any."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and torch.backends.cuda.is_built() and torch.cuda._device_count_nvml() < 0


@contextmanager
def _gpus_hidden() -> Iterator[None]:
    """Let torch know without asking that there are no GPUs: Inductor of torch 2.11 and 2.12 wants to know when it is
    imported. Each process looks for itself."""
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
