"""Runs a script that uses `aotc.compile`, as it stands, and writes which code ran to a file.

    python script_runner.py SCRIPT BUILD REPORT

BUILD is what each `aotc.compile` of the script is given as `build`, or "off": then all runs in eager. What the script
prints is its own. REPORT gets, as JSON, the forms of all calls, with counts and reasons, and seconds of CPU of each
call.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import aotc
from aotc.tools.remembering.by_mode import ByMode
from aotc.tools.remembering.caches.cache_arguments import ByCache
from aotc.tools.remembering.remembering import Remembering

_inside = threading.local()


def timed(call: Callable[..., Any], seconds: list[float], is_ours: Callable[[Any], bool]) -> Callable[..., Any]:
    """The call, whose time is noted where it is none within another one."""

    @functools.wraps(call)
    def timed_call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "call", False) or not is_ours(self):
            return call(self, *args, **kwargs)
        _inside.call = True
        began = time.thread_time()
        try:
            return call(self, *args, **kwargs)
        finally:
            seconds.append(time.thread_time() - began)
            _inside.call = False

    return timed_call


def run(path: str, build: str, report: str) -> None:
    """Run the script in the module `__main__` of this process."""
    script = Path(path)
    of_all: list[Remembering] = []
    seconds: list[float] = []
    compile, began = aotc.compile, Remembering.__init__
    if build == "off":
        ours: set[int] = set()

        def given_back(module: Any = None, **options: Any) -> Any:
            ours.update(id(part) for part in [module] if isinstance(part, torch.nn.Module))
            return module if module is not None else given_back

        aotc.compile = given_back
        torch.nn.Module.__call__ = timed(  # type: ignore[method-assign]
            torch.nn.Module.__call__, seconds, lambda module: id(module) in ours
        )
    else:
        for cls in (Remembering, ByMode, ByCache):
            cls.__call__ = timed(cls.__call__, seconds, lambda calls: True)  # type: ignore[method-assign]

        def kept(self: Remembering, *args: Any, **kwargs: Any) -> None:
            began(self, *args, **kwargs)
            of_all.append(self)

        Remembering.__init__ = kept  # type: ignore[method-assign]
        aotc.compile = functools.partial(compile, build=build)
    sys.argv[:] = [str(script)]
    sys.path.insert(0, str(script.parent))
    main = sys.modules.setdefault("__main__", ModuleType("__main__"))
    main.__file__ = str(script)
    if script.suffix == ".ipynb":
        from cells import run_cells

        notebook = json.loads(script.read_text())
        run_cells(["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"])
    else:
        exec(compile_code(script), vars(main))
    forms = [form._asdict() for each in of_all for form in each.stats().forms]
    compilers = [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules]
    Path(report).write_text(json.dumps({"forms": forms, "seconds": seconds, "compilers": compilers}))


def compile_code(script: Path) -> Any:
    return compile(script.read_text(), str(script), "exec")


if __name__ == "__main__":
    run(*sys.argv[1:])
