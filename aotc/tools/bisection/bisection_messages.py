"""What the process that bisects is asked, and its answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from aotc.compiler.wrong_code.bisection_records import CompileStage, Culprit, Remedy
from aotc.records import Bucket, Dims, Record
from aotc.verify.comparison import VerifyJob


class BisectJob(msgspec.Struct, frozen=True):
    """What to bisect: an artifact, of it a bucket, and the sizes at which `aotc verify` found a difference; `extremes`:
    the draw of extreme inputs with which, "" with ordinary ones."""

    verify: VerifyJob
    bucket: Bucket
    dims: Dims
    extremes: Literal["", "extreme", "edges"] = ""


class Bisection(Record, frozen=True):
    """Why one bucket of an artifact differs from eager, at `sizes`."""

    model: str
    bucket: str
    target: str
    sizes: str
    stages: tuple[CompileStage, ...]
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
