"""What a worker is asked to compile, and what it says of it afterwards: messages between processes."""

from __future__ import annotations

import msgspec

from aotc.manifest import ModelSpec
from aotc.picks import Pick, UnitPicks
from aotc.records import Bucket, Dims, Record, Region
from aotc.store import Shared


class Job(Record, frozen=True):
    """What a worker is asked to do: one unit.

    `pins` are the picks made for this unit, `seeds` those of other units of its target; `locked`: measure nothing.
    `shared` is the folder in which the units of a build keep their answers for each other; without, there are none.
    `precompile`: there are so many units that headers are precompiled for them, in that folder.
    `region` names the one of `regions` that is compiled, with what it is given when the model runs at `sizes`.
    `sources` are those that the key was computed from.
    """

    spec: ModelSpec
    folder: str
    bucket: Bucket
    target: str
    key: str
    output: str
    pins: UnitPicks | None = None
    seeds: tuple[Pick, ...] = ()
    locked: bool = False
    shared: str = ""
    precompile: bool = False
    region: str = ""
    regions: tuple[Region, ...] = ()
    sizes: Dims = msgspec.field(default_factory=dict)
    sources: dict[str, str] = msgspec.field(default_factory=dict)


class Autotuned(Record, frozen=True):
    """What autotuning did in a unit: how many candidates failed and were dropped, how many decisions were pinned, which
    were measured, with how many measurements, and what other units had made already; which pins are stale;
    `unavailable` says why picks are not recorded, `left_out` which performance patches of torch are not applied."""

    failed_candidates: int = 0
    pinned: int = 0
    tuned: tuple[str, ...] = ()
    measurements: int = 0
    shared: Shared = Shared()
    stale: tuple[str, ...] = ()
    unavailable: str = ""
    left_out: tuple[str, ...] = ()
