"""The running processes of a build: each in a session of its own; all can be ended at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from aotc.compiler.workers.unit_servers import Forked, ForkServers
from aotc.machine.benchmarking import stoppable
from aotc.machine.processes import with_variables
from aotc.machine.resources import MemoryWatch
from aotc.store.files.disk import typed_errors


class Processes:
    """Starts processes, forked from `servers`. `variables` are set for each of them, or unset where they are None."""

    def __init__(self, variables: Mapping[str, str | None] | None = None, servers: ForkServers | None = None) -> None:
        self.memory = MemoryWatch()
        self._variables = dict(variables or {})
        self._servers = servers or ForkServers()
        self._own_servers = servers is None
        self._lock = threading.Lock()
        self._running: set[Forked] = set()
        self._ended = False

    @contextmanager
    def start(
        self,
        module: str,
        argument: str,
        environment: Mapping[str, str],
        log: Path,
        model: str = "",
        *,
        absent_gpu: bool = False,
    ) -> Iterator[Forked]:
        """A process for a unit of `model`, in a session of its own, all of which is killed at the end of the context.
        With `absent_gpu`, libraries stand in for CUDA's in it.

        Raises OSError, StoreError where the log cannot be written; with `absent_gpu` BuildError.
        """
        environment = with_variables(environment, self._variables)
        self.raise_if_ended()
        try:
            with typed_errors("write", log):
                errors = log.open("ab")
            with errors:
                process = self._started(module, argument, environment, errors, model, absent_gpu)
        except OSError:
            self.raise_if_ended()  # which ends the servers
            raise
        with self._lock:
            self._running.add(process)
            if self._ended:
                _end_family(process)
        try:
            with self.memory.watching(process.pid), stoppable(process.pid):
                yield process
        finally:
            _end(process)
            with self._lock:
                self._running.discard(process)

    def _started(
        self,
        module: str,
        argument: str,
        environment: Mapping[str, str],
        errors: IO[bytes],
        model: str,
        absent_gpu: bool,
    ) -> Forked:
        def start() -> Forked:
            if absent_gpu:
                server = self._servers.server_for_absent_gpus(environment)
                variables = {**environment, **self._servers.variables_for_absent_gpus()}
                return server.start([argument], variables, errors)
            return self._servers.server(module, environment, model).start([argument], environment, errors)

        try:
            return start()
        except ChildProcessError:  # the out-of-memory killer may have killed the server: start another
            return start()

    def raise_if_ended(self) -> None:
        """Raises KeyboardInterrupt once the build is being ended."""
        if self._ended:
            raise KeyboardInterrupt

    def close(self) -> None:
        """Close the fork servers, unless they were given. No process is running."""
        if self._own_servers:
            self._servers.close()

    def end_all(self) -> None:
        """End every process and refuse new ones."""
        with self._lock:
            self._ended = True
            for process in self._running:
                _end_family(process)
        self._servers.close()


def _end(process: Forked) -> None:
    _end_family(process)
    process.wait()
    process.stdout.close()


def _end_family(process: Forked) -> None:
    """Kill the process and its descendants: compilers, and Inductor's own workers."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
