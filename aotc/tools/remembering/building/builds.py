"""When code is built, and the processes that build it: each outlives this one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from aotc.amounts import counted
from aotc.errors import AotcError
from aotc.machine.locks import close_lock, lock, open_lock
from aotc.machine.processes import child_command, child_environment
from aotc.machine.resources import cores_here
from aotc.tools.remembering.building.while_waiting import (
    cost_in_words,
    progress_file,
    progress_shown,
    raise_priority,
    read_progress,
    usual_cost,
)
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.memory.memory import Memory, Place

_log = logging.getLogger("aotc")

QUIET, LONGEST = 3.0, 30.0
"""Seconds without a new form until a build in the background begins, and the longest wait after the first new one."""

LOOKS_EVERY = 0.2


class Building(Protocol):
    """A build that goes on: the process that this one started, or another one's."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...


class BuiltElsewhere:
    """The build of the same module that another process has started: another rank, say."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def poll(self) -> int | None:
        return None if self._place.is_being_built() else 0

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired, as of a process."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if ends is not None and time.monotonic() >= ends:
                raise subprocess.TimeoutExpired(self._place.name, timeout or 0.0)
            time.sleep(LOOKS_EVERY)
        return status


class Builds:
    """The builds for one module. `note` is told why there is none, and `ended` of each that ended, with its status;
    `before` is called before one begins, and writes what is remembered."""

    def __init__(
        self,
        options: Options,
        note: Callable[[str], None],
        ended: Callable[[Place, int], None],
        before: Callable[[], None],
    ) -> None:
        self.options, self._note, self._ended, self._before = options, note, ended, before
        self.place: Place | None = None
        """Of the module as it is now; None where nothing is built."""
        self.made: Memory | None = None
        """How a build makes the module, which this program alone says; it has no kinds. None before that is needed."""
        self.others: dict[str, tuple[Place, Memory]] = {}
        """Both of the module as it was before, by its name then."""
        self.uses_gpu = False
        self.repairs = False
        """Whether the next build first removes what is damaged in the store, so that it is made again."""
        self.own: set[str] = set()
        """The names that this process has begun to build."""
        self._waits_since = self._last_form = 0.0
        self.renew()

    def renew(self) -> None:
        """A forked child has none of the threads that wait; what it sees anew, it builds itself."""
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._process: Building | None = None

    def soon(self) -> None:
        """Build when no new form has come for a while; or at the exit, or before."""
        if self.options.build != "background":
            return
        if self.uses_gpu and not self.options.gpu:
            _log.info(
                "aotc.compile: code for new forms is built at the program's end, on the GPU; gpu=True allows it before"
            )
            return
        with self._lock:
            self._last_form = time.monotonic()
            if self._timer is None or not self._timer.is_alive():
                self._waits_since = self._last_form
                self._start_timer(QUIET)

    def _start_timer(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._start_when_quiet)
        self._timer.daemon = True
        self._timer.start()

    def _start_when_quiet(self) -> None:
        """Start a build, unless new forms have come since the timer was started."""
        with self._lock:
            left = min(self._last_form + QUIET, self._waits_since + LONGEST) - time.monotonic()
            self._timer = None
            if left > 0:
                self._start_timer(left)
                return
        self.start()

    def is_due(self, place: Place, memory: Memory | None) -> bool:
        """Whether something has no code yet that may get it; or the store at a URL lacks it."""
        return memory is not None and bool(place.unbuilt(memory) or (self.options.url and memory.unpushed()))

    def limit_reached(self, builds: int) -> str:
        """That there may be no further build after so many, in words; "" where there may."""
        return self._limit() if builds >= self.options.builds else ""

    def _limit(self) -> str:
        return f"the limit of {counted(self.options.builds, 'build')} is reached: raise builds=, or retry=True"

    def start(self, *, urgent: bool = False) -> Building | None:
        """Start a process that builds what has no code yet, unless another one does: `urgent`, at this process's
        priority. None where there is nothing to build, or it may not be."""
        self._before()
        with self._lock:
            try:
                return self._started(urgent)
            except (AotcError, OSError) as error:
                self._note(f"no build can be started: {error}")
                return None

    def _started(self, urgent: bool) -> Building | None:
        if self._process is not None and self._process.poll() is None:
            return self._process
        now = [(self.place, self.made)] if self.place is not None and self.made is not None else []
        for place, made in [*now, *self.others.values()] if self.options.build != "never" else ():
            memory = place.read()
            if memory is None or not self.is_due(place, memory):
                continue
            if memory.builds < self.options.builds:
                return self._started_for(place, made, urgent)
            self._note(self._limit())
        return None

    def _started_for(self, place: Place, made: Memory, urgent: bool) -> Building:
        self.own.add(place.name)
        descriptor = open_lock(place.lock)
        try:
            if lock(descriptor, wait=False):
                self._process = started = self._start_process(place, made, descriptor, urgent)
                told = "aotc.compile: %s is built by process %d: %s; its log, with its stages: %s"
                _log.info(told, place.name, started.pid, self._cost(place, made), place.log)
            else:
                self._process = BuiltElsewhere(place)
                _log.info("aotc.compile: %s is built by another process; its log: %s", place.name, place.log)
        finally:
            close_lock(descriptor)  # still locked by the process that builds, whose descriptor it is, too
        threading.Thread(target=self._await, args=(self._process, place), daemon=True).start()
        return self._process

    def _start_process(self, place: Place, made: Memory, descriptor: int, urgent: bool) -> subprocess.Popen[bytes]:
        """The process that builds; it holds the lock from now until its end, however that comes."""
        from aotc.tools.remembering.building.build_process import NICENESS, BuildJob

        given = self.options
        job = BuildJob(
            str(place.folder),
            place.name,
            str(place.store),
            made=made,
            seconds=given.seconds,
            cores=given.cores,
            lock=descriptor,
            url=given.url,
            niceness=0 if urgent else NICENESS,
            repairs=self.repairs,
        )
        with tempfile.NamedTemporaryFile(prefix="aotc-build-", suffix=".job", delete=False) as file:
            file.write(msgspec.json.encode(job))
        paths = [path or str(Path.cwd()) for path in sys.path]
        environment = child_environment()
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*paths, environment["PYTHONPATH"]]))
        self.repairs = False
        progress_file(place).unlink(missing_ok=True)  # that of an earlier build names another process
        with place.log.open("wb") as log:
            return subprocess.Popen(
                child_command("aotc.tools.remembering.building.build_process", file.name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
                pass_fds=(descriptor,),
            )

    def _await(self, process: Building, place: Place) -> None:
        self._ended(place, process.wait())

    def wait(self, timeout: float | None) -> bool:
        """Build until nothing is left that can be, unless a build ends without a result. False after the timeout."""
        ends = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
        while (process := self.start(urgent=True)) is not None:
            if (status := self._watched(process, ends)) is None:
                return False
            if status:
                break
        return True

    def _watched(self, process: Building, ends: float | None) -> int | None:
        """The status of a build that has ended, shown while it goes on; None where it goes on after `ends`."""
        is_slow = True
        with progress_shown(self.place, self.cost()) as show:
            while True:
                if is_slow and self.place is not None and (found := read_progress(self.place)) is not None:
                    is_slow = False
                    if not raise_priority(found.process):
                        _log.info("aotc.compile: a build goes on at its low priority: no process may raise it here")
                left = LOOKS_EVERY if ends is None else min(LOOKS_EVERY, max(0.0, ends - time.monotonic()))
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(left)
                if ends is not None and time.monotonic() >= ends:
                    return None
                show()

    def cost(self) -> str:
        """What the build of what has no code yet costs, in words, from what such builds took in this store."""
        return self._cost(self.place, self.made) if self.place is not None and self.made is not None else ""

    def _cost(self, place: Place, made: Memory) -> str:
        if (memory := place.read()) is None:
            return ""
        usual = usual_cost(place.store, place.name, made.facts["target"])
        return cost_in_words(usual, len(place.unbuilt(memory)), self.options.cores or cores_here())
