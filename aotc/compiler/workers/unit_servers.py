"""Start processes by forking a process that has already imported torch and its compiler (`fork_server`).

A forked process runs as `python -m MODULE` would: with its own session, environment, streams and caches. Imports that
several modules need are done once, before the server of each module imports the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn

import msgspec

from aotc.compiler.messages import ForkRequest
from aotc.compiler.workers import fork_server
from aotc.machine.processes import child_command, child_environment, die_with_parent

WORKER = "aotc.compiler.workers.compile_worker"
SMOKE = "aotc.compiler.smoke.smoke_run"

_COMMON = (
    "aotc.models.factory",
    "aotc.records",
    "aotc.reads.attributes",
    "aotc.reads.modes",
    "aotc.reads.sources",
)
_PRELOADED = {
    SMOKE: ("aotc.runtime.load", "aotc.compiler.smoke.launch_choice", "aotc.compiler.smoke.region_cost"),
    WORKER: (
        *("aotc.compiler.unit", "aotc.compiler.explain_failure", "aotc.compiler.workers.inductor_progress"),
        "torch._inductor.compile_fx",
        *("sympy.physics.units", "torch.utils.cpp_extension"),  # Inductor imports them while it compiles
        "aotc.compiler.toolchain.pattern_warmup:make_patterns",
    ),
}
"""Modules that the servers import for all units, and functions that they call. The smoke run imports no compiler, as a
service does not: its server is forked before the compiler is imported."""


class Forked:
    """A process started by a fork server, in a session of its own, and its standard output."""

    def __init__(self, pid: int, stdout: IO[str], status: IO[str]) -> None:
        self.pid, self.stdout = pid, stdout
        self._status = status
        self._lock = threading.Lock()
        self._code: int | None = None

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit status; less than 0: the signal that killed it."""
        with self._lock:
            if self._code is None:
                ended = self._status.readline()  # empty if the server was killed, and this process with it
                self._code = int(ended) if ended else -signal.SIGKILL
                self._status.close()
            return self._code


class ForkServer:
    """Starts one module, as `python -m` would, in forks of a process that has imported its needs."""

    def __init__(self, module: str, source: ForkSource, connection: socket.socket) -> None:
        self._module, self._source, self._connection = module, source, connection
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], errors: IO[bytes]) -> Forked:
        """Start a process with these arguments, in a session of its own.

        Raises ChildProcessError where the server has died, and another OSError where the system refuses the fork.
        """
        request = msgspec.json.encode(ForkRequest(self._module, tuple(arguments), dict(environment)))
        ours_out, theirs_out = os.pipe()
        ours_status, theirs_status = os.pipe()
        given = [theirs_out, errors.fileno(), theirs_status]
        stdout, status = os.fdopen(ours_out, encoding="utf-8", errors="replace"), os.fdopen(ours_status)
        with suppress(OSError), self._lock:  # it has died: then nothing is read below
            socket.send_fds(self._connection, [len(request).to_bytes(fork_server.LENGTH, "big")], given)
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


