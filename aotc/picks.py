"""Autotune picks: each decision of a build with its evidence, and the file that pins them.

A variant's picks are a blob of their own (`Variant.picks`), which `aotc.load` does not fetch. `aotc picks --export`
writes the same records, each with the chosen candidate alone, to a file that `aotc build --picks` reads.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from aotc.records import Bucket, Record, Scalar

PICKS_SCHEMA_VERSION = 1

PickKind = Literal["operator", "fusion", "padding", "kernel", "launch"]


class Candidate(Record, frozen=True):
    """One way to do it: a kernel template or a library call, with its configuration, and its time in milliseconds.

    `ms` is None where it was not measured, or could not be compiled or run.
    """

    name: str
    config: dict[str, Scalar] = msgspec.field(default_factory=dict)
    ms: float | None = None

    def same_code(self, other: Candidate) -> bool:
        return (self.name, self.config) == (other.name, other.config)


class Pick(Record, frozen=True):
    """One autotune decision.

    kind: "operator": which implementation of a matrix product, convolution, …; "fusion": whether a template is fused
        with its neighbour; "padding": whether a matrix product is padded; "kernel": the configuration of a Triton
        kernel; "launch": direct or as a CUDA graph.
    subject: the operator's, kernel's or fused nodes' name.
    inputs, output: `bfloat16[256, 1024] stride [1024, 1] cuda`; empty where the subject says all.
    candidates: the measured ones, fastest first, then those without a time.
    chosen: the index of the one that was taken.
    uses: how many times the unit asks this question; it is decided once.
    detail: what the build needs to take the pick again.
    """

    kind: PickKind
    subject: str
    candidates: tuple[Candidate, ...]
    chosen: int = 0
    inputs: tuple[str, ...] = ()
    output: str = ""
    uses: int = 1
    detail: dict[str, Scalar] = msgspec.field(default_factory=dict)

    @property
    def winner(self) -> Candidate:
        return self.candidates[self.chosen]

    @property
    def runner_up(self) -> Candidate | None:
        """The fastest measured candidate that was not taken."""
        others = [c for i, c in enumerate(self.candidates) if i != self.chosen and c.ms is not None]
        return min(others, key=lambda candidate: candidate.ms or 0.0, default=None)

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...], str]:
        """What is decided: equal in two builds that ask the same question."""
        return self.kind, self.subject, self.inputs, self.output


class UnitPicks(Record, frozen=True):
    """All picks of one unit, and what they were measured on: `device` is the GPU's or the CPU's name."""

    model: str
    bucket: Bucket
    target: str
    torch: str
    device: str
    picks: tuple[Pick, ...]
    triton: str = ""


class PickFile(Record, frozen=True):
    """What `aotc picks --export` writes and `aotc build --picks` reads, and the blob `Variant.picks` with one unit."""

    schema: int
    units: tuple[UnitPicks, ...]
