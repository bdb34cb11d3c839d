"""What is verified of an artifact: its buckets, of each the sizes, and at each of them inputs from several seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from aotc.call_table.dispatch import Dispatcher
from aotc.models.extreme_inputs import off_vector
from aotc.records import Artifact, Bucket, Dims, Size, SizeRange, Variant, tuned_dims


def model_dispatcher(artifact: Artifact, buckets: Sequence[Bucket]) -> Dispatcher:
    """The rule for which call of the model belongs to which bucket. With regions the variants are theirs, and a bucket
    of the manifest is one of the model's."""
    if artifact.calls or not artifact.regions:
        return Dispatcher(artifact.signature, artifact.calls or artifact.variants)
    empty = Variant({}, library="", files=(), arguments=(), outputs=(), output_tree=0)
    return Dispatcher(artifact.signature, [msgspec.structs.replace(empty, bucket=bucket) for bucket in buckets])


class VerifyStep(NamedTuple):
    """One part of verifying an artifact: a bucket, by its place, with which weights, and if with extreme inputs."""

    bucket: int
    weights: Literal["own", "other", "swapped"] = "own"
    extremes: bool = False


def steps_of(artifact: Artifact, dispatcher: Dispatcher, own_alone: bool = False) -> list[VerifyStep]:
    """Every bucket at all its sizes. Then, for live weights unless `own_alone`: every bucket once with other weights,
    and one bucket with weights that `update_weights` has set. At last every bucket once with extreme inputs, after
    which a GPU may be of no use to the process."""
    buckets = range(len(dispatcher.variants))
    steps = [VerifyStep(index) for index in buckets]
    if artifact.weights == "live" and not own_alone:
        steps += [
            *(VerifyStep(index, "other") for index in buckets),
            *(VerifyStep(index, "swapped") for index in buckets[:1]),
        ]
    return steps if artifact.parallel else [*steps, *(VerifyStep(index, extremes=True) for index in buckets)]


def sizes_to_verify(dispatcher: Dispatcher, index: int) -> list[Dims]:
    """The sizes at which one variant is verified; each of them is one that dispatch gives to this variant.

    A fixed bucket: its own sizes, and, where inputs are padded, sizes at the edges of what is padded into it and
    strictly inside. A range: its ends, their neighbours, the sizes around powers of two that tend to be special, the
    one it is tuned at, and what is padded into it.
    """
    variant = dispatcher.variants[index]
    names = dispatcher.dims.names
    candidates = [_candidates(variant, name, dispatcher.variants) for name in names]
    chosen: list[Dims] = []
    for sizes in _spread(candidates):
        plan = dispatcher.plan(sizes)
        if plan is not None and plan.variant == index:
            chosen.append(dict(zip(names, sizes, strict=True)))
    return chosen


def sizes_at_extremes(dispatcher: Dispatcher, index: int) -> Dims | None:
    """The sizes at which one variant is called with extreme inputs: of ranges such as are not a vector's, without pads
    where there are such. None where none is dispatched to it."""
    bucket, names = dispatcher.variants[index].bucket, dispatcher.dims.names
    tuned = tuned_dims(bucket)
    for dims in (off_vector(bucket, tuned), tuned, *sizes_to_verify(dispatcher, index)):
        plan = dispatcher.plan(tuple(dims[name] for name in names))
        if plan is not None and plan.variant == index:
            return dims
    return None


def _candidates(variant: Variant, name: str, variants: Sequence[Variant]) -> list[int]:
    entry = variant.bucket[name]
    if isinstance(entry, SizeRange):
        return _in_range(entry)
    below = max((size for size in _fixed_sizes(variants, name) if size < entry), default=0)
    inside = {entry, entry - 1, below + 1, (below + entry) // 2, 1}
    return sorted((size for size in inside if 0 < size <= entry), reverse=True) or [entry]


def _fixed_sizes(variants: Sequence[Variant], name: str) -> Iterator[int]:
    for variant in variants:
        size: Size = variant.bucket[name]
        if isinstance(size, int):
            yield size


def _in_range(entry: SizeRange) -> list[int]:
    step = entry.multiple_of
    low, high = -(-entry.min // step) * step, entry.max // step * step
    wanted = {low, low + step, high - step, high, entry.tune_at, 7, 8, 9}
    inside = sorted(size for size in wanted if size in entry)
    padded = sorted(size for size in {1, low - 1, low + 1, high - 1} - wanted if 0 < size < high)
    return [*inside[:1], *padded, *inside[1:]]


def _spread(candidates: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Every candidate of each dim with the first ones of the others, then all at their last: not the whole product."""
    if not candidates:
        yield ()
        return
    base = tuple(sizes[0] for sizes in candidates)
    seen = set()
    varied = (
        (*base[:position], size, *base[position + 1 :]) for position, sizes in enumerate(candidates) for size in sizes
    )
    last = tuple(sizes[-1] for sizes in candidates)
    for sizes in itertools.chain([base], varied, [last]):
        if sizes not in seen:
            seen.add(sizes)
            yield sizes


def describe_sizes(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sorted(sizes.items())) or "-"
