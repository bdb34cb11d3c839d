"""Progress of a push or fetch: a bar in a terminal, nothing elsewhere."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from aotc.errors import one_line

if TYPE_CHECKING:
    from aotc.store.remote.transfer import TransferEvent


class TransferProgress:
    """One bar over all blobs that are moved. `show` takes the events, from any thread."""

    def __init__(self, console: Console, title: str) -> None:
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(one_line(title), total=0)
        self._total = 0
        self._lock = threading.Lock()

    def show(self, event: TransferEvent) -> None:
        if event.what == "planned":
            with self._lock:
                self._total += event.size
                self._progress.update(self._task, total=self._total)
        else:
            self._progress.advance(self._task, event.size)

    def __enter__(self) -> Self:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)
