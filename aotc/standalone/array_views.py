"""What a call takes and gives: whatever has a buffer or speaks DLPack, without a copy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from aotc.errors import Issue
from aotc.standalone.cpu_environment import open_cpu

Give = Callable[[Any], Any]


class NoTensor(Exception):
    """An argument has no values in the CPU's memory that could be read; `issue` says why."""

    def __init__(self, issue: Issue) -> None:
        super().__init__(issue.message)
        self.issue = issue


def tensor_of(value: Any, path: str, shown: Callable[[Any], str], gpu: int | None = None) -> Any:
    """A `Tensor` of `aotc.core._cpu` over the memory of `value`, which it holds: of the CPU, or of that `gpu`, too.
    Raises NoTensor."""
    try:
        tensor = open_cpu().view(value, *([] if gpu is None else [gpu]))
    except Exception as error:  # libraries raise what they like where an array cannot be exported
        hint = "pass an array with plain values in the CPU's memory"
        raise NoTensor(Issue(f"{shown(value)} cannot be read: {error}", where=path, hint=hint)) from error
    if tensor is None:
        hint = "pass an array: one of numpy, or whatever has a buffer or `__dlpack__`"
        raise NoTensor(Issue(f"a tensor is expected, {shown(value)} came", where=path, hint=hint))
    return tensor


def lies_on_gpu(value: Any) -> bool:
    kind, _ = value.__dlpack_device__() if hasattr(value, "__dlpack_device__") else (0, 0)
    return bool(kind == _ON_GPU)


_ON_GPU = 2
"""kDLCUDA, of DLPack."""


def giving_copies(give: Give) -> Give:
    """As `give`, of a copy in the CPU's memory where the `Tensor` lies on a GPU."""
    return lambda tensor: give(*open_cpu().to_host([tensor]))


def giving_like(value: Any) -> Give:
    """A function from a `Tensor` to an array of the library that made `value`, over the same memory.

    Of what has no library of its own (bytes, memoryview, array.array), a memoryview; where a library has no such dtype,
    as numpy has no bfloat16, the `Tensor` itself, which speaks DLPack.
    """
    kind = type(value).__module__.partition(".")[0]
    if kind == "numpy":
        return _as_numpy
    if kind in ("torch", "cupy"):
        return sys.modules[kind].from_dlpack  # type: ignore[no-any-return]
    if hasattr(value, "__array_namespace__"):
        return value.__array_namespace__().from_dlpack  # type: ignore[no-any-return]
    if isinstance(value, bytes | bytearray | memoryview) or kind == "array":
        return _as_memoryview
    return _as_it_is


def _as_it_is(tensor: Any) -> Any:
    return tensor


def _as_memoryview(tensor: Any) -> Any:
    try:
        return memoryview(tensor)
    except BufferError:
        return tensor


def _as_numpy(tensor: Any) -> Any:
    try:
        return sys.modules["numpy"].asarray(memoryview(tensor))
    except BufferError:
        return tensor
