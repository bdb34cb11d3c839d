"""The arguments of a build. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aotc.compiler.messages import DEFAULTS, Settings

if TYPE_CHECKING:
    from aotc.compiler.executors.ray.requests import RayOptions
    from aotc.compiler.planning.shards import Shard
    from aotc.manifest import Manifest
    from aotc.picks import PickFile


@dataclass(frozen=True)
class BuildRequest:
    """The units of a manifest, where they are compiled, and where the result goes.

    What:  the units for `targets`, all if it is empty; with `shard`, only that part, and no bundle is published.
    How:   by the `settings`, with the autotune decisions of `picks`.
    Where: on this machine, or on a `cluster`.
    To:    `store`, a folder or a URL, as MODEL:`tag`.
    """

    manifest: Manifest
    store: Path | str
    tag: str = "latest"
    settings: Settings = DEFAULTS
    targets: tuple[str, ...] = ()
    shard: Shard | None = None
    picks: PickFile | None = None
    cluster: RayOptions | None = None
