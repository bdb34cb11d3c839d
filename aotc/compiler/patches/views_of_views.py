"""[inductor] `as_strided` of a view begins where the view's base does.

Expected: `x[1:].as_strided((3, 2), (5, 1))` begins where `x[1:]` does. Seen, in torch 2.11: it begins where `x` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced_entries
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0037",
    operators=("aten.as_strided",),
    upstream="pytorch#175325",
    torch=">=2.11,<2.13",
    targets=("torch._inductor.lowering:lowerings[aten.as_strided.default]",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, the result of `as_strided` begins where its input does, unless an offset is given."""
    from torch._inductor import ir, lowering

    table: dict[Any, Callable[..., Any]] = lowering.lowerings
    operator = torch.ops.aten.as_strided.default
    lower = table[operator]

    def as_strided(given: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if storage_offset is None and isinstance(given.data, ir.BaseView):
            layout = given.maybe_get_layout()
            storage_offset = layout.offset if layout is not None else None
        return lower(given, size, stride, storage_offset)

    with replaced_entries(table, {operator: as_strided}):
        yield


def reproduce(patches: Torch) -> None:
    assert_same(patches.compiled, lambda x: x[1:].as_strided((3, 2), (5, 1)) + 1, torch.randn(8, 5))
