"""Side effects of forward that happen while it is traced, and not in compiled code: printing, drawing from Python's
random numbers."""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def build_only_effects() -> Iterator[list[str]]:
    """While active, note side effects. The yielded list has a sentence for each, at the end of the block."""
    notes: list[str] = []
    printed: dict[str, None] = {}
    real_print, before = print, _states()

    def noting(*values: Any, **options: Any) -> None:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "aotc"):
            printed[f"{caller.f_code.co_filename}:{caller.f_lineno}"] = None
        real_print(*values, **options)

    with mock.patch.object(builtins, "print", noting):
        yield notes
    notes += [f"`print` at {place} ran while the model was traced; compiled code prints nothing" for place in printed]
    notes += [
        f"the model draws from {name} while it is traced: decisions by these numbers are compiled in; use torch.rand"
        for name, state in _states().items()
        if state != before.get(name, state)
    ]


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's `random`": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        states["`numpy.random`"] = str(numpy.random.get_state())
    return states
