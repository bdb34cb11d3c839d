"""Why a request's sizes keep it out of a bucket, and which buckets are nearest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.call_table.dispatch import Dispatcher, Shape
from aotc.call_table.rules import at_least, holds
from aotc.errors import Issue
from aotc.records import Size, SizeRange, TensorLeaf, takes


def _range_obstacles(dispatcher: Dispatcher, index: int, sizes: Shape) -> list[Issue]:
    bucket, dims = dispatcher.variants[index].bucket, dispatcher.rules.grown(index, sizes)
    issues = [
        _size_issue(dispatcher, name, size, bucket[name], padding_helps=at_least(bucket[name], size) is not None)
        for name, size in dims.items()
        if not takes(bucket[name], size)
    ]
    return issues + [
        Issue(f"the compiled code needs {condition.text}", expected=condition.text, actual=str(dims))
        for condition in dispatcher.rules.conditions[index]
        if not holds(condition, dims)
    ]


def obstacles(dispatcher: Dispatcher, index: int, sizes: Shape) -> list[Issue]:
    """Every reason in sizes why the variant `index` cannot run a request of these sizes."""
    if dispatcher.is_range(index):
        return _range_obstacles(dispatcher, index, sizes)
    bucket = dispatcher.variants[index].bucket
    run_sizes = tuple(int(str(bucket[name])) for name in dispatcher.dims.names)
    dims = dispatcher.dims.named(sizes)
    return [
        _size_issue(dispatcher, name, dims[name], bucket[name], padding_helps=True)
        for name in dispatcher.rules.pad_obstacles(sizes, run_sizes)
    ]


def _size_issue(dispatcher: Dispatcher, name: str, size: int, entry: Size, *, padding_helps: bool) -> Issue:
    pads = name in dispatcher.rules.paddable
    unpadded = padding_helps and size > 0 and not pads
    up_to = "up to " if pads and not isinstance(entry, SizeRange) else ""
    hint = f"give the inputs `pad: {{{name}: …}}` in the manifest" if unpadded else ""
    return Issue(
        f"{name} is {size}, the bucket takes {up_to}{entry}" + (" and its inputs are not padded" if unpadded else ""),
        expected=str(entry),
        actual=str(size),
        hint=hint if size else f"leave out calls in which {name} is 0",
    )


def unexplained(dispatcher: Dispatcher, sizes: Shape, leaves: Sequence[Any]) -> list[Issue]:
    """The axes whose size no size of their dim gives, like 7 for `2*seq`."""
    found = []
    for name, size in zip(dispatcher.dims.names, sizes, strict=True):
        if size < 0:
            index, axis, *_ = dispatcher.dims.sources[name]
            leaf, came = dispatcher.signature.leaves[index], leaves[index].shape[axis]
            assert isinstance(leaf, TensorLeaf)
            entry, where = leaf.shape[axis], f"{leaf.path}.shape[{axis}]"
            found.append(Issue(f"no `{name}` makes {entry} {came}", where, expected=str(entry), actual=str(came)))
    return found


def nearest(dispatcher: Dispatcher, sizes: Shape, count: int) -> list[int]:
    """The variants nearest to these sizes, by the summed distance of their tuned sizes."""

    def distance(index: int) -> int:
        bucket = dispatcher.variants[index].bucket
        total = 0
        for name, size in zip(dispatcher.dims.names, sizes, strict=True):
            entry = bucket[name]
            low, high = (entry.min, entry.max) if isinstance(entry, SizeRange) else (entry, entry)
            total += max(low - size, 0, size - high)
        return total

    return sorted(range(len(dispatcher.variants)), key=lambda index: (distance(index), index))[:count]
