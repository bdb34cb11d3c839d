"""Runs a script that uses `aotc.compile`, as it stands, and writes which code ran to a file.

    python script_runner.py SCRIPT BUILD REPORT

BUILD is what each `aotc.compile` of the script is given as `build`; "off": all runs in eager; "unbuilt": as "exit", but
nothing is built. What the script prints is its own. REPORT gets, as JSON, the `forms` of all calls with counts and
reasons, and the `costs` of calls in eager: CPU time of the call by that of the module within it.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import aotc
from aotc.tools.remembering.building.builds import Builds
from aotc.tools.remembering.by_mode import ByMode
from aotc.tools.remembering.caches.cache_arguments import ByCache
from aotc.tools.remembering.remembering import Remembering

_depth = threading.local()


def timed(call: Callable[..., Any], level: int, ended: Callable[[float], None]) -> Callable[..., Any]:
    """The call, which tells its CPU time where it is the first of its level within one of the level above."""

    @functools.wraps(call)
    def timed_call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(_depth, "level", 0) != level - 1:
            return call(self, *args, **kwargs)
        _depth.level = level
        began = time.thread_time()
        try:
            return call(self, *args, **kwargs)
        finally:
            _depth.level = level - 1
            ended(time.thread_time() - began)

    return timed_call


def watched() -> tuple[list[Remembering], list[float]]:
    """All modules that are compiled from now on; and what their calls in eager cost."""
    of_all: list[Remembering] = []
    costs: list[float] = []
    began = Remembering.__init__

    def kept(self: Remembering, *args: Any, **kwargs: Any) -> None:
        began(self, *args, **kwargs)
        of_all.append(self)

    def ended(seconds: float) -> None:
        if (inner := vars(_depth).pop("inner", 0.0)) > 0:
            costs.append(seconds / inner)

    Remembering.__init__ = kept  # type: ignore[method-assign]
    for cls in (Remembering, ByMode, ByCache):
        cls.__call__ = timed(cls.__call__, 1, ended)  # type: ignore[method-assign]
    torch.nn.Module.__call__ = timed(  # type: ignore[method-assign]
        torch.nn.Module.__call__, 2, lambda seconds: setattr(_depth, "inner", seconds)
    )
    return of_all, costs


def given_back(module: Any = None, **options: Any) -> Any:
    return module if module is not None else given_back


def run(path: str, build: str, report: str) -> None:
    """Run the script in the module `__main__` of this process."""
    script, main = Path(path), sys.modules["__main__"]
    of_all, costs = watched()
    if build == "unbuilt":
        Builds.wait = lambda *_: True  # type: ignore[method-assign]
    kind = "exit" if build == "unbuilt" else build
    aotc.compile = given_back if build == "off" else functools.partial(aotc.compile, build=kind)
    sys.argv[:] = [path]
    sys.path.insert(0, str(script.parent))
    main.__file__ = path
    if script.suffix == ".ipynb":
        from cells import run_cells

        notebook = json.loads(script.read_text())
        run_cells(["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"])
    else:
        exec(compile(script.read_text(), path, "exec"), vars(main))
    forms = [form._asdict() for each in of_all for form in each.stats().forms]
    Path(report).write_text(json.dumps({"forms": forms, "costs": costs}))


if __name__ == "__main__":
    run(*sys.argv[1:])
