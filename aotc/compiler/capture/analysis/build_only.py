"""What forward does while it is traced, and compiled code does not: printing, drawing from Python's random numbers,
the checks of torch.distributions."""

from __future__ import annotations

import builtins
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution

from aotc.compiler.scoped import replaced


@contextmanager
def build_only_effects() -> Iterator[list[str]]:
    """While active, note side effects. The yielded list has a sentence for each, at the end of the block.

    Distributions do not check their arguments meanwhile, unless they are told to: such a check is a branch on values.
    `torch.compile` leaves them out, too.
    """
    notes: list[str] = []
    printed: dict[str, None] = {}
    real_print, before = print, generator_states()
    checks, unchecked = Distribution._validate_args, _Unchecked()

    def noting(*values: Any, **options: Any) -> None:
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "aotc"):
            printed[f"{caller.f_code.co_filename}:{caller.f_lineno}"] = None
        real_print(*values, **options)

    with (
        replaced(builtins, "print", noting),
        replaced(Distribution, "_validate_args", checks and unchecked),
    ):
        yield notes
    if unchecked.asked:
        notes.append("torch.distributions checks arguments in eager; compiled code, as torch.compile's, does not")
    notes += [f"`print` at {place} ran while the model was traced; compiled code prints nothing" for place in printed]
    notes += [
        f"the model draws from {name} while it is traced: decisions by these numbers are compiled in; use torch.rand"
        for name, state in generator_states().items()
        if state != before.get(name, state)
    ]


class _Unchecked:
    """In the place of the class's attribute that says whether distributions check their arguments."""

    asked = False

    def __get__(self, distribution: object, owner: type) -> bool:
        self.asked = True
        return False


def generator_states() -> dict[str, Any]:
    """The states of Python's generator of random numbers and of NumPy's, by their names."""
    states: dict[str, Any] = {"Python's `random`": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        states["`numpy.random`"] = str(numpy.random.get_state())
    return states
