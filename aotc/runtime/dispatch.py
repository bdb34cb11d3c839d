"""Choosing the variant for a request, by a rule that is the same every time.

1. The bucket whose every size equals the request's.
2. Else the cheapest padded bucket: among the fixed buckets that are at least as large in every dim, equal in each dim
   that some input using it cannot be padded in, the one with the fewest input elements; ties go to the bucket whose
   sizes come first in order.
3. Else the tightest range: among the ranges that hold every size, the one with the fewest sizes (product over dims);
   ties go to the one tuned nearest above the request, then to the first in the artifact.
4. Else the cheapest padded range: among the buckets with a range that hold the request once it is padded to the next
   size in each dim in which it may be, the one that then has the fewest input elements; ties go as among ranges.
5. Else a miss.

The answer for one set of sizes is computed once and remembered, so a call costs one lookup whatever the number of
buckets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import NamedTuple

from aotc.errors import CorruptError
from aotc.expressions import Expression
from aotc.records import Bucket, Dims, PadRule, Signature, Size, SizeRange, TensorLeaf, Variant, bucket_name
from aotc.runtime.dims import DimReader, Shape, named_axes, parse, shape_of
from aotc.runtime.padding import Crop, Pad, volume
from aotc.tensors.layouts import strides_in

_log = logging.getLogger("aotc")

REMEMBERED = 16384
"""Sets of sizes whose answers are kept; past that the memory starts anew."""


class Plan(NamedTuple):
    """What is done for one set of sizes: `shapes` holds each leaf's required shape (None for a constant), `strides` the
    strides of those leaves that have an axis of size 1, where they are not given by how the elements lie."""

    variant: int
    kind: str
    sizes: Shape
    shapes: tuple[Shape | None, ...]
    strides: tuple[tuple[int, Shape], ...]
    pads: tuple[Pad, ...]
    crops: tuple[Crop, ...]
    request_elements: int
    run_elements: int


class Dispatcher:
    """The buckets of one artifact. Raises CorruptError for a record that cannot be dispatched on."""

    def __init__(self, signature: Signature, variants: Sequence[Variant], model: str = "") -> None:
        self.signature = signature
        self.variants = variants
        self._model = model
        self.dims = DimReader(signature.leaves)
        self._shapes = [shape_of(leaf) if isinstance(leaf, TensorLeaf) else None for leaf in signature.leaves]
        self.conditions = [tuple(parse(text) for text in variant.conditions) for variant in variants]
        self.paddable = signature.paddable_dims()
        self._exact: dict[Shape, int] = {}
        self._fixed: list[tuple[int, Shape, int]] = []
        self._ranges: list[int] = []
        for index, variant in enumerate(variants):
            self._add(index, variant.bucket)
        self._remembered: dict[Shape, Plan | None] = {}

    def _add(self, index: int, bucket: Bucket) -> None:
        if set(bucket) != set(self.dims.names):
            raise CorruptError(
                f"bucket {bucket_name(bucket)} does not name the dims of the inputs ({', '.join(self.dims.names)})"
            )
        if any(isinstance(size, SizeRange) for size in bucket.values()):
            if any(size.multiple_of < 1 for size in bucket.values() if isinstance(size, SizeRange)):
                raise CorruptError(f"bucket {bucket_name(bucket)} has sizes that are multiples of less than 1")
            self._ranges.append(index)
            return
        sizes = tuple(int(str(bucket[name])) for name in self.dims.names)
        try:
            elements = volume(self._shapes_at(self.dims.named(sizes)))
        except ArithmeticError as error:
            raise CorruptError(f"bucket {bucket_name(bucket)} gives the inputs no shape: {error}") from error
        self._exact.setdefault(sizes, index)
        self._fixed.append((elements, sizes, index))
        self._fixed.sort()

    def _shapes_at(self, dims: Dims) -> list[Shape]:
        return [shape(dims) for shape in self._shapes if shape]

    def is_range(self, index: int) -> bool:
        """Whether the variant's bucket has a range."""
        return index in self._ranges

    def leaf_shapes(self, dims: Dims) -> tuple[Shape | None, ...]:
        """Each leaf's shape at these dims; None for a constant."""
        return tuple(shape(dims) if shape else None for shape in self._shapes)

    def plan(self, sizes: Shape) -> Plan | None:
        """The plan for these sizes of `dims.names`, or None for a miss."""
        try:
            return self._remembered[sizes]
        except KeyError:
            if len(self._remembered) >= REMEMBERED:
                self._remembered.clear()
            plan = self._remembered[sizes] = self._decide(sizes)
            if plan is not None:
                came, bucket = bucket_name({**self.dims.named(sizes)}), self.variants[plan.variant].bucket
                _log.debug("%s: %s runs in %s (%s)", self._model, came, bucket_name(bucket), plan.kind)
            return plan

    def _decide(self, sizes: Shape) -> Plan | None:
        if any(size < 0 for size in sizes):
            return None
        try:
            return self._choose(sizes)
        except ArithmeticError:  # a shape that divides by a dim, at 0
            return None

    def _choose(self, sizes: Shape) -> Plan | None:
        if (index := self._exact.get(sizes)) is not None:
            return self._make_plan(index, "exact", sizes, sizes)
        for _, bucket_sizes, index in self._fixed:
            if not self.pad_obstacles(sizes, bucket_sizes):
                return self._make_plan(index, "padded", sizes, bucket_sizes)
        fitting = {index: run for index in self._ranges if (run := self._run_sizes(index, sizes)) is not None}
        held = [index for index, run in fitting.items() if run == sizes]
        if held:
            return self._make_plan(min(held, key=lambda index: self._range_rank(index, sizes)), "range", sizes, sizes)
        padded = [self._make_plan(index, "padded", sizes, run) for index, run in fitting.items()]
        return min(
            padded,
            key=lambda plan: (plan.run_elements, self._range_rank(plan.variant, fitting[plan.variant])),
            default=None,
        )

    def _range_rank(self, index: int, sizes: Shape) -> tuple[int, int, int]:
        ranges = [(size, self.variants[index].bucket[name]) for name, size in zip(self.dims.names, sizes, strict=True)]
        width = math.prod((r.max - r.min) // r.multiple_of + 1 for _, r in ranges if isinstance(r, SizeRange))
        distance = sum(
            r.tune_at - size if r.tune_at >= size else 2**40 + size - r.tune_at
            for size, r in ranges
            if isinstance(r, SizeRange)
        )
        return width, distance, index

    def _make_plan(self, index: int, kind: str, sizes: Shape, run_sizes: Shape) -> Plan:
        request, run = self.dims.named(sizes), self.dims.named(run_sizes)
        shapes = self.leaf_shapes(request)
        return Plan(
            index,
            kind,
            sizes,
            shapes,
            self._strides(shapes),
            self._pads(request, run) if kind == "padded" else (),
            self._crops(index, request, run) if kind == "padded" else (),
            volume([shape for shape in shapes if shape is not None]),
            volume(self._shapes_at(run)),
        )

    def _strides(self, shapes: Sequence[Shape | None]) -> tuple[tuple[int, Shape], ...]:
        return tuple(
            (index, strides_in(leaf.layout, shape))
            for index, (leaf, shape) in enumerate(zip(self.signature.leaves, shapes, strict=True))
            if isinstance(leaf, TensorLeaf) and shape is not None and 1 in shape
        )

    def _pads(self, request: Dims, run: Dims) -> tuple[Pad, ...]:
        pads = []
        for index, leaf, axis, entry in named_axes(self.signature.leaves):
            expression = parse(entry)
            size, asked = expression.evaluate(run), expression.evaluate(request)
            if size < asked:
                raise CorruptError(f"`{entry}` of {leaf.path} is {asked} for a call and {size} in a larger bucket")
            if size != asked:
                pads.append(Pad(index, axis, size, _rule(leaf, expression, request, run), leaf.layout))
        return tuple(pads)

    def _crops(self, index: int, request: Dims, run: Dims) -> tuple[Crop, ...]:
        crops = []
        for output in self.variants[index].outputs:
            if output.index is None:
                continue
            for axis, text in enumerate(output.dims):
                if text:
                    expression = parse(text)
                    if (size := expression.evaluate(request)) != expression.evaluate(run):
                        crops.append(Crop(output.index, axis, size))
        return tuple(crops)

    def pad_obstacles(self, sizes: Shape, bucket_sizes: Shape) -> list[str]:
        """The dims that keep a request out of a fixed bucket."""
        return [
            name
            for name, size, bucket in zip(self.dims.names, sizes, bucket_sizes, strict=True)
            if size != bucket and (size > bucket or name not in self.paddable)
        ]

    def grown(self, index: int, sizes: Shape) -> Dims:
        """A request's sizes, padded to the bucket's where they may be."""
        variant = self.variants[index]
        dims = self.dims.named(sizes)
        for name in self.paddable.intersection(variant.padded):
            dims[name] = at_least(variant.bucket[name], dims[name]) or dims[name]
        return dims

    def _run_sizes(self, index: int, sizes: Shape) -> Shape | None:
        """The sizes at which a variant whose bucket has a range runs such a request; None where it cannot."""
        bucket, dims = self.variants[index].bucket, self.grown(index, sizes)
        if not all(takes(bucket[name], size) for name, size in dims.items()):
            return None
        return tuple(dims.values()) if all(holds(one, dims) for one in self.conditions[index]) else None


def takes(entry: int | SizeRange, size: int) -> bool:
    return size in entry if isinstance(entry, SizeRange) else size == entry


def at_least(entry: Size, size: int) -> int | None:
    return entry.at_least(size) if isinstance(entry, SizeRange) else entry if entry >= size else None


def holds(condition: Expression, dims: Dims) -> bool:
    try:
        return bool(condition.evaluate(dims))
    except (ArithmeticError, KeyError):
        return False


def _rule(leaf: TensorLeaf, expression: Expression, request: Dims, run: Dims) -> PadRule:
    grown = next(name for name in sorted(expression.names) if request[name] != run[name])
    return leaf.pad[grown]