class ForkSource(ABC):
    """A process that becomes a server for each of `modules`; `spent` once one of them was found dead."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.spent = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        pairs = {module: socket.socketpair() for module in modules}
        self.servers = {module: ForkServer(module, self, ours) for module, (ours, _) in pairs.items()}
        self._theirs = {module: theirs for module, (_, theirs) in pairs.items()}

    def _close_theirs(self) -> None:
        for theirs in self._theirs.values():
            theirs.close()

    def _close_ours(self) -> None:
        for server in self.servers.values():
            server.close()

    def close(self) -> None:
        """End the servers, and the processes that they have started."""
        if self._errors.closed:  # the pid may belong to another process by now
            return
        self._close_ours()
        self._kill()
        self._errors.close()

    @abstractmethod
    def _kill(self) -> None:
        """End the process that starts the others."""

    def said(self) -> str:
        """The output of the processes before one of them died."""
        with suppress(OSError, ValueError):  # the build has ended
            self._errors.seek(0)
            return self._errors.read().decode(errors="replace")[-2000:].strip()
        return ""


class _Importer(ForkSource):
    """Imports `common`, and what `modules` lists for each. It does so in the background, from its creation on, with the
    libraries `stand_ins` in the place of CUDA's."""

    def __init__(
        self,
        modules: Mapping[str, Sequence[str]],
        common: Sequence[str],
        environment: Mapping[str, str],
        stand_ins: Sequence[str] = (),
    ) -> None:
        super().__init__(modules)
        asked = [[module, self._theirs[module].fileno(), [*preload]] for module, preload in modules.items()]
        self.process = subprocess.Popen(
            child_command(fork_server.__name__, json.dumps([[*common], asked, [*stand_ins]])),
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
            env=environment,
            pass_fds=[theirs.fileno() for theirs in self._theirs.values()],
            start_new_session=True,
        )
        self._close_theirs()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def said(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        return super().said()


STACK = 64 << 20
"""Bytes for the first thread of a fork, which compiles: no less than a main thread has, whatever the limit is."""


class Holder(ForkSource):
    """A fork of this process that keeps its objects, and becomes the servers for the units of `models`.

    A new thread forks: a fork of a thread that has OpenMP threads would wait for them for ever. Create the holder
    before CUDA is initialised, and while no other thread is in the middle of a change. Raises OSError where the system
    refuses the fork.
    """

    def __init__(self, models: Collection[str]) -> None:
        super().__init__(_PRELOADED)
        self.models = frozenset(models)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._pid = 0
        self._closed, forked, refused = threading.Event(), threading.Event(), list[OSError]()

        def fork() -> None:
            """Fork, then wait until the holder is closed: the fork dies when this thread, its parent, ends."""
            parent = os.getpid()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # about a fork while threads run
                    self._pid = os.fork()
            except OSError as error:
                refused.append(error)
            else:
                if self._pid == 0:
                    self._hold(parent)
            forked.set()
            self._closed.wait()

        usual = threading.stack_size(STACK)
        self._thread = threading.Thread(target=fork, name="holder", daemon=True)
        self._thread.start()
        threading.stack_size(usual)
        forked.wait()
        self._close_theirs()
        for error in refused:
            self._closed.set()
            self._errors.close()
            self._close_ours()
            raise error

    def _hold(self, parent: int) -> NoReturn:
        try:
            die_with_parent(parent)
            os.setsid()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for standard, stream in enumerate((nothing, self._errors.fileno(), self._errors.fileno())):
                os.dup2(stream, standard)
            self._close_ours()
            environment = {fork_server.ASK_NVML: "1", **unit_environment()}
            os.environ.clear()
            os.environ.update(environment)
            fork_server.serve([[module, end.detach(), _PRELOADED[module]] for module, end in self._theirs.items()])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._closed.set()
        self._thread.join()


class ForkServers:
    """The fork servers of a build, started at the first need, or earlier by `begin`.

    Processes for models of `holder` are forked from the holder, as long as it lives.
    """

    def __init__(self, modules: Mapping[str, Sequence[str]] = _PRELOADED, common: Sequence[str] = _COMMON) -> None:
        self._modules, self._common = modules, common
        self._lock = threading.Lock()
        self._importers: dict[str, _Importer] = {}
        self._spent: list[_Importer] = []
        self._closed = False
        self._stand_ins: Path | None = None
        self.holder: Holder | None = None

    def begin(self, environment: Mapping[str, str] | None = None) -> _Importer:
        """Start importing in the background. Raises OSError once closed."""
        return self._alive("here", lambda: _Importer(self._modules, self._common, environment or unit_environment()))

    def _alive(self, kind: str, started: Callable[[], _Importer]) -> _Importer:
        with self._lock:
            if self._closed:
                raise ChildProcessError("the build has ended")
            known = self._importers.get(kind)
            if known is not None and (known.spent or known.process.poll() is not None):
                self._spent.append(self._importers.pop(kind))  # processes of its other server may still run
            if kind not in self._importers:
                self._importers[kind] = started()
            return self._importers[kind]

    def server(self, module: str, environment: Mapping[str, str], model: str = "") -> ForkServer:
        """The server of this module for a unit of this model; started in this environment if there is none, or if one
        was found dead.

        Raises OSError once closed.
        """
        if self.holder is not None and model in self.holder.models and not (self.holder.spent or self._closed):
            return self.holder.servers[module]
        return self.begin(environment).servers[module]

    def server_for_absent_gpus(self, environment: Mapping[str, str]) -> ForkServer:
        """The server of workers for units whose GPU this machine lacks, in which libraries stand in for CUDA's.

        Raises OSError once closed, BuildError where these libraries cannot be compiled.
        """
        from aotc.compiler.cross_compile.libraries import build_variables, compiled_stand_ins

        def started() -> _Importer:
            if self._stand_ins is None:
                self._stand_ins = Path(tempfile.mkdtemp(prefix="aotc-absent-gpu-"))
                self._libraries = compiled_stand_ins(self._stand_ins)
            variables = {**environment, **build_variables(self._stand_ins)}
            return _Importer({WORKER: _PRELOADED[WORKER]}, self._common, variables, self._libraries)

        return self._alive("absent GPUs", started).servers[WORKER]

    def variables_for_absent_gpus(self) -> dict[str, str]:
        """What such a unit's environment needs besides, once its server runs."""
        from aotc.compiler.cross_compile.libraries import build_variables

        assert self._stand_ins is not None
        return build_variables(self._stand_ins)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for source in filter(None, (*self._spent, *self._importers.values(), self.holder)):
                source.close()
            if self._stand_ins is not None:
                shutil.rmtree(self._stand_ins, ignore_errors=True)


def unit_environment() -> dict[str, str]:
    """The environment variables of a unit's processes, without those that make the code depend on this machine."""
    environment = child_environment()
    environment.pop("ATEN_CPU_CAPABILITY", None)
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # line info contains the build's folders
    return environment
