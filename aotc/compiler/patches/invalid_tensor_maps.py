"""[inductor] Persistent TMA templates are offered for matrices of which they make invalid tensor maps.

Expected: not offered for a matrix of one row, a slice of columns, or one that does not begin at a multiple of 16 bytes.
Seen: an illegal memory access, or a candidate that fails: the templates use the wrong axis for a matrix of one row or a
slice of columns, and do not check where a slice begins (torch 2.11, 2.13). On Hopper, with
`triton.enable_persistent_tma_matmul`.

    a, b = torch.randn(256, 65, device="cuda"), torch.randn(64, 64, device="cuda")
    torch.compile(lambda a, b: a[:, 1:] @ b, mode="max-autotune")(a, b)
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.shared.inductor import tma_templates_require
from aotc.compiler.patches.shared.operators import PRODUCTS

PATCH = Patch(
    __name__,
    severity="crash",
    advisory="AOTC-2026-0016",
    operators=PRODUCTS,
    device="cuda",
    targets=("torch._inductor.choices:InductorChoices.get_template_configs(kernel_inputs, templates, op_name)",),
)

MAP_ALIGNMENT = 16
"""Bytes: a tensor map's address and its outer stride must be multiples of this (CUDA's driver API, "Tensor Map Object
Management")."""


def apply() -> AbstractContextManager[None]:
    """While active, these templates are left out of races for matrices for which they would create invalid tensor maps.

    Inductor checks whether a valid map exists, at the example's sizes.
    """
    return tma_templates_require(lambda *matrices: all(map(_has_tensor_map, matrices)))


def _has_tensor_map(matrix: Any) -> bool:
    """Whether the tensor map that a template creates for a matrix is valid, at every size of a range."""
    from torch._inductor.virtualized import V

    layout, numbers = matrix.get_layout(), V.graph.sizevars
    outer, inner = reversed(layout.stride) if layout.is_transposed() else layout.stride
    aligned = MAP_ALIGNMENT // layout.dtype.itemsize
    return bool(
        numbers.statically_known_equals(inner, 1)
        and numbers.statically_known_multiple_of(outer, aligned)
        and numbers.statically_known_multiple_of(layout.offset, aligned)
    )
