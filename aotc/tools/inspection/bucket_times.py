"""What a call takes in each bucket, by the measurements of the build."""

from __future__ import annotations

from statistics import mean
from typing import NamedTuple

from aotc.errors import NotFoundError
from aotc.provenance import BuiltVariant, CallTimes
from aotc.records import Dims
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import Bundle
from aotc.store.layout.units import find_built
from aotc.store.readable import ReadableStore


class BucketTimes(NamedTuple):
    """Sizes and milliseconds of one call in each bucket of an artifact; `busy` of them were taken while other processes
    disturbed the build. Its units took `seconds` to build, on average."""

    times: tuple[tuple[Dims, float], ...]
    busy: int
    seconds: float


def measured(store: ReadableStore, bundle: Bundle) -> BucketTimes:
    """The times of the artifact that has most of them.

    Raises NotFoundError where there are none: the store is a remote, which holds no units, or of a region, whose calls
    are not the model's.
    """
    found: list[BucketTimes] = []
    for entry in bundle.artifacts:
        artifact = read_built(store, entry)
        if artifact.regions:
            continue
        units = [(variant, unit) for variant in artifact.variants if (unit := find_built(store, variant.key))]
        known = [(variant, unit.times, unit.seconds) for variant, unit in units if unit.times]
        if known:
            sizes = tuple((_sizes(variant, times), _ms(variant, times)) for variant, times, _ in known)
            busy = sum(times.on_busy_machine for _, times, _ in known)
            found.append(BucketTimes(sizes, busy, mean(seconds for _, _, seconds in known)))
    best = max(found, key=lambda one: len(one.times), default=None)
    if best is None:
        raise NotFoundError(
            f"the build of {bundle.model} left no times of whole calls here",
            hint="name the store that `aotc build` wrote, of a model that is not built by regions",
        )
    return best


def _sizes(variant: BuiltVariant, times: CallTimes) -> Dims:
    return {
        dim: times.sizes.get(dim, size) if isinstance(size, int) else times.sizes[dim]
        for dim, size in variant.bucket.items()
    }


def _ms(variant: BuiltVariant, times: CallTimes) -> float:
    """On a GPU that of the launch that was picked."""
    if variant.launch and variant.launch.graph and variant.launch.graph_ms is not None:
        return variant.launch.graph_ms
    return times.compiled.least_ms
