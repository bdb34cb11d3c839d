"""The result of a bisection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from aotc.records import Record

Outcome = Literal["right", "wrong", "failed", "not run"]


class Stage(Record, frozen=True):
    """One step from eager to the artifact: whether its results are right, and if not, why."""

    name: str
    outcome: Outcome
    detail: str = ""


class Numbers(Record, frozen=True):
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
    numbers: Numbers | None = None
    detail: str = ""
    note: str = ""


class Remedy(Record, frozen=True):
    """A change with which the part is right, and whether the whole model is, too. `write`: how a manifest says it; ""
    where none can."""

    name: str
    write: str = ""
    whole: bool = False


class Bisection(Record, frozen=True):
    """Why one bucket of an artifact differs from eager, at `sizes`."""

    model: str
    bucket: str
    target: str
    sizes: str
    stages: tuple[Stage, ...]
    culprit: Culprit | None = None
    remedies: tuple[Remedy, ...] = ()
    conclusion: str = ""

    def lines(self) -> Iterator[str]:
        """The text of the command line."""
        yield f"{self.model} {self.bucket} {self.target} at {self.sizes}"
        width = max((len(stage.name) for stage in self.stages), default=0)
        for stage in self.stages:
            yield f"  {stage.name:<{width}}  {stage.outcome}{f': {stage.detail}' if stage.detail else ''}"
        if (culprit := self.culprit) is not None:
            where = ", ".join(filter(None, (culprit.line, f"in {culprit.module}" if culprit.module else "")))
            yield f"  {culprit.kind}: {' → '.join(culprit.names)}{f'  ({where})' if where else ''}"
            if culprit.inputs:
                yield f"    of {', '.join(culprit.inputs)}"
            if culprit.numbers is not None:
                yield f"    {culprit.numbers}"
            for text in filter(None, (culprit.detail, culprit.note)):
                yield f"    {text}"
        for remedy in self.remedies:
            scope = "the model is right with it" if remedy.whole else "this part is right with it, the model is not"
            yield f"  mended by {remedy.name}: {scope}{f'; write `{remedy.write}`' if remedy.write else ''}"
        for line in self.conclusion.splitlines():
            yield f"  {line}"
