"""Grouped matrix products are called by name where torch has no C function for them, as 2.11 has none."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torchgen.aoti.fallback_ops import inductor_fallback_ops

from aotc.compiler.patches.bugs.arithmetic.grouped_products import grouped_products_are_called


class Experts(nn.Module):
    def forward(self, tokens: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(tokens * 2, weights, offs=ends) + 1


def test_a_grouped_product_is_called_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(inductor_fallback_ops, "aten._grouped_mm.default", raising=False)
    tokens, weights = torch.randn(12, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    inputs = tokens, weights, torch.tensor([2, 8, 12], dtype=torch.int32)
    with grouped_products_are_called(), torch.no_grad(), fresh_cache():
        exported = torch.export.export(Experts(), inputs)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "experts.pt2"))
        result = torch._inductor.aoti_load_package(package)(*inputs)
    with zipfile.ZipFile(package) as files:
        wrapper = next(files.read(name).decode() for name in files.namelist() if name.endswith("wrapper.cpp"))
    assert "aoti_torch_cpu__grouped_mm(" not in wrapper
    assert torch.equal(result, Experts()(*inputs))
