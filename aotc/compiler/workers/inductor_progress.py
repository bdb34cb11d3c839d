"""Progress hooks in Inductor, in the compiling process. A hook that this torch lacks is skipped."""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.messages import INDUCTOR, Span, span_here
from aotc.compiler.scoped import replaced

SHORTEST = 0.005
"""Seconds; a shorter span is not worth a line in a trace."""

_TUNED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_int_mm", "_scaled_mm", "_grouped_mm")
"""The operators for which autotuning has candidates: each is autotuned once."""

SayStage = Callable[[str], None]
Tell = Callable[[Span], None]


@contextmanager
def observed(say: SayStage, tell: Tell) -> Iterator[None]:
    """While active, call `say` when a step of Inductor begins, with its name, and `tell` when one has ended."""
    observer = _Observer(say, tell)
    with ExitStack() as patches:
        for module, owner, name, hook in (
            ("torch._inductor.graph", "GraphLowering", "run", observer.lowering),
            ("torch._inductor.select_algorithm", "AlgorithmSelectorCache", "do_autotuning", observer.autotuning),
            ("torch._inductor.cpp_builder", "CppBuilder", "build", observer.building),
            ("torch._dynamo.utils", "ChromiumEventLogger", "log_event_end", observer.phase),
        ):
            found = getattr(importlib.import_module(module), owner, None)
            if callable(function := getattr(found, name, None)):
                # `wraps`, since aotc.compiler.autotune inspects the parameters of the functions that it hooks
                patches.enter_context(replaced(found, name, functools.wraps(function)(hook(function))))
        yield


class _Observer:
    def __init__(self, say: SayStage, tell: Tell) -> None:
        self._say, self._tell = say, tell
        self._asked = self._expected = 0

    def lowering(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(graph: Any, *args: Any, **kwargs: Any) -> Any:
            self._say("lowering")
            self._expected += _candidates(graph)
            began = time.time()
            try:
                return run(graph, *args, **kwargs)
            finally:
                self._tell_long(span_here("lowering", "lowering", began, time.time()))
                self._say("generating code")

        return lowered

    def autotuning(self, tune: Callable[..., Any]) -> Callable[..., Any]:
        def tuned(selector: Any, name: str, *args: Any, **kwargs: Any) -> Any:
            self._asked += 1
            of = f" of {self._expected}" if self._asked <= self._expected else ""
            self._say(f"autotuning operator {self._asked}{of}")
            began = time.time()
            try:
                return tune(selector, name, *args, **kwargs)
            finally:
                self._tell_long(span_here(f"autotune {name}", "autotuning", began, time.time()))

        return tuned

    def building(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def built(builder: Any, *args: Any, **kwargs: Any) -> Any:
            target = Path(str(getattr(builder, "_target_file", "")))
            sources = str(getattr(builder, "_sources_args", ""))
            kind = "linking" if target.suffix == ".so" and ".o" in sources and ".cpp" not in sources else "compiling"
            self._say(kind)
            began = time.time()
            try:
                return build(builder, *args, **kwargs)
            finally:
                what = next((word for word in ("wrapper", "kernel") if word in target.name), target.suffix.lstrip("."))
                self._tell_long(span_here(f"{kind} {what}", kind, began, time.time()))

        return built

    def phase(self, log: Callable[..., Any]) -> Callable[..., Any]:
        def logged(
            logger: Any, event_name: str, time_ns: int, metadata: Any, start_time_ns: int, *a: Any, **k: Any
        ) -> Any:
            self._tell_long(span_here(event_name, INDUCTOR, start_time_ns / 1e9, time_ns / 1e9))
            return log(logger, event_name, time_ns, metadata, start_time_ns, *a, **k)

        return logged

    def _tell_long(self, span: Span) -> None:
        if span.seconds >= SHORTEST:
            self._tell(span)


def _candidates(lowering: Any) -> int:
    """The number of operators of a graph that will be autotuned; 0 where it is unknown."""
    graph = getattr(getattr(lowering, "module", None), "graph", None)
    names = (getattr(node.target, "__name__", "").partition(".")[0] for node in getattr(graph, "nodes", ()))
    return sum(name in _TUNED for name in names)
