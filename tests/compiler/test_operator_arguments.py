"""Operators that a library calls by name are given what the model gives them."""

from __future__ import annotations

from typing import Any

import torch

MODEL = """
import torch
from torch import nn

KINDS = {
    "dtype": [getattr(torch, name) for name in (
        "uint8 int8 int16 int32 int64 float16 float32 float64 complex64 complex128 bool bfloat16 uint16 "
        "float8_e4m3fn float8_e5m2"
    ).split()],
    "layout": [torch.strided, torch.sparse_coo, torch.sparse_csr],
    "memory_format": [
        torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d
    ],
}
known = hasattr(torch, "kinds_library")  # the test's process imports this module for the build, and again
library = torch.kinds_library = torch.kinds_library if known else torch.library.Library("kinds", "DEF")
known or library.define("which(Tensor x, ScalarType? dtype, Layout? layout, MemoryFormat? memory_format) -> Tensor")

def which(x, dtype, layout, memory_format):
    given = {"dtype": dtype, "layout": layout, "memory_format": memory_format}
    return x + sum(100 ** n * (values.index(given[name]) + 1) for n, (name, values) in enumerate(KINDS.items())
                   if given[name] is not None)

known or library.impl("which", which, "CPU")
known or library.impl("which", lambda x, *kinds: torch.empty_like(x), "Meta")

class Model(nn.Module):
    def forward(self, x):
        ask = torch.ops.kinds.which
        return [
            *(ask(x, dtype, None, None) for dtype in KINDS["dtype"]),
            *(ask(x, None, layout, None) for layout in KINDS["layout"]),
            *(ask(x, None, None, memory_format) for memory_format in KINDS["memory_format"]),
            ask(x, torch.float32, torch.strided, torch.contiguous_format),
        ]
"""


def test_operators_are_given_what_the_model_gives_them(compile_model: Any) -> None:
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": [2], "dtype": "int64"}}, buckets=[{}])
    x = torch.zeros(2, dtype=torch.int64)
    assert [int(each[0]) for each in compiled(x)] == [int(each[0]) for each in module(x)]
