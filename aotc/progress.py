"""Showing a build to whoever watches: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from aotc.build.build import Event
from aotc.build.plan import PlannedUnit


class _Progress:
    """What both kinds know: which units run, since when and at what stage, and how many are left."""

    def __init__(self, console: Console, planned: Sequence[PlannedUnit]) -> None:
        self.console = console
        self.total = len(planned)
        self.finished = 0
        self.running: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def show(self, event: Event) -> None:
        name = event.unit.name
        with self._lock:
            if event.outcome is None:
                began = self.running.get(name, (time.monotonic(), ""))[0]
                self.running[name] = (began, event.stage)
            else:
                self.running.pop(name, None)
                self.finished += 1
            self.changed(event)

    def changed(self, event: Event) -> None:
        """Show what changed; called under the lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def ended(self, event: Event) -> str:
        assert event.outcome is not None
        return (
            f"[{self.finished}/{self.total}] {event.unit.name}: {event.outcome.status} in {event.outcome.seconds:.1f} s"
        )


class LineProgress(_Progress):
    """One line for each stage and each end."""

    def changed(self, event: Event) -> None:
        text = f"{event.unit.name}: {event.stage}" if event.outcome is None else self.ended(event)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveProgress(_Progress):
    """A line for each running unit that is rewritten in place; ended units scroll away above."""

    def __init__(self, console: Console, planned: Sequence[PlannedUnit]) -> None:
        super().__init__(console, planned)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def _render(self) -> Group:
        now = time.monotonic()
        lines = [
            Spinner("dots", Text(f"{name}: {stage} ({now - began:.0f} s)"))
            for name, (began, stage) in list(self.running.items())
        ]
        return Group(*lines, Text(f"{self.total - self.finished} of {self.total} units left"))

    def changed(self, event: Event) -> None:
        if event.outcome is not None:
            self.console.print(self.ended(event), markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
