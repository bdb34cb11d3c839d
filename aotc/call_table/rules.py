"""Choosing the variant for a request that no bucket equals.

1. The cheapest padded bucket: among the fixed buckets that are at least as large in every dim, equal in each dim that
   some input using it cannot be padded in, the one with the fewest input elements; ties go to the bucket whose sizes
   come first in order.
2. Else the tightest range: among the ranges that hold every size, the one with the fewest sizes (product over dims);
   ties go to the one tuned nearest above the request, then to the first in the artifact.
3. Else the cheapest padded range: among the buckets with a range that hold the request once it is padded to the next
   size in each dim in which it may be, the one that then has the fewest input elements; ties go as among ranges.
4. Else a miss.
"""

from __future__ import annotations

from aotc.call_table.dispatch import Crop, Dispatcher, Pad, Plan, Shape, named_axes
from aotc.errors import CorruptError
from aotc.expressions import Expression, paddable_dims, parse, tightness
from aotc.records import Dims, PadRule, Size, SizeRange, TensorLeaf, bucket_name, takes


class Rules:
    """The rules of one artifact. Raises CorruptError for conditions and ranges that cannot be read."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._signature, self._variants, self._dims = dispatcher.signature, dispatcher.variants, dispatcher.dims
        self._ranges, self._elements, self._make_plan = dispatcher.ranges, dispatcher.elements, dispatcher.make_plan
        self.paddable = paddable_dims(self._signature)
        self.conditions = [tuple(map(parse, variant.conditions)) for variant in self._variants]
        self._fixed = sorted((self._elements(sizes), sizes, index) for sizes, index in dispatcher.exact.items())
        for variant in self._variants:
            if any(isinstance(size, SizeRange) and size.multiple_of < 1 for size in variant.bucket.values()):
                raise CorruptError(f"bucket {bucket_name(variant.bucket)} has sizes that are multiples of less than 1")

    def choose(self, sizes: Shape) -> Plan | None:
        for _, bucket_sizes, index in self._fixed:
            if not self.pad_obstacles(sizes, bucket_sizes):
                return self._padded_plan(index, sizes, bucket_sizes)
        fitting = {index: run for index in self._ranges if (run := self._run_sizes(index, sizes)) is not None}
        held = [index for index, run in fitting.items() if run == sizes]
        if held:
            return self._make_plan(min(held, key=lambda index: self._range_rank(index, sizes)), "range", sizes)
        padded = [self._padded_plan(index, sizes, run) for index, run in fitting.items()]
        return min(
            padded,
            key=lambda plan: (plan.run_elements, self._range_rank(plan.variant, fitting[plan.variant])),
            default=None,
        )

    def _range_rank(self, index: int, sizes: Shape) -> tuple[int, int, int]:
        bucket = self._variants[index].bucket
        return *tightness([bucket[name] for name in self._dims.names], sizes), index

    def _padded_plan(self, index: int, sizes: Shape, run_sizes: Shape) -> Plan:
        request, run = self._dims.named(sizes), self._dims.named(run_sizes)
        pads, crops = self._pads(request, run), self._crops(index, request, run)
        return self._make_plan(index, "padded", sizes, pads, crops, self._elements(run_sizes))

    def _pads(self, request: Dims, run: Dims) -> tuple[Pad, ...]:
        pads = []
        for index, leaf, axis, entry in named_axes(self._signature.leaves):
            expression = parse(entry)
            size, asked = expression.evaluate(run), expression.evaluate(request)
            if size < asked:
                raise CorruptError(f"`{entry}` of {leaf.path} is {asked} for a call and {size} in a larger bucket")
            if size != asked:
                pads.append(Pad(index, axis, size, _rule(leaf, expression, request, run), leaf.layout))
        return tuple(pads)

    def _crops(self, index: int, request: Dims, run: Dims) -> tuple[Crop, ...]:
        crops = []
        for output in self._variants[index].outputs:
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
            for name, size, bucket in zip(self._dims.names, sizes, bucket_sizes, strict=True)
            if size != bucket and (size > bucket or name not in self.paddable)
        ]

    def grown(self, index: int, sizes: Shape) -> Dims:
        """A request's sizes, padded to the bucket's where they may be."""
        variant = self._variants[index]
        dims = self._dims.named(sizes)
        for name in self.paddable.intersection(variant.padded):
            dims[name] = at_least(variant.bucket[name], dims[name]) or dims[name]
        return dims

    def _run_sizes(self, index: int, sizes: Shape) -> Shape | None:
        """The sizes at which a variant whose bucket has a range runs such a request; None where it cannot."""
        bucket, dims = self._variants[index].bucket, self.grown(index, sizes)
        if not all(takes(bucket[name], size) for name, size in dims.items()):
            return None
        return tuple(dims.values()) if all(holds(one, dims) for one in self.conditions[index]) else None


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
