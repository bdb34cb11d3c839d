"""Generated code: its text rewritten, and the errors that C++ kernels find in their loops, in a local variable of the
kernel (`noted_errors`)."""

from __future__ import annotations

import re
from typing import Any

import torch

from aotc.compiler.patches.machinery.reproducing import Torch, assert_raises, leaves
from aotc.errors import BuildError

NOTED = "aotc_error"
"""The local variable in which a kernel's loops record an error."""


def mask_of(kernel: Any) -> str:
    """A C++ expression: the mask of the current elements that count. A scalar bool, or a vector's mask."""
    return "true" if kernel._load_mask is None else str(kernel._load_mask)


def any_of_mask(kernel: Any) -> str:
    """A C++ expression: whether any current element counts. A scalar bool."""
    mask = kernel._load_mask
    return f"!({mask}).all_zero()" if getattr(mask, "is_vec", False) else mask_of(kernel)


def count_of(kernel: Any) -> str:
    """A C++ expression: the number of current elements of a vector."""
    from torch._inductor.codegen import cpp_utils

    expression: Any = cpp_utils.cexpr_index
    return str(expression(kernel.num_elems))


def reproduce_index_error(patches: Torch) -> None:
    table, index = torch.randn(100), torch.arange(100_000) % 100
    compiled = patches.compiled(lambda table, index: table[index] * 2, table, index)
    torch.testing.assert_close(leaves(compiled(table, index))[0], table[index] * 2)
    index[77_777] = 100
    assert_raises(lambda: compiled(table, index))


def rewritten(patch: str, pattern: re.Pattern[str] | str, by: str, text: str) -> str:
    """The text with the match of a pattern, or of a string, replaced.

    Raises BuildError unless there is one match: else torch generates other code than the patch was written for.
    """
    if isinstance(pattern, str):
        found, changed = text.count(pattern), text.replace(pattern, by)
    else:
        changed, found = pattern.subn(by, text)
    check_count(patch, found, 1)
    return changed


def check_count(patch: str, found: int, expected: int) -> None:
    """Raises BuildError if the number of rewritten places is not the expected one."""
    if found != expected:
        raise BuildError(
            f"the patch `{patch}` of torch expects to rewrite generated code in {expected} places, and finds {found}",
            hint="this torch generates other code than the patch was written for; use a tested version",
            stage="compile",
        )
