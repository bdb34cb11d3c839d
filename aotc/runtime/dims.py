"""Reading a call's dims off its shapes, and giving back the shapes that dims imply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from aotc.errors import CorruptError, Issue
from aotc.expressions import Expression, linear_form
from aotc.records import Dims, Leaf, TensorLeaf

Shape = tuple[int, ...]


def shape_of(leaf: TensorLeaf) -> Callable[[Mapping[str, int]], Shape]:
    """A function from dims to the leaf's shape. Raises CorruptError for a record whose expressions cannot be read."""
    entries: list[int | Expression] = [entry if isinstance(entry, int) else parse(entry) for entry in leaf.shape]
    return lambda dims: tuple(entry if isinstance(entry, int) else entry.evaluate(dims) for entry in entries)


def parse(text: str) -> Expression:
    """An expression of a record. Raises CorruptError where it is none."""
    try:
        return Expression(text)
    except ValueError as error:
        raise CorruptError(f"the record holds an expression that cannot be read: {error}") from error


def named_axes(leaves: Sequence[Leaf]) -> Iterator[tuple[int, TensorLeaf, int, str]]:
    """Every axis whose size is a dim or an expression: the leaf's index, the leaf, the axis, and that text."""
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, TensorLeaf):
            yield from ((index, leaf, axis, entry) for axis, entry in enumerate(leaf.shape) if isinstance(entry, str))


class DimReader:
    """Where each dim is read: an axis whose size is the dim itself, or else one whose size is linear in it."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.leaves = leaves
        self.sources: dict[str, tuple[int, int, int, int]] = {}
        derived: list[tuple[str, tuple[int, int, int, int]]] = []
        for index, _, axis, entry in named_axes(leaves):
            expression = parse(entry)
            if entry in expression.names:
                self.sources.setdefault(entry, (index, axis, 1, 0))
            elif linear := linear_form(expression):
                name, scale, offset = linear
                derived.append((name, (index, axis, scale, offset)))
        for name, source in derived:
            self.sources.setdefault(name, source)
        self.names = tuple(sorted(self.sources))
        self.plain = [self.sources[name][:2] for name in self.names]
        self.all_plain = all(self.sources[name][2:] == (1, 0) for name in self.names)

    def read(self, leaves: Sequence[Any]) -> Shape:
        """The sizes of `names` in a call; -1 for a derived dim that no whole size explains.

        Raises AttributeError or IndexError where a leaf is no tensor of the expected rank.
        """
        if self.all_plain:
            return tuple([leaves[index].size(axis) for index, axis in self.plain])
        sizes = []
        for name in self.names:
            index, axis, scale, offset = self.sources[name]
            size, rest = divmod(leaves[index].shape[axis] - offset, scale)
            sizes.append(-1 if rest else size)
        return tuple(sizes)

    def unexplained(self, sizes: Shape, leaves: Sequence[Any]) -> list[Issue]:
        """The axes whose size no size of their dim gives, like 7 for `2*seq`."""
        found = []
        for name, size in zip(self.names, sizes, strict=True):
            if size < 0:
                index, axis, *_ = self.sources[name]
                leaf, came = self.leaves[index], leaves[index].shape[axis]
                assert isinstance(leaf, TensorLeaf)
                entry = leaf.shape[axis]
                where = f"{leaf.path}.shape[{axis}]"
                found.append(Issue(f"no `{name}` makes {entry} {came}", where, expected=str(entry), actual=str(came)))
        return found

    def named(self, sizes: Shape) -> Dims:
        return dict(zip(self.names, sizes, strict=True))
