"""Choose between a direct launch and a CUDA graph: the build times both, with the calls that a service makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotc.errors import LibraryError
from aotc.machine.benchmarking import call_medians, device_alone
from aotc.manifest.types import ModelSpec
from aotc.models.calls import modes_of
from aotc.models.launch import settled_launch
from aotc.picks import timed_launch
from aotc.records import Bucket, LaunchPick
from aotc.runtime.options import Graphs

CallWith = Callable[[Graphs], Callable[[], Any]]
"""Binds the code of one unit with these options, and returns a function that calls it on example inputs."""


def pick_launch(
    spec: ModelSpec, bucket: Bucket, device: torch.device, call_with: CallWith, pinned: LaunchPick | None = None
) -> LaunchPick:
    """The pick for the unit of this bucket, with both medians in ms per call, all copies included; or the pinned one,
    if it is possible."""
    if (settled := settled_launch(spec, bucket)) is not None:
        return settled
    with modes_of(spec, device.type):
        if pinned and not pinned.graph and spec.cuda_graphs == "auto":
            return pinned
        direct = call_with(Graphs(use="never"))
        try:
            graph = call_with(Graphs(use="always"))
        except LibraryError as error:
            if spec.cuda_graphs == "always":
                raise
            return LaunchPick(graph=False, reason=f"no graph can be captured: {error.message}"[:500])
        if pinned and spec.cuda_graphs == "auto":
            return pinned
        with device_alone(device):
            direct_ms, graph_ms = call_medians(direct, graph)
    return timed_launch(direct_ms, graph_ms, always=spec.cuda_graphs == "always")
