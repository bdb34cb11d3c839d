"""The arguments of a build. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aotc.compiler.executors.ray.requests import RayOptions
    from aotc.compiler.shards import Shard
    from aotc.manifest import Manifest
    from aotc.picks import PickFile


@dataclass(frozen=True)
class BuildRequest:
    """The units of a manifest, where they are compiled, and where the result goes.

    What:  the units for `targets`, all if it is empty; with `shard`, only that part, and no bundle is published.
    How:   with the autotune decisions of `picks`; with `locked`, a unit that needs another decision fails; with
           `untuned`, one for a GPU that this machine lacks takes Inductor's default.
           `force`: also compile units that the store holds. `share`: units share measurements and compiled files.
           `dummy_weights`: the modules' parameters need no memory, and the checks run on random values.
           `partial`: the bundle of a model of which a unit failed is published, too, without that unit.
    Where: `jobs` units at a time on this machine, by default as many as fit its cores and memory; or on a `cluster`.
    To:    `store`, a folder or a URL, as MODEL:`tag`.
    """

    manifest: Manifest
    store: Path | str
    tag: str = "latest"
    targets: tuple[str, ...] = ()
    shard: Shard | None = None
    picks: PickFile | None = None
    locked: bool = False
    untuned: bool = False
    force: bool = False
    share: bool = True
    dummy_weights: bool = False
    partial: bool = False
    jobs: int | None = None
    cluster: RayOptions | None = None
