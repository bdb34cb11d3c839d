"""Choosing the variant for a request, by a rule that is the same every time.

1. The bucket whose every size equals the request's.
2. Else, where the artifact has ranges or padded inputs, what `aotc.call_table.rules` chooses.
3. Else a miss.

The answer for one set of sizes is computed once and remembered, so a call costs one lookup whatever the number of
buckets.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from aotc.errors import CorruptError
from aotc.records import Dims, Leaf, PadRule, Signature, TensorLeaf, Variant, bucket_name, has_range
from aotc.tensors.strides import strides_in

if TYPE_CHECKING:
    from aotc.call_table.rules import Rules

_log = logging.getLogger("aotc")

REMEMBERED = 16384
"""Sets of sizes whose answers are kept; past that the memory starts anew."""

Shape = tuple[int, ...]


class Pad(NamedTuple):
    """Grow axis `axis` of a leaf from the request's size to `size`, by `rule`; the result lies in `layout`."""

    leaf: int
    axis: int
    size: int
    rule: PadRule
    layout: str = "contiguous"


class Crop(NamedTuple):
    """Cut axis `axis` of an output back to `size`."""

    output: int
    axis: int
    size: int


class Plan(NamedTuple):
    """How calls of one set of sizes run: `shapes` holds each leaf's required shape (None for a constant), `strides` the
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
        self.dims = DimReader(signature.leaves)
        self._model = model
        self._shapes = [shape_of(leaf) if isinstance(leaf, TensorLeaf) else None for leaf in signature.leaves]
        self.exact: dict[Shape, int] = {}
        """The variant of each fixed bucket by its sizes."""
        self.ranges: list[int] = []
        """The variants whose buckets have a range."""
        for index, variant in enumerate(variants):
            self._add(index, variant)
        self._has_rules = bool(self.ranges) or any(getattr(leaf, "pad", None) for leaf in signature.leaves)
        if self._has_rules:
            self.rules  # noqa: B018  a record whose rules cannot be read is refused at the load
        self._remembered: dict[Shape, Plan | None] = {}

    def _add(self, index: int, variant: Variant) -> None:
        bucket = variant.bucket
        if set(bucket) != set(self.dims.names):
            raise CorruptError(
                f"bucket {bucket_name(bucket)} does not name the dims of the inputs ({', '.join(self.dims.names)})"
            )
        if has_range(bucket):
            self.ranges.append(index)
            return
        sizes = tuple(int(str(bucket[name])) for name in self.dims.names)
        try:
            self.elements(sizes)
        except ArithmeticError as error:
            raise CorruptError(f"bucket {bucket_name(bucket)} gives the inputs no shape: {error}") from error
        self.exact.setdefault(sizes, index)

    @functools.cached_property
    def rules(self) -> Rules:
        """The rest of the rule. Raises CorruptError."""
        from aotc.call_table.rules import Rules

        return Rules(self)

    def is_range(self, index: int) -> bool:
        """Whether the variant's bucket has a range."""
        return index in self.ranges

    def leaf_shapes(self, dims: Dims) -> tuple[Shape | None, ...]:
        """Each leaf's shape at these dims; None for a constant."""
        return tuple(shape(dims) if shape else None for shape in self._shapes)

    def elements(self, sizes: Shape) -> int:
        """Input elements in all: what padding is measured in."""
        return _elements(self.leaf_shapes(self.dims.named(sizes)))

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
            if (index := self.exact.get(sizes)) is not None:
                return self.make_plan(index, "exact", sizes)
            return self.rules.choose(sizes) if self._has_rules else None
        except ArithmeticError:  # a shape that divides by a dim, at 0
            return None

    def make_plan(
        self,
        index: int,
        kind: str,
        sizes: Shape,
        pads: tuple[Pad, ...] = (),
        crops: tuple[Crop, ...] = (),
        run: int = 0,
    ) -> Plan:
        """`run` are the elements that run, where those of `sizes` are padded."""
        shapes = self.leaf_shapes(self.dims.named(sizes))
        strides = tuple(
            (position, strides_in(leaf.layout, shape))
            for position, (leaf, shape) in enumerate(zip(self.signature.leaves, shapes, strict=True))
            if isinstance(leaf, TensorLeaf) and shape is not None and 1 in shape
        )
        elements = _elements(shapes)
        return Plan(index, kind, sizes, shapes, strides, pads, crops, elements, run if pads else elements)


def _elements(shapes: Sequence[Shape | None]) -> int:
    return sum(math.prod(shape) for shape in shapes if shape is not None)


def shape_of(leaf: TensorLeaf) -> Callable[[Mapping[str, int]], Shape]:
    """A function from dims to the leaf's shape. Raises CorruptError for a record whose expressions cannot be read."""
    if all(isinstance(entry, int) or is_name(entry) for entry in leaf.shape):
        return lambda dims: tuple([entry if isinstance(entry, int) else dims[entry] for entry in leaf.shape])
    from aotc.expressions import parse

    entries = [entry if isinstance(entry, int) else parse(entry).evaluate for entry in leaf.shape]
    return lambda dims: tuple([entry if isinstance(entry, int) else entry(dims) for entry in entries])


def is_name(entry: str) -> bool:
    """Whether a size is a dim, and not an expression over dims."""
    return entry.isascii() and entry.isidentifier()


def named_axes(leaves: Sequence[Leaf]) -> Iterator[tuple[int, TensorLeaf, int, str]]:
    """Every axis whose size is a dim or an expression: the leaf's index, the leaf, the axis, and that text."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, TensorLeaf):
            yield from ((index, leaf, axis, entry) for axis, entry in enumerate(leaf.shape) if isinstance(entry, str))


class DimReader:
    """Where each dim is read: an axis whose size is the dim itself, or else one whose size is linear in it.

    sources: of each dim the leaf's index, the axis, and scale and offset of the axis's size in the dim.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.sources: dict[str, tuple[int, int, int, int]] = {}
        derived: list[tuple[str, tuple[int, int, int, int]]] = []
        for index, _, axis, entry in named_axes(leaves):
            if is_name(entry):
                self.sources.setdefault(entry, (index, axis, 1, 0))
                continue
            from aotc.expressions import linear_form, parse

            if linear := linear_form(parse(entry)):
                name, scale, offset = linear
                derived.append((name, (index, axis, scale, offset)))
        for name, source in derived:
            self.sources.setdefault(name, source)
        self.names = tuple(sorted(self.sources))
        self._plain = [self.sources[name][:2] for name in self.names]
        self._all_plain = all(self.sources[name][2:] == (1, 0) for name in self.names)

    def read(self, leaves: Sequence[Any]) -> Shape:
        """The sizes of `names` in a call; -1 for a derived dim that no whole size explains.

        Raises AttributeError or IndexError where a leaf is not a tensor of the expected rank.
        """
        if self._all_plain:
            return tuple([leaves[index].size(axis) for index, axis in self._plain])
        sizes = []
        for name in self.names:
            index, axis, scale, offset = self.sources[name]
            size, rest = divmod(leaves[index].shape[axis] - offset, scale)
            sizes.append(-1 if rest else size)
        return tuple(sizes)

    def named(self, sizes: Shape) -> Dims:
        return dict(zip(self.names, sizes, strict=True))
