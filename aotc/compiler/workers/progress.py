"""What is told of a unit while it is compiled: what it is doing now, and what it has done, how long and where."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from aotc.records import Record
from aotc.store import StageCost

STAGE = "stage"
INDUCTOR = "inductor"


class Doing(Record, frozen=True, tag="doing"):
    """A stage that has begun, or with `detail` what is done within it."""

    stage: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.stage}: {self.detail}" if self.detail else self.stage


class Span(Record, frozen=True, tag="span"):
    """Something that has ended: `began` in seconds since the epoch, by the clock of `host`.

    `kind` is `stage`; `lowering`, `autotuning`, `compiling` or `linking` within one; or `inductor` for a phase of
    Inductor's own. `memory` is the most bytes that the unit's processes had of their own at once.
    """

    name: str
    kind: str
    began: float
    seconds: float
    host: str = ""
    process: int = 0
    thread: int = 0
    memory: int = 0


Progress = Doing | Span
OnProgress = Callable[[Progress], None]


def span_here(name: str, kind: str, began: float, ended: float, memory: int = 0) -> Span:
    """A span of this thread of this process."""
    thread = threading.get_native_id()
    return Span(name, kind, began, max(0.0, ended - began), socket.gethostname(), os.getpid(), thread, memory)


class StageCosts:
    """Adds up the spans of one unit, which began at `began` (seconds since the epoch)."""

    def __init__(self, began: float) -> None:
        self.began = began
        self._parts: dict[str, float] = {}
        self.stages: dict[str, StageCost] = {}

    def add(self, progress: Progress) -> None:
        if isinstance(progress, Doing) or progress.kind == INDUCTOR:
            return
        if progress.kind != STAGE:
            self._parts[progress.kind] = self._parts.get(progress.kind, 0.0) + progress.seconds
            return
        parts = {kind: round(seconds, 3) for kind, seconds in sorted(self._parts.items())}
        self._parts.clear()
        began = round(max(0.0, progress.began - self.began), 3)
        self.stages[progress.name] = StageCost(began, round(progress.seconds, 3), progress.memory, parts)
