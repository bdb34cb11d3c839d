"""What a library gives to the operators that it calls by name, as torch writes it down beside the library.

Dtypes, layouts and memory formats are numbers. torch 2.11 writes those of torch.export's schema and reads them as
C++'s, which are others: for float32 an operator was given float64. Later versions convert them as they read.

Integers are counted when they are read. Those that have a default, as `index_add`'s factor, the library gives, and
torch writes down only what the model gives: every call failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_CONVERTS = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/generated_enum_converters.h"
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
def operator_arguments_as_read() -> Iterator[None]:
    """Within, the arguments of operators are written down as torch reads them."""
    from torch._export.serde import serialize
    from torch._inductor import ir

    write: Callable[..., Any] = ir.FallbackKernel.export_extern_kernel_node
    tables = [] if _CONVERTS.is_file() else [(getattr(serialize, name), numbers) for name, numbers in _NUMBERS.items()]

    def write_all(kernel: Any) -> Any:
        arguments_of = kernel.unflatten_args

        def with_defaults(*given: Any) -> tuple[Any, dict[str, Any]]:
            args, kwargs = arguments_of(*given)
            names = kernel.ordered_kwargs_for_cpp_kernel
            return args, {**{name: kernel.get_kwargs_value(name, **kwargs) for name in names}, **kwargs}

        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(kernel, "unflatten_args", with_defaults))
            for table, numbers in tables:
                patches.enter_context(mock.patch.dict(table, numbers))
            return write(kernel)

    with mock.patch.object(ir.FallbackKernel, "export_extern_kernel_node", write_all):
        yield
