"""A measuring process, seen from its parent.

It answers requests, and starts without importing aotc: so it cannot be an `aotc.machine.processes.Child`.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from aotc.machine.processes import how_ended, last_lines
from aotc.tools.bench import measure_worker
from aotc.tools.bench.contender_caches import own_caches
from aotc.tools.bench.contender_messages import Answer, ContenderJob, ContenderRequest, Failed, Started
from aotc.tools.bench.contenders import CONTENDERS

A = TypeVar("A", bound=msgspec.Struct)

PERIOD = 15.0
"""Seconds between two lines of the log about one start."""


class ContenderFailed(Exception):
    """A contender raised an error, or its process ended; the text is for the report."""

    @property
    def first_line(self) -> str:
        return (str(self).splitlines() or ["it ended"])[0][:300]


class ContenderProcess:
    """A contender in a fresh process. It waits for requests until `close`, using no CPU meanwhile."""

    def __init__(
        self, job: ContenderJob, caches: Path, work: Path, waiting: Callable[[float], None] = lambda seconds: None
    ) -> None:
        """Start the contender and wait for its first output; every PERIOD seconds until then, `waiting` is told how
        long that has taken. Raises ContenderFailed."""
        self.name = job.contender
        self._log = work / "log.txt"
        work.mkdir(parents=True)
        job_file = work / "job.json"
        job_file.write_bytes(msgspec.json.encode(job))
        command = [sys.executable, "-P", "-W", "ignore", measure_worker.__file__, str(job_file)]
        environment = own_caches(caches)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, repr(time.time()), ",".join(CONTENDERS[job.contender].imports)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        try:
            self._wait(waiting)
            self.started = self._read(Started)
        except BaseException:
            self.kill()
            raise

    def ask(self, request: ContenderRequest, expected: type[A]) -> A:
        """Raises ContenderFailed."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderFailed(self._ending()) from None
        return self._read(expected)

    def _wait(self, waiting: Callable[[float], None]) -> None:
        """Until it has said something, or has ended."""
        assert self._process.stdout is not None
        began = time.monotonic()
        while not select.select([self._process.stdout], [], [], PERIOD)[0]:
            waiting(time.monotonic() - began)

    def _read(self, expected: type[A]) -> A:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ContenderFailed(self._ending())
        answer = msgspec.json.decode(line, type=Answer)
        if isinstance(answer, Failed):
            raise ContenderFailed(answer.message)
        assert isinstance(answer, expected)
        return answer

    def _ending(self) -> str:
        ended = how_ended(self._process.wait()) or "ended with status 0"
        return "\n".join([f"its process {ended}", *last_lines(self._log)])

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self.kill()

    def kill(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()
