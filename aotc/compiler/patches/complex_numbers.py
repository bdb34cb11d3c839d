"""[AOTInductor] Numbers beside complex tensors do not build.

Expected: `z / 2`, `z != 1j`, `torch.full((3,), 1j)`. Seen: a library calls torch's operators for complex tensors by
name; the serializer of extern calls has no complex numbers, and takes a number where the schema has a tensor for an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import decomposed

PATCH = Patch(
    __name__,
    severity="build",
    targets=(
        "aten.full.default(size, fill_value)",
        "aten.scalar_tensor.default(s)",
        "aten.div.Tensor(self, other)",
        "aten.eq.Scalar(self, other)",
        "aten.ne.Scalar(self, other)",
        "aten.sub.Tensor(self, other)",
    ),
)


def apply() -> AbstractContextManager[None]:
    """While active, numbers beside complex tensors are compiled as tensors, and differences as sums, which Inductor
    computes itself: `x - y` is `x + -1 * y`, to the last bit.
    """
    aten = torch.ops.aten
    return decomposed(
        {
            aten.full.default: _full,
            aten.scalar_tensor.default: partial(_full, ()),
            aten.div.Tensor: _of_tensors(torch.div),
            aten.eq.Scalar: _of_tensors(torch.eq),
            aten.ne.Scalar: _of_tensors(torch.ne),
            aten.sub.Tensor: _difference,
        }
    )


def _full(size: Any, value: Any, *, dtype: torch.dtype | None = None, **more: Any) -> Any:
    if not (isinstance(value, complex) if dtype is None else dtype.is_complex):
        return NotImplemented
    dtype = dtype or torch.get_default_dtype().to_complex()
    number, full = complex(value), partial(torch.full, size, dtype=dtype.to_real(), device=more.get("device"))
    return torch.complex(full(number.real), full(number.imag))


def _of_tensors(operator: Callable[..., Any]) -> Callable[..., Any]:
    def compute(x: Any, y: Any) -> Any:
        tensors = [value for value in (x, y) if isinstance(value, Tensor)]
        if len(tensors) == 2 or not any(map(_is_complex, (x, y))):
            return NotImplemented
        number: Any = partial(torch.full, (), dtype=torch.result_type(x, y), device=tensors[0].device)
        return operator(*(value if isinstance(value, Tensor) else number(value) for value in (x, y)))

    return compute


def _difference(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    return torch.add(x, y, alpha=-alpha) if any(map(_is_complex, (x, y))) else NotImplemented


def _is_complex(value: Any) -> bool:
    return value.is_complex() if isinstance(value, Tensor) else isinstance(value, complex)


def reproduce(patches: Torch) -> None:
    z = torch.complex(torch.randn(3), torch.randn(3))
    assert_same(patches.library, lambda z: [z / 2, z != 1j, z - z.conj().resolve_conj()], z)
