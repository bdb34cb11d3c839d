"""How code for a GPU is launched where nothing is measured: by the manifest, the bucket, or the picks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from aotc.manifest.types import ModelSpec
from aotc.records import Artifact, Bucket, Dims, LaunchPick, SizeRange, Variant, has_range, takes

NOT_MEASURED = "not measured: built without such a GPU"
READS_A_VALUE = "it reads a tensor's value, which no graph does"
_ITEM = "aoti_torch_item_"
"""How the functions of the shim begin that give a tensor's value."""


def settled_launch(spec: ModelSpec, bucket: Bucket) -> LaunchPick | None:
    """The pick for a bucket whose launch mode is settled without a measurement; None if it must be measured."""
    if spec.cuda_graphs == "never":
        return LaunchPick(graph=False, reason="cuda_graphs: never")
    if has_range(bucket):
        sizes = listed_sizes(spec, bucket)
        directly = "graph_sizes lists none of its sizes" if spec.graph_sizes else "a range runs directly"
        return LaunchPick(graph=bool(sizes), sizes=sizes, reason="graph_sizes" if sizes else directly)
    return None


def unmeasured_launch(spec: ModelSpec, artifact: Artifact, pinned: LaunchPick | None = None) -> LaunchPick:
    """The pick for the one variant of `artifact`, which cannot be run here: the pinned one, else a graph. A region is
    launched directly, as a graph copies its inputs, which are outputs, and so is code that waits for a value."""
    (variant,) = artifact.variants
    if (settled := settled_launch(spec, variant.bucket)) is not None:
        return settled
    if spec.cuda_graphs == "always":
        return LaunchPick(graph=True, reason="cuda_graphs: always")
    if pinned:
        return pinned
    if _reads_a_value(variant):
        return LaunchPick(graph=False, reason=READS_A_VALUE)
    return LaunchPick(graph=not variant.region, reason=NOT_MEASURED)


def _reads_a_value(variant: Variant) -> bool:
    """Whether its code takes a number out of a tensor, as by `tensor.item()`."""
    return variant.imports is not None and any(each.startswith(_ITEM) for each in variant.imports.functions)


def listed_sizes(spec: ModelSpec, bucket: Bucket) -> tuple[Dims, ...]:
    """The sizes of a ranged bucket that are in the manifest's `graph_sizes`: all combinations; none where a range of
    the bucket is not listed. Fixed sizes of the bucket may be left out of the list."""
    axes: list[Sequence[int]] = []
    for name, size in bucket.items():
        listed = spec.graph_sizes.get(name, () if isinstance(size, SizeRange) else (size,))
        axes.append([one for one in listed if takes(size, one)])
    return tuple(dict(zip(bucket, sizes, strict=True)) for sizes in itertools.product(*axes))
