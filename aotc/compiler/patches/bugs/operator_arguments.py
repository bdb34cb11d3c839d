"""Arguments of operators that a library calls by name, as torch serialises them beside the library.

Dtypes, layouts and memory formats are numbers. torch 2.11 writes the numbers of torch.export's schema and reads them as
C++'s, which differ: an operator got float64 for float32. Later versions convert them when they read.

Integers are counted when they are read. The library passes those with a default, too, like `index_add`'s factor, but
torch writes only those that the model passes: every call failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_NUMBERS: Mapping[str, Mapping[Any, int]] = {
    "_TORCH_TO_SERIALIZE_DTYPE": {  # c10/core/ScalarType.h
        torch.uint8: 0,
        torch.int8: 1,
        torch.int16: 2,
        torch.int32: 3,
        torch.int64: 4,
        torch.float16: 5,
        torch.float32: 6,
        torch.float64: 7,
        torch.complex32: 8,
        torch.complex64: 9,
        torch.complex128: 10,
        torch.bool: 11,
        torch.bfloat16: 15,
        torch.float8_e5m2: 23,
        torch.float8_e4m3fn: 24,
        torch.float8_e5m2fnuz: 25,
        torch.float8_e4m3fnuz: 26,
        torch.uint16: 27,
        torch.uint32: 28,
        torch.uint64: 29,
    },
    "_TORCH_TO_SERIALIZE_LAYOUT": {  # c10/core/Layout.h
        torch.strided: 0,
        torch.sparse_coo: 1,
        torch.sparse_csr: 2,
        torch.sparse_csc: 4,
        torch.sparse_bsr: 5,
        torch.sparse_bsc: 6,
    },
    "_TORCH_TO_SERIALIZE_MEMORY_FORMAT": {  # c10/core/MemoryFormat.h
        torch.contiguous_format: 0,
        torch.preserve_format: 1,
        torch.channels_last: 2,
        torch.channels_last_3d: 3,
    },
}


@contextmanager
def enums_are_numbers_of_cpp() -> Iterator[None]:
    """While active, dtypes, layouts and memory formats are serialised as C++'s numbers."""
    from torch._export.serde import serialize

    @contextmanager
    def numbered(kernel: Any) -> Iterator[None]:
        with ExitStack() as patches:
            for name, numbers in _NUMBERS.items():
                patches.enter_context(mock.patch.dict(getattr(serialize, name), numbers))
            yield

    with _writing_down(numbered):
        yield


@contextmanager
def defaults_are_written() -> Iterator[None]:
    """While active, integers with a default are serialised like the others."""

    def with_defaults(kernel: Any) -> AbstractContextManager[Any]:
        arguments_of = kernel.unflatten_args

        def all_arguments(*given: Any) -> tuple[Any, dict[str, Any]]:
            args, kwargs = arguments_of(*given)
            names = kernel.ordered_kwargs_for_cpp_kernel
            return args, {**{name: kernel.get_kwargs_value(name, **kwargs) for name in names}, **kwargs}

        return mock.patch.object(kernel, "unflatten_args", all_arguments)

    with _writing_down(with_defaults):
        yield


def _writing_down(changed: Callable[[Any], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """While active, torch serialises a call of an operator inside the context `changed(kernel)`."""
    from torch._inductor import ir

    write: Callable[..., Any] = ir.FallbackKernel.export_extern_kernel_node

    def write_changed(kernel: Any) -> Any:
        with changed(kernel):
            return write(kernel)

    return mock.patch.object(ir.FallbackKernel, "export_extern_kernel_node", write_changed)
