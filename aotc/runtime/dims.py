"""Reading a call's dims off its shapes, and giving back the shapes that dims imply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotc.errors import CorruptError
from aotc.expressions import Expression
from aotc.records import Dims, Leaf, TensorLeaf

Shape = tuple[int, ...]


def shape_of(leaf: TensorLeaf) -> Callable[[Mapping[str, int]], Shape]:
    """A function from dims to the leaf's shape. Raises CorruptError for a record whose expressions cannot be read."""
    entries: list[int | Expression] = [entry if isinstance(entry, int) else parse(entry) for entry in leaf.shape]
    return lambda dims: tuple(entry if isinstance(entry, int) else entry.evaluate(dims) for entry in entries)


def parse(text: str) -> Expression:
    try:
        return Expression(text)
    except ValueError as error:
        raise CorruptError(f"the record holds an expression that cannot be read: {error}") from error


class DimReader:
    """Where each dim is read: an axis whose size is the dim itself, or else one whose size is linear in it."""

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self.sources: dict[str, tuple[int, int, int, int]] = {}
        derived: list[tuple[str, tuple[int, int, int, int]]] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, TensorLeaf):
                continue
            for axis, entry in enumerate(leaf.shape):
                if isinstance(entry, int):
                    continue
                expression = parse(entry)
                if entry in expression.names:
                    self.sources.setdefault(entry, (index, axis, 1, 0))
                elif linear := _linear(expression):
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
            return tuple([leaves[index].shape[axis] for index, axis in self.plain])
        sizes = []
        for name in self.names:
            index, axis, scale, offset = self.sources[name]
            size, rest = divmod(leaves[index].shape[axis] - offset, scale)
            sizes.append(-1 if rest else size)
        return tuple(sizes)

    def named(self, sizes: Shape) -> Dims:
        return dict(zip(self.names, sizes, strict=True))


def _linear(expression: Expression) -> tuple[str, int, int] | None:
    """(name, scale, offset) of an expression `scale*name + offset` over one dim, or None."""
    if len(expression.names) != 1:
        return None
    name = next(iter(expression.names))
    try:
        values = [expression.evaluate({name: size}) for size in (0, 1, 2, 7)]
    except (ArithmeticError, KeyError):
        return None
    scale, offset = values[1] - values[0], values[0]
    if scale <= 0 or values[2:] != [2 * scale + offset, 7 * scale + offset]:
        return None
    return name, scale, offset
