"""A build as a trace for Perfetto or chrome://tracing: each unit's stages, within them the steps of Inductor, and where
it waited for other units, the GPU or a core.

The format is Chrome's Trace Event Format, as JSON: one `X` event for each span, in microseconds since the epoch. A
process of the trace is a host, its threads are the units' processes.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from aotc.compiler.build_report import Event
from aotc.compiler.messages import STAGE, Span
from aotc.store.files.writing import write_output


class BuildTrace:
    """Collects the spans of a build's events, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Span]] = []

    def add(self, event: Event) -> None:
        if event.span is not None:
            with self._lock:
                self._spans.append((event.unit.name, event.span))

    def write(self, path: Path) -> None:
        """Write the trace. Raises StoreError where the file cannot be written."""
        with self._lock:
            spans = sorted(self._spans, key=lambda item: (item[1].began, -item[1].seconds))
        write_output(path, json.dumps({"traceEvents": trace_events(spans)}).encode())


def trace_events(spans: list[tuple[str, Span]]) -> list[dict[str, Any]]:
    """The trace's events for spans, which are given with their unit's name."""
    hosts = {host: number for number, host in enumerate(sorted({span.host for _, span in spans}), 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": host or "?"}}
        for host, number in hosts.items()
    ]
    named: set[tuple[int, int]] = set()
    # The build's own process waits for a unit before that has one: these spans belong to the unit's first lane.
    first = {unit: span.process for unit, span in reversed(spans) if span.process}
    for unit, span in spans:
        pid, tid = hosts[span.host], span.thread or span.process or first.get(unit, 0)
        if (pid, tid) not in named:
            named.add((pid, tid))
            events.append(
                {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": _lane(unit, span)}}
            )
        events.append(_event(unit, span, pid, tid))
    return events


def _lane(unit: str, span: Span) -> str:
    return unit if span.thread in (0, span.process) else f"{unit}, thread {span.thread}"


def _event(unit: str, span: Span, pid: int, tid: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"unit": unit, "process": span.process}
    if span.kind == STAGE:
        arguments["peak memory, MiB"] = span.memory >> 20
        arguments["waited for a core, s"] = round(span.core, 3)
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "ts": round(span.began * 1e6),
        "dur": max(1, round(span.seconds * 1e6)),
        "pid": pid,
        "tid": tid,
        "args": arguments,
    }
