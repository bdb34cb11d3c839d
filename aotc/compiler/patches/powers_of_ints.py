"""[AOTInductor] `2 ** x` of an int tensor is of floats.

Expected: ints. Seen: the base reaches `aoti_torch_cpu_pow_Scalar` as a double, and the result is read as ints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.operators import INTEGERS

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0026",
    operators=("aten.pow.Scalar",),
    dtypes=INTEGERS,
    torch=">=2.11,<2.15",
    targets=("torch._inductor.lowering:fallback_pow_scalar",),
)


@contextmanager
def apply() -> Iterator[None]:
    """While active, the base of such a power is passed as a tensor of the exponents' dtype."""
    from torch._inductor import lowering

    def power(base: int, exponents: Any) -> Any:
        form = {"dtype": exponents.get_dtype(), "device": exponents.get_device()}
        return lowering.fallback_pow_tensor_tensor(lowering.full([], base, **form), exponents)

    with replaced(lowering, "fallback_pow_scalar", power):
        yield


def reproduce(patches: Torch) -> None:
    assert_same(patches.library, lambda x: 2**x, torch.tensor([0, 1, 5, 62]))
