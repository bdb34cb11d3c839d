"""Values of a graph that are views of its arguments, as a record says them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from aotc.expressions import Expression
from aotc.reads.tensors import dtype_name
from aotc.records import Signature, StridedView, TensorLeaf


class SizeTexts:
    """Sizes of a graph as numbers, or as expressions over the manifest's dims."""

    def __init__(self, signature: Signature, leaf_of: Mapping[str, int], nodes: Mapping[str, fx.Node]) -> None:
        """`leaf_of` has the leaf of each placeholder of `nodes`."""
        self._of_symbols: dict[Any, Any] = {}
        sizes: tuple[Any, ...]
        for name, number in leaf_of.items():
            leaf, value = signature.leaves[number], nodes[name].meta.get("val")
            if isinstance(leaf, TensorLeaf) and isinstance(value, Tensor):
                sizes = tuple(value.shape)
                for entry, size in zip(leaf.shape, sizes, strict=True):
                    if isinstance(entry, str) and isinstance(size, torch.SymInt):
                        self._note(entry, size.node.expr)

    def _note(self, entry: str, size: Any) -> None:
        """Solve a size, which is linear in one symbol, for this symbol."""
        from sympy import Symbol  # type: ignore[import-untyped]
        from torch.utils._sympy.functions import FloorDiv

        if len(size.free_symbols) != 1:
            return
        (symbol,) = size.free_symbols
        scale, offset = size.coeff(symbol), size.subs(symbol, 0)
        if scale.is_Integer and offset.is_Integer and size == scale * symbol + offset:
            whole = Symbol(entry if entry.isidentifier() else f"({entry})", integer=True) - offset
            self._of_symbols.setdefault(symbol, whole if scale == 1 else FloorDiv(whole, scale))

    def text(self, size: Any) -> int | str | None:
        """None for a size that the dims do not tell, such as one that depends on values."""
        if isinstance(size, int):
            return size
        from torch.utils._sympy.printers import PythonPrinter

        expression = size.node.expr
        if expression.is_Integer:
            return int(expression)
        if not expression.free_symbols <= self._of_symbols.keys():
            return None
        try:
            return Expression(str(PythonPrinter().doprint(expression.xreplace(self._of_symbols)))).text
        except ValueError:  # a function that a record has not
            return None

    def texts(self, sizes: Sequence[Any]) -> tuple[int | str, ...] | None:
        found = tuple(text for size in sizes if (text := self.text(size)) is not None)
        return found if len(found) == len(sizes) else None


def strided_view(base: Tensor, value: Tensor, texts: SizeTexts) -> StridedView | None:
    """Shape, strides and offset of a view in its base, two fake tensors on one storage. None where a record cannot hold
    them."""
    if any(each.layout is not torch.strided for each in (base, value)) or base.is_conj() or base.is_neg():
        return None
    first, own = (each.storage_offset() * each.element_size() for each in (base, value))
    offset = own - first
    if value.element_size() > 1:
        offset = offset // value.element_size()
    shape, stride, start = texts.texts(value.shape), texts.texts(value.stride()), texts.text(offset)
    if shape is None or stride is None or start is None or (isinstance(start, int) and start < 0):
        return None
    return StridedView(
        shape,
        stride,
        start,
        "" if value.dtype == base.dtype else dtype_name(value.dtype),
        conjugate=value.is_conj(),
        negative=value.is_neg(),
    )
