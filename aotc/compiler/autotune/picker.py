"""The decisions of one unit: taken from pins, or measured and recorded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from aotc.compiler.autotune.benchmarks import MeasuredTime
from aotc.compiler.autotune.shared_picks import SharedPicks
from aotc.errors import BuildError, Issue
from aotc.picks import Candidate, Identity, Pick

UNMEASURED = 1.0
"""The answer of a locked build in place of a time, while it collects all missing pins: any number that is the same for
all candidates."""

Hook = tuple[Any, str, Callable[..., Any]]
"""A hook in Inductor: the owner, the attribute, its replacement."""


class Picker:
    """Answers autotuning's questions from pins, and records each answer with all candidates and their times.

    `own` are the pins of this unit, `seeds` those of other units of the same target, which answer equal questions. With
    `locked` nothing is measured, and all missing pins are reported at the end. With `untuned` they are not an error:
    the decisions are Inductor's defaults.

    A question without a pin may be answered from `shared`, the measurements of the build's other units. Its answers are
    stored by `form`: everything that an answer depends on, which is more than the question's identity.

    `measurements`: the number of timings; `failed_candidates`: candidates that could not be compiled or run;
    `shared_times`: kernels that another unit had timed.
    """

    def __init__(
        self,
        own: Sequence[Pick] = (),
        seeds: Sequence[Pick] = (),
        *,
        locked: bool = False,
        untuned: bool = False,
        shared: SharedPicks | None = None,
    ) -> None:
        self._own = {pin.identity: pin for pin in own}
        self._pins = {pin.identity: pin for pin in (*reversed(seeds), *own)}
        self.locked = locked or untuned
        self._untuned = untuned
        self._shared = None if self.locked else shared
        self.shared_times = 0
        self._compiled_elsewhere: set[str] = set()
        self.measurements = self.failed_candidates = 0
        self._taken: dict[Identity, Pick] = {}
        self._pinned: set[Identity] = set()
        self._missing: dict[Identity, Issue] = {}
        self._stale: dict[Identity, Issue] = {}

    @property
    def pins(self) -> tuple[Pick, ...]:
        return tuple(self._pins.values())

    @property
    def picks(self) -> tuple[Pick, ...]:
        """The recorded picks, in a stable order."""
        return tuple(self._taken[identity] for identity in sorted(self._taken))

    @property
    def pinned(self) -> int:
        """The number of decisions that were taken from pins."""
        return len(self._pinned)

    @property
    def tuned(self) -> list[Pick]:
        """The decisions that were measured here."""
        return [pick for pick in self._unpinned if not pick.measured_in]

    @property
    def shared(self) -> list[Pick]:
        """The decisions that other units of this build measured."""
        return [pick for pick in self._unpinned if pick.measured_in]

    @property
    def _unpinned(self) -> list[Pick]:
        return [pick for pick in self.picks if pick.identity not in self._pinned and len(pick.candidates) > 1]

    def pin_for(self, question: Pick, here: Sequence[Candidate] | None = None) -> Pick | None:
        """The pin that answers a question. One whose winner is not among the candidates `here` is noted as stale."""
        pin = self._pins.get(question.identity)
        if pin is None or here is None or any(pin.winner.same_code(candidate) for candidate in here):
            return pin
        known = ", ".join(map(str, here))[:2000]
        self._stale[question.identity] = Issue(
            f"{describe(pin)}: the pinned `{pin.winner}` does not exist here; there are: {known}",
            expected=str(pin.winner),
            actual=known,
        )
        return None

    def answered(self, question: Pick, here: Sequence[Candidate]) -> Pick | None:
        """This unit's earlier answer to an equal question, if its winner is one of the candidates `here`.

        A second measurement might give another winner, and only one can be recorded.
        """
        pick = self._taken.get(question.identity)
        return pick if pick and any(pick.winner.same_code(candidate) for candidate in here) else None

    def repeat(self, pick: Pick) -> None:
        """Record that an answer was used once more."""
        self._remember(pick)

    def take(self, pin: Pick) -> None:
        """Record that a pin was used, with the pin's own times."""
        self._pinned.add(pin.identity)
        self._remember(pin)

    def keep(self, question: Pick, candidates: Sequence[Candidate], chosen: Candidate, form: Any = None) -> None:
        """Record a decision that was measured, or that had one candidate; with a `form`, share it with other units."""
        ordered = sorted(candidates, key=lambda c: (c.ms is None, c.ms or 0.0, c.name, str(c.config)))
        index = next(i for i, candidate in enumerate(ordered) if candidate.same_code(chosen))
        pick = msgspec.structs.replace(question, candidates=tuple(ordered), chosen=index)
        self._remember(pick)
        if form is not None:
            self.share(pick, form)

    # -- sharing with other units -------------------------------------------------------------------------------------

    def find_shared(self, form: Any) -> Pick | None:
        """Another unit's answer, if there is one."""
        return self._shared.find(form) if self._shared else None

    def take_shared(self, pick: Pick) -> None:
        """Record that another unit's answer was used, with that unit's times."""
        self._remember(pick)

    def share(self, pick: Pick, form: Any) -> None:
        """Publish a measurement of this unit to the other units."""
        if self._shared and not pick.measured_in:
            self._shared.put(form, pick)

    @property
    def shares(self) -> bool:
        return self._shared is not None

    def about_to_compile(self, source: str) -> None:
        """Note whether another unit has compiled this source, which is then in the cache of compiled kernels."""
        if self._shared and self._shared.marked(_compiled(source)):
            self._compiled_elsewhere.add(source)

    def has_compiled(self, source: str) -> None:
        if self._shared and source not in self._compiled_elsewhere:
            self._shared.mark(_compiled(source))

    @property
    def compiled_elsewhere(self) -> int:
        """The number of kernels that another unit had compiled."""
        return len(self._compiled_elsewhere)

    def in_own_order(self, choices: Sequence[Any]) -> Sequence[Any]:
        """The candidates in an order that differs by unit: of units that compile equal candidates at the same time,
        each then finds some of them compiled by another."""
        return self._shared.rotated(choices) if self._shared else choices

    def asking(self, question: Pick) -> AbstractContextManager[None]:
        """While active, no other unit measures an answer to that question."""
        return self._shared.asking(question.identity) if self._shared else nullcontext()

    # -----------------------------------------------------------------------------------------------------------------

    def must_not_measure(self, question: Pick) -> bool:
        """Whether the build is locked. If so, the question is noted as missing, and the caller may give any answer."""
        if self.locked:
            self._missing[question.identity] = Issue(f"{describe(question)} is not pinned")
        return self.locked

    @property
    def untuned(self) -> tuple[str, ...]:
        """The decisions that are Inductor's defaults, since nothing was measured."""
        return tuple(str(issue) for _, issue in sorted(self._missing.items())) if self._untuned else ()

    def stale(self) -> tuple[Issue, ...]:
        """Issues: the unit's own pins that were not used, and pins whose candidate does not exist here."""
        unused = {
            identity: self._unused(pin)
            for identity, pin in self._own.items()
            if identity not in self._taken and pin.kind != "launch"
        }
        return tuple(issue for _, issue in sorted({**unused, **self._stale}.items()))

    def _unused(self, pin: Pick) -> Issue:
        said = f"{describe(pin)}: pinned to `{pin.winner}`, but this unit asks"
        asked = [identity[-1] for identity in (*self._taken, *self._missing) if identity[:-1] == pin.identity[:-1]]
        if not asked:
            return Issue(f"{said} no such question", expected=str(pin.winner))
        of_code = pin.arguments[:1] and pin.arguments[0].startswith("code ")
        return Issue(
            f"{said} it with other templates: another torch, Triton or GPU, or other candidates"
            if of_code
            else f"{said} it with other arguments",
            expected=", ".join(pin.arguments) or "no arguments",
            actual="; ".join(", ".join(arguments) or "none" for arguments in asked)[:2000],
        )

    def raise_if_locked_out(self) -> None:
        """Raises BuildError where the build is locked and a pick is missing or stale."""
        issues = (*(issue for _, issue in sorted(self._missing.items())), *self.stale())
        if self.locked and not self._untuned and issues:
            raise BuildError(
                f"{len(issues)} picks are missing or stale, and nothing may be measured",
                hint="build without --locked on a machine that can measure, and export the picks again with "
                "`aotc picks REF --export FILE`",
                issues=issues,
                stage="compile",
            )

    def _remember(self, pick: Pick) -> None:
        """Record a pick. `uses` counts the operators of the model with that pick; it is 1 for other kinds of picks."""
        before = self._taken.get(pick.identity)
        uses = before.uses + 1 if before and pick.kind == "operator" else 1
        self._taken[pick.identity] = msgspec.structs.replace(pick, uses=uses)


def with_time(candidate: Candidate, ms: float) -> Candidate:
    """The candidate with its time, and with its spread if `ms` is a `MeasuredTime`."""
    if not math.isfinite(ms):
        return Candidate(candidate.name, candidate.config)
    median, calls = (round(ms.median, 6), ms.calls) if isinstance(ms, MeasuredTime) else (None, 0)
    return Candidate(candidate.name, candidate.config, round(float(ms), 6), median, calls)


def _compiled(source: str) -> list[str]:
    """The mark for a kernel's source that was compiled into this Triton cache."""
    return ["compiled", os.environ.get("TRITON_CACHE_DIR", ""), source]


def describe(pick: Pick) -> str:
    """The question in one line: `operator addmm (float32[64], float32[128, 64], beta=0.5)`."""
    about = ", ".join((*(text.partition(" stride")[0] for text in pick.inputs), *pick.arguments))
    return f"{pick.kind} {pick.subject}{f' ({about})' if about else ''}"[:300]
