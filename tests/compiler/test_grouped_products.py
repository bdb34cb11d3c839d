"""Grouped matrix products are called by name where torch has no C function for them, as 2.11 has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from doctoring import artifact_of, library_bytes

from aotc.store.layout.store import Store

EXPERTS = """
import __main__
import torch

if getattr(__main__.__spec__, "name", "") == "aotc.compiler.workers.compile_worker":  # as a torch 2.11, with its patch
    from torchgen.aoti.fallback_ops import inductor_fallback_ops
    from aotc.compiler.patches import grouped_products
    inductor_fallback_ops.pop("aten._grouped_mm.default", None)
    applied = grouped_products.apply()
    applied.__enter__()

class Model(torch.nn.Module):
    def forward(self, tokens, weights, ends):
        return torch._grouped_mm(tokens * 2, weights, offs=ends) + 1
"""
# All 12 rows in the first group: the product leaves rows after the last end as they are in memory.
INPUTS = {
    "tokens": {"shape": [12, 16], "dtype": "bfloat16"},
    "weights": {"shape": [3, 16, 8], "dtype": "bfloat16"},
    "ends": {"shape": [3], "dtype": "int32", "init": {"constant": 12}},
}


def test_a_grouped_product_is_called_by_name(compile_model: Any, tmp_path: Path) -> None:
    compiled, module = compile_model(EXPERTS, inputs=INPUTS)
    store = Store.open(tmp_path / "store")
    library = library_bytes(store, artifact_of(store, "own").variants[0])
    assert b"aoti_torch_cpu__grouped_mm" not in library
    tokens, weights = torch.randn(12, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    inputs = tokens, weights, torch.tensor([2, 8, 12], dtype=torch.int32)
    with torch.no_grad():
        assert torch.equal(compiled(*inputs), module(*inputs))
