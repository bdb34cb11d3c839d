"""Counters of the calls of one callable; `aotc.runtime.stats` reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aotc.machine.forks import renew_in_child

if TYPE_CHECKING:
    from aotc.call_table.dispatch import Plan

FIRST_BITS, SPANS = 13, 25
"""Of the nanoseconds of calls: those of up to 2**13, 2**14, … are counted together, and those of more in the last
span. `evaluator.cpp` has the same."""


class Counters:
    """Counters of a callable. Any thread may count, and a signal handler within another count of its thread.

    names, rows: of each bucket its calls, its padded calls, and elements of the inputs as they came and as they ran;
    then the nanoseconds of its calls, and how many took each span. native: rows counted by the extension.
    kind_of: the kind of each miss by the hash of its form. log: when a minute began; kinds logged and not since.
    """

    def __init__(self, buckets: Sequence[str]) -> None:
        self.lock = threading.RLock()
        self.names, self.rows = list(buckets), [[0] * (5 + SPANS) for _ in buckets]
        self.misses, self.copies = 0, 0
        self.miss_kinds, self.kind_of = dict[str, int](), dict[int, str]()
        self.log = (-60.0, 0, 0)
        self.errors: dict[str, int] = {}
        self.native: Callable[[], list[tuple[int, ...]]] = list
        renew_in_child(self, Counters._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()

    def count_call(self, plan: Plan, nanoseconds: int | None) -> None:
        """`nanoseconds` is None for what was not timed."""
        with self.lock:
            row = self.rows[plan.variant]
            row[0] += 1
            row[1] += bool(plan.pads)
            row[2] += plan.request_elements
            row[3] += plan.run_elements
            if nanoseconds is not None:
                row[4] += nanoseconds
                row[5 + min(max((nanoseconds - 1).bit_length() - FIRST_BITS, 0), SPANS - 1)] += 1

    def count_error(self, kind: type[BaseException]) -> None:
        with self.lock:
            self.errors[kind.__name__] = self.errors.get(kind.__name__, 0) + 1

    def count_copies(self, copies: int) -> None:
        with self.lock:
            self.copies += copies
