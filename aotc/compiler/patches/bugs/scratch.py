"""Scratch memory for all programs of a kernel that creates its tensor maps itself.

A kernel that calls `tl.make_tensor_descriptor` writes the tensor maps of each program to scratch memory of that
program. Libraries of torch 2.11 allocate scratch memory for a single program, whatever the grid: the others write
beyond its end, over other small tensors. torch 2.13 allocates it for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aotc.compiler.patches.shared.rewriting import rewritten

_OF_ONE_PROGRAM = re.compile(r"(scratch_\d+_size\[\] = \{)(\d+)(\};)")
_OF_ALL = r"\1static_cast<int64_t>(\2) * grid_0 * grid_1 * grid_2\3"


@contextmanager
def scratch_for_every_program() -> Iterator[None]:
    """While active, generated launchers allocate scratch memory for the whole grid."""
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    allocation: Any = CUDADeviceOpOverrides.cpp_scratch

    def for_every_program(self: Any, idx: int, workspace: Any, *args: Any, **kwargs: Any) -> Any:
        lines, name = allocation(self, idx, workspace, *args, **kwargs)
        if not workspace.size:
            return lines, name
        return rewritten("scratch_of_one_program", _OF_ONE_PROGRAM, _OF_ALL, "\n".join(lines)).split("\n"), name

    with mock.patch.object(CUDADeviceOpOverrides, "cpp_scratch", for_every_program):
        yield
