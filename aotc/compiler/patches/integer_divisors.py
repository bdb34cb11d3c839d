"""[inductor] An integer division by 0, or of the smallest integer by -1, ends the process.

Expected: an error of the call, and the smallest integer, which wraps. Seen: the processor kills the process for both.
torch 2.13's kernels check divisors of rounded quotients and remainders, but not of truncated ones, and record errors in
one variable for all threads; those of 2.11 and 2.12 check none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced
from aotc.compiler.patches.machinery.reproducing import Torch, assert_raises
from aotc.compiler.patches.shared.generated_code import NOTED, any_of_mask, count_of, mask_of
from aotc.compiler.patches.shared.operators import DIVISIONS, INTEGERS

PATCH = Patch(
    __name__,
    severity="crash",
    advisory="AOTC-2026-0015",
    operators=(*DIVISIONS, "aten.fmod"),
    dtypes=INTEGERS,
    upstream="pytorch#143649",
    targets=("torch._inductor.codegen.common:CSEProxy._default(name, args, kwargs)",),
)

_DIVISIONS = {"floordiv", "truncdiv", "mod", "remainder"}


@contextmanager
def apply() -> Iterator[None]:
    """While active, generated C++ kernels check integer divisors before they divide."""
    from torch._inductor.codegen.common import CSEProxy
    from torch._inductor.codegen.cpp import CppKernel

    default: Any = CSEProxy._default

    def checked(self: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in _DIVISIONS and isinstance(self.kernel, CppKernel) and not kwargs:
            args = _checked(self.kernel, *args)
        return default(self, name, args, kwargs)

    with replaced(CSEProxy, "_default", checked):
        yield


def _checked(kernel: Any, dividend: Any, divisor: Any) -> tuple[Any, Any]:
    from torch._inductor.codegen import cpp_utils

    promote: Any = cpp_utils.promote_args
    if dividend.dtype.is_floating_point or divisor.dtype.is_floating_point or not _needs_check(divisor):
        return dividend, divisor
    if dividend.is_vec or divisor.is_vec:
        dividend, divisor = (
            value if value.is_vec else kernel.broadcast(value) for value in promote([dividend, divisor])
        )
        call = f"checked_divisors({dividend}, {divisor}, {count_of(kernel)}, {mask_of(kernel)}, {NOTED})"
    else:
        call = f"checked_divisor({dividend}, {divisor}, {any_of_mask(kernel)}, {NOTED})"
    checked = kernel.cse.generate(kernel.compute, f"aotc::{call}", dtype=divisor.dtype, shape=divisor.shape)
    checked.update_on_args("checked_divisor", (dividend, divisor), {})
    checked.aotc_divides = True
    return dividend, checked


def _needs_check(divisor: Any) -> bool:
    """Whether a divisor needs a check: it is not a constant other than 0 and -1, and not checked before. Bounds of
    other values are not used, since they ignore overflows."""
    bounds = divisor.bounds
    constant = bounds.lower == bounds.upper and bounds.lower not in (0, -1)
    return not constant and not hasattr(divisor, "aotc_divides")


def reproduce(patches: Torch) -> None:
    x, y = torch.arange(100_000), torch.ones(100_000, dtype=torch.int64)
    compiled = patches.compiled(lambda x, y: torch.div(x, y, rounding_mode="trunc") * 2, x, y)
    y[77_777] = 0
    assert_raises(lambda: compiled(x, y))
