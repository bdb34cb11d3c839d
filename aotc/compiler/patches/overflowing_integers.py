"""[inductor][cpu] Code of C++ assumes that integers do not overflow.

Expected: `-x > -y` and `(-x).argmax()` are eager's, where the smallest int32 is its own negative. Seen: `x < y`, and
another index. The negative, the sum, the difference and the product of scalars are of signed integers, of which the C++
compiler assumes that they do not overflow. Sums, differences and products are mended in torch 2.14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0046",
    operators=("aten.neg", "aten.add", "aten.sub", "aten.rsub", "aten.mul"),
    dtypes=("int32", "int64"),
    device="cpu",
    targets=(
        "torch._inductor.codegen.cpp:CppOverrides.neg(x)",
        "torch._inductor.codegen.cpp:CppOverrides.add(a, b)",
        "torch._inductor.codegen.cpp:CppOverrides.sub(a, b)",
        "torch._inductor.codegen.cpp:CppOverrides.mul(a, b)",
    ),
)

_TYPES = {torch.int32: "int32_t", torch.int64: "int64_t"}


@contextmanager
def apply() -> Iterator[None]:
    """While active, scalars of 32 and 64 bits are computed as unsigned integers, which wrap around as eager's do."""
    from torch._inductor.codegen.cpp import CppOverrides

    negative: Any = CppOverrides.neg

    def neg(x: Any) -> str:
        kind = _TYPES.get(getattr(x, "dtype", None))  # type: ignore[arg-type]
        return f"{kind}(-static_cast<u{kind}>({x}))" if kind else str(negative(x))

    with ExitStack() as stack:
        stack.enter_context(replaced(CppOverrides, "neg", neg))
        for name, symbol in ("add", "+"), ("sub", "-"), ("mul", "*"):
            stack.enter_context(replaced(CppOverrides, name, _wrapping(getattr(CppOverrides, name), symbol)))
        yield


def _wrapping(compute: Callable[[Any, Any], Any], symbol: str) -> Callable[[Any, Any], str]:
    def operation(a: Any, b: Any) -> str:
        text = str(compute(a, b))
        for kind in _TYPES.values():
            if text == f"{kind}({a} {symbol} {b})":
                return f"{kind}(static_cast<u{kind}>({a}) {symbol} static_cast<u{kind}>({b}))"
        return text

    return operation


def reproduce(patches: Torch) -> None:
    def function(x: Tensor, y: Tensor, short: Tensor) -> Tensor:
        return (-x > -y) & (short > 0)  # a loop with int16 is not of vectors

    smallest = torch.iinfo(torch.int32).min
    x = torch.tensor([1, smallest, 2], dtype=torch.int32)
    assert_same(patches.compiled, function, x, x.flip(0) + 3, torch.ones(3, dtype=torch.int16))
