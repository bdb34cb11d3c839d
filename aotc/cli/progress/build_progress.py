"""Progress of a build: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from aotc.amounts import counted
from aotc.cli.output import duration
from aotc.errors import one_line

if TYPE_CHECKING:
    from aotc.compiler.build_report import Event
    from aotc.compiler.planning.cache_lookup import PlannedUnit
    from aotc.compiler.planning.estimate import Estimate


class _Progress:
    """State of both displays: running units with their start and stage, and how many units are left for how long."""

    def __init__(
        self, console: Console, planned: Sequence[PlannedUnit], slots: int = 1, estimate: Estimate | None = None
    ) -> None:
        self.console = console
        self.slots = slots
        self.expected = estimate.seconds if estimate else {}
        self.total = len(planned)
        self.finished = 0
        self.running: dict[str, tuple[float, str]] = {}
        self._waiting = {plan.unit.name: None for plan in planned if plan.cached is None}
        self._took: list[float] = []
        self._lock = threading.Lock()

    def show(self, event: Event) -> None:
        name = event.unit.name
        with self._lock:
            if event.doing is not None:
                began = self.running.get(name, (time.monotonic(), ""))[0]
                self.running[name] = (began, str(event.doing))
                self._waiting.pop(name, None)
            elif event.outcome is not None:
                self.running.pop(name, None)
                self._waiting.pop(name, None)
                self.finished += 1
                if event.outcome.status == "built":
                    self._took.append(event.outcome.seconds)
            self.changed(event)

    def left(self) -> str:
        """`3 of 8 units left, about 2 min`; the time only where it can be guessed: not when it has been outlasted."""
        from aotc.compiler.planning.estimate import remaining

        now = time.monotonic()
        running = {name: now - began for name, (began, _) in self.running.copy().items()}
        seconds = round(remaining(self.expected, list(self._waiting), running, list(self._took), self.slots) or 0)
        about = f", about {duration(seconds)}" if seconds else ""
        return f"{self.total - self.finished} of {counted(self.total, 'unit')} left{about}"

    def changed(self, event: Event) -> None:
        """Show what changed; called under the lock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def ended(self, event: Event) -> str:
        outcome = event.outcome
        assert outcome is not None
        shared = f", {outcome.shared} from other units" if str(outcome.shared) else ""
        done = f"[{self.finished}/{self.total}] {event.unit.name}: {outcome.status} in {outcome.seconds:.1f} s"
        return one_line(f"{done}{shared}")


class LineProgress(_Progress):
    """One line for each stage and each end, and how long the rest will take when that is known."""

    def changed(self, event: Event) -> None:
        if event.doing is not None and not event.doing.detail:
            self._print(f"{event.unit.name}: {event.doing}")
        elif event.outcome is not None:
            self._print(self.ended(event))
            if event.outcome.status == "built" and self.finished < self.total:
                self._print(self.left())

    def _print(self, text: str) -> None:
        self.console.print(one_line(text), markup=False, highlight=False, emoji=False, soft_wrap=True)


class LiveProgress(_Progress):
    """A line for each running unit that is rewritten in place; ended units scroll away above."""

    def __init__(
        self, console: Console, planned: Sequence[PlannedUnit], slots: int = 1, estimate: Estimate | None = None
    ) -> None:
        super().__init__(console, planned, slots, estimate)
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4, transient=True)

    def _render(self) -> Group:
        now = time.monotonic()  # without our lock: rich holds its own here, and `changed` takes it under ours
        lines = [
            Spinner("dots", Text(one_line(f"{name}: {doing} ({now - began:.0f} s)")))
            for name, (began, doing) in self.running.copy().items()
        ]
        return Group(*lines, Text(self.left()))

    def changed(self, event: Event) -> None:
        if event.outcome is not None:
            self.console.print(self.ended(event), markup=False, highlight=False, emoji=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)
