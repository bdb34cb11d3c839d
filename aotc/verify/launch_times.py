"""Measure how the code of an artifact that had not run before is launched: directly, or as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aotc.errors import LibraryError
from aotc.machine.benchmarking import call_medians, device_alone
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.picks import timed_launch
from aotc.records import LaunchPick, SizeRange, Variant
from aotc.verify.comparison import Comparison


def measured_launches(comparison: Comparison) -> tuple[LaunchPick | None, ...]:
    """The launch of each variant of the artifact, in their order; None where it is not a matter of time.

    The buckets of a region, and those with a range, are launched as their record says; and all of them where the
    manifest says how. The halves of a training step are not launched as graphs.
    """
    artifact, spec = comparison.compiled.artifact, comparison.spec
    if artifact.regions or artifact.trains or spec.cuda_graphs != "auto" or comparison.device.type != "cuda":
        return tuple(None for _ in artifact.variants)
    with modes_of(spec, "cuda"):
        direct, graph = (comparison.launched(how) for how in ("never", "always"))
        return tuple(_measured(comparison, variant, direct, graph) for variant in artifact.variants)


def _measured(comparison: Comparison, variant: Variant, direct: Any, graph: Any) -> LaunchPick | None:
    if any(isinstance(size, SizeRange) for size in variant.bucket.values()):
        return None
    spec, signature = comparison.spec, comparison.signature
    dims = {name: size for name, size in variant.bucket.items() if isinstance(size, int)}
    leaves = signature_leaves(spec, signature, dims, comparison.device, 0, Path(comparison.job.folder))
    args, kwargs = arguments_of(signature, leaves)

    def call_of(compiled: Any) -> Callable[[], Any]:
        return lambda: compiled(*args, **kwargs)

    try:
        call_of(graph)()
    except LibraryError as error:
        return LaunchPick(graph=False, reason=f"no graph can be captured: {error.message}"[:500])
    with device_alone(comparison.device):
        return timed_launch(*call_medians(call_of(direct), call_of(graph)))
