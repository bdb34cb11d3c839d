"""How far a build is: the process that builds writes it to a file, and a program that waits shows it.

`NAME.progress` is a `BuildProgress` as JSON. Nothing depends on it.
"""

from __future__ import annotations

import html
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, TextIO

import msgspec

from aotc.amounts import counted, size_text
from aotc.errors import AotcError, one_line
from aotc.store.layout.store import Store
from aotc.store.layout.units import unit_costs
from aotc.tools.remembering.memory.memory import Place

WIDTH = 30
"""Characters of the bar in a terminal."""


class UsualCost(NamedTuple):
    """What a unit of such a model took on this machine: seconds, and the most bytes of memory."""

    seconds: float
    memory: int


def usual_cost(store: Path, name: str, target: str) -> UsualCost | None:
    """Of the units of the module called `name`, else of all for that target, in a store's folder. None without any."""
    try:
        costs = [cost for cost in unit_costs(Store(store)) if cost.target == target]
    except (AotcError, OSError):
        return None
    of_it = [cost for cost in costs if cost.model == name or cost.model.startswith(f"{name}-")] or costs
    return UsualCost(mean(cost.seconds for cost in of_it), max(cost.memory for cost in of_it)) if of_it else None


def cost_in_words(usual: UsualCost | None, models: int, cores: int) -> str:
    """`2 models on 4 cores; about 31 s and 1.2 GiB of memory for a unit, as those that were built here`."""
    about = "how long it takes is not known, as nothing was built for this target here"
    if usual is not None:
        memory = f" and {size_text(usual.memory)} of memory" if usual.memory else ""
        about = f"about {usual.seconds:.0f} s{memory} for a unit, as those that were built here"
    return f"{counted(models, 'model')} on {counted(cores, 'core')}; {about}"


class BuildProgress(msgspec.Struct):
    """What a build does. `units` are those to compile, once that is known, `finished` of them; `began` in seconds since
    the epoch; `expected` are the seconds that the units may take, 0 where that is not known; `process` builds."""

    process: int
    began: float
    doing: str = ""
    units: int = 0
    finished: int = 0
    expected: float = 0.0

    def line(self, now: float) -> str:
        """`2 of 4 units, compiling (34 s of about 60 s)`."""
        units = f"{self.finished} of {counted(self.units, 'unit')}, " if self.units else ""
        about = f" of about {self.expected:.0f} s" if self.expected else ""
        return one_line(f"{units}{self.doing or 'begins'} ({now - self.began:.0f} s{about})")

    def share(self, now: float) -> float:
        """How much of the build is done, from 0 to 1, by its units or by the time that it may take."""
        by_units = self.finished / self.units if self.units else 0.0
        by_time = min(0.95, (now - self.began) / self.expected) if self.expected else 0.0
        return min(1.0, max(by_units, by_time))


def progress_file(place: Place) -> Path:
    return place.folder / f"{place.name}.progress"


def read_progress(place: Place) -> BuildProgress | None:
    """None where no build of this module has said anything."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(progress_file(place).read_bytes(), type=BuildProgress)
    return None


Show = Callable[[], None]


@contextmanager
def progress_shown(place: Place | None, before: str) -> Iterator[Show]:
    """Within, each call of what is given shows how far the build is: as a bar in a notebook or a terminal, else not at
    all. `before` is told first: what the build costs."""
    cell = None if place is None else _notebook_cell()
    if place is None or (cell is None and not sys.stderr.isatty()):
        yield lambda: None
        return
    began = time.time()

    def line() -> tuple[float, str]:
        now, found = time.time(), read_progress(place)
        if found is None or found.began < began - 24 * 3600:
            found = BuildProgress(0, began)
        return found.share(now), found.line(now)

    if cell is not None:
        yield lambda: cell(_as_html(place.name, before, *line()))
        cell(_as_html(place.name, before, 1.0, f"waited {time.time() - began:.0f} s for the build"))
        return
    write_at_once(sys.stderr, f"aotc.compile: builds {place.name}: {before}; its log: {place.log}\n")

    def show() -> None:
        share, text = line()
        bar = "#" * round(share * WIDTH)
        write_at_once(sys.stderr, f"\r[{bar:-<{WIDTH}}] {text[:100]}\x1b[K")

    try:
        yield show
    finally:
        write_at_once(sys.stderr, f"\r\x1b[Kaotc.compile: waited {time.time() - began:.0f} s\n")


def write_at_once(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def write_line(text: str) -> None:
    """Tell the program's user something that was asked for by name, as by `AOTC_COMPILE=report`."""
    write_at_once(sys.stderr, f"{one_line(text)}\n")


def _notebook_cell() -> Callable[[str], None] | None:
    """What replaces this notebook cell's output; None outside of a notebook."""
    if (ipython := sys.modules.get("IPython")) is None or getattr(ipython.get_ipython(), "kernel", None) is None:
        return None
    displayed = importlib.import_module("IPython.display")
    handle: Any = displayed.display(displayed.HTML(""), display_id=True)

    def show(text: str) -> None:
        handle.update(displayed.HTML(text))

    return show


def _as_html(name: str, before: str, share: float, text: str) -> str:
    said = html.escape(f"{name}: {text}")
    return f'<progress value="{share:.3f}" max="1"></progress> {said}<br><small>{html.escape(before)}</small>'


def raise_priority(process: int) -> bool:
    """Let a process that builds, and all that it has started, run at this process's priority. Whether that is
    permitted: Linux lets root do so, and users up to RLIMIT_NICE."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        for task in _tasks_below(process):
            with suppress(ProcessLookupError):
                if os.getpriority(os.PRIO_PROCESS, task) > niceness:
                    os.setpriority(os.PRIO_PROCESS, task, niceness)
    except PermissionError:
        return False
    return True


def _tasks_below(process: int) -> list[int]:
    """The threads of a process and of those that it started, which are not its session's alone."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(folder.name))
    found = [process]
    for each in found:
        found += parents.get(each, ())
    tasks = []
    for each in found:
        with suppress(OSError):
            tasks += [int(task.name) for task in Path(f"/proc/{each}/task").iterdir()]
    return tasks
