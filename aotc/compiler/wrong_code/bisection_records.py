"""The result of a bisection: the steps that were tried, the smallest part that differs, and what fixes it."""

from __future__ import annotations

from typing import Literal

from aotc.records import Record

StageOutcome = Literal["right", "wrong", "failed", "not run"]


class CompileStage(Record, frozen=True):
    """One step from eager to the artifact: whether its results are right, and if not, why."""

    name: str
    outcome: StageOutcome
    detail: str = ""


class WorstElement(Record, frozen=True):
    """Of the element that differs most: its index, what compiled code and eager give, and the float64 reference."""

    index: tuple[int, ...]
    compiled: float
    eager: float
    reference: float

    def __str__(self) -> str:
        at = f" at {list(self.index)}" if self.index else ""
        return f"compiled {self.compiled:.9g}, eager {self.eager:.9g}, in float64 {self.reference:.9g}{at}"


class Culprit(Record, frozen=True):
    """The smallest part that differs.

    `kind`: an operator of the graph, several that differ only together (a region), or a weight. `names`: theirs, in
    order. `line`: the model's line. `module`: the path of the submodule. `allowed`: the error that was exceeded, as
    text. `note`: what else is known, as where a decomposition is defined.
    """

    kind: Literal["operator", "region", "weight"]
    names: tuple[str, ...]
    line: str = ""
    module: str = ""
    inputs: tuple[str, ...] = ()
    numbers: WorstElement | None = None
    detail: str = ""
    note: str = ""


class Remedy(Record, frozen=True):
    """A change with which the part is right, and whether the whole model is, too. `write`: how a manifest says it; ""
    where none can."""

    name: str
    write: str = ""
    whole: bool = False
