"""Choose between a direct launch and a CUDA graph: the build times both, with the calls that a service makes."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotc.errors import LibraryError
from aotc.machine.benchmarking import device_alone
from aotc.manifest.types import ModelSpec
from aotc.models.calls import modes_of
from aotc.picks import MEASURED
from aotc.records import Bucket, Dims, LaunchPick, SizeRange
from aotc.runtime.cuda.options import GraphOptions

ROUNDS = 9
ROUND_SECONDS = 0.02
MARGIN = 1.02
"""The factor by which a graph must be faster: it costs memory and a capture at load, so a direct launch wins a tie."""


CallWith = Callable[[GraphOptions], Callable[[], Any]]
"""Binds the code of one unit with these options, and returns a function that calls it on example inputs."""


def pick_launch(
    spec: ModelSpec, bucket: Bucket, device: torch.device, call_with: CallWith, pinned: LaunchPick | None = None
) -> LaunchPick:
    """The pick for the unit of this bucket, with both medians in ms per call, all copies included; or the pinned one,
    if it is possible."""
    ranged = any(isinstance(size, SizeRange) for size in bucket.values())
    if spec.cuda_graphs == "never":
        return LaunchPick(graph=False, reason="cuda_graphs: never")
    if ranged:
        sizes = listed_sizes(spec, bucket)
        directly = "graph_sizes lists none of its sizes" if spec.graph_sizes else "a range runs directly"
        return LaunchPick(graph=bool(sizes), sizes=sizes, reason="graph_sizes" if sizes else directly)

    with modes_of(spec, device.type):
        if pinned and not pinned.graph and spec.cuda_graphs == "auto":
            return pinned
        direct = call_with(GraphOptions(use="never"))
        try:
            graph = call_with(GraphOptions(use="always"))
        except LibraryError as error:
            if spec.cuda_graphs == "always":
                raise
            return LaunchPick(graph=False, reason=f"no graph can be captured: {error.message}"[:500])
        if pinned and spec.cuda_graphs == "auto":
            return pinned
        with device_alone(device):
            direct_ms, graph_ms = medians(direct, graph)
    always = spec.cuda_graphs == "always"
    return LaunchPick(
        graph=always or graph_ms * MARGIN < direct_ms,
        direct_ms=round(direct_ms, 5),
        graph_ms=round(graph_ms, 5),
        reason="cuda_graphs: always" if always else MEASURED,
    )


def medians(*calls: Callable[[], Any]) -> tuple[float, ...]:
    """The median milliseconds per call of each, over rounds that take turns; calls in a round are back to back."""
    repeats = [max(5, int(ROUND_SECONDS / max(_round(call, 5), 1e-6))) for call in calls]
    rounds: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS):
        for times, call, count in zip(rounds, calls, repeats, strict=True):
            times.append(_round(call, count) * 1e3)
    return tuple(statistics.median(times) for times in rounds)


def _round(call: Callable[[], Any], count: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def listed_sizes(spec: ModelSpec, bucket: Bucket) -> tuple[Dims, ...]:
    """The sizes of a ranged bucket that are in the manifest's `graph_sizes`: all combinations; none where a range of
    the bucket is not listed. Fixed sizes of the bucket may be left out of the list."""
    axes: list[Sequence[int]] = []
    for name, size in bucket.items():
        listed = spec.graph_sizes.get(name, () if isinstance(size, SizeRange) else (size,))
        axes.append([one for one in listed if (one in size if isinstance(size, SizeRange) else one == size)])
    return tuple(dict(zip(bucket, sizes, strict=True)) for sizes in itertools.product(*axes))
