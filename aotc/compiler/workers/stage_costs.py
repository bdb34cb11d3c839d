"""The costs of each stage of a unit, from its progress reports."""

from __future__ import annotations

from collections.abc import Callable

from aotc.compiler.workers.messages import INDUCTOR, STAGE, Doing, Progress
from aotc.store.layout.units import StageCost

OnProgress = Callable[[Progress], None]


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
