"""[AOTInductor] An operator that is called by name gets another dtype.

Expected: `torch.float32`. Seen: `torch.float64`: the number of a dtype, a layout or a memory format in export's schema
is read as C++'s. Mended in torch 2.12, which converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.reproducing import Torch, assert_same
from aotc.compiler.patches.shared.inductor import serialised_within

PATCH = Patch(
    __name__,
    severity="silent",
    advisory="AOTC-2026-0023",
    torch=">=2.11,<2.12",
    targets=(
        "torch._inductor.ir:FallbackKernel.export_extern_kernel_node()",
        "torch._export.serde.serialize:_TORCH_TO_SERIALIZE_DTYPE",
        "torch._export.serde.serialize:_TORCH_TO_SERIALIZE_LAYOUT",
        "torch._export.serde.serialize:_TORCH_TO_SERIALIZE_MEMORY_FORMAT",
    ),
)

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
def apply() -> Iterator[None]:
    """While active, dtypes, layouts and memory formats are serialised as C++'s numbers."""
    from torch._export.serde import serialize

    @contextmanager
    def numbered(kernel: Any) -> Iterator[None]:
        with ExitStack() as patches:
            for name, numbers in _NUMBERS.items():
                patches.enter_context(mock.patch.dict(getattr(serialize, name), numbers))
            yield

    with serialised_within(numbered):
        yield


def reproduce(patches: Torch) -> None:
    make_library: Any = torch.library.Library
    library = make_library("aotc_enums", "DEF")
    library.define("which(Tensor x, ScalarType dtype) -> Tensor")
    library.impl("which", lambda x, dtype: x + (dtype == torch.float32), "CPU")
    library.impl("which", lambda x, dtype: torch.empty_like(x), "Meta")
    assert_same(patches.library, lambda x: torch.ops.aotc_enums.which(x, torch.float32), torch.zeros(2))
