"""A library whose kernels make tensor maps writes to no memory but its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.patches import scratch_of_one_program

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("own_environment")]

SMALLEST = 512
"""Bytes of the allocator's smallest block."""


class Product(nn.Module):
    """`[rows, depth]` by `[depth, columns]`."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left @ right


def test_tensor_maps_are_not_written_over_what_lies_beside_them() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no tensor memory accelerator")
    from torch._inductor.kernel import mm
    from torch._inductor.template_heuristics.registry import override_template_heuristics
    from torch._inductor.utils import fresh_cache

    generator = torch.Generator(device="cuda").manual_seed(0)
    left, right = (torch.randn(2048, 2048, device="cuda", generator=generator).bfloat16() for _ in range(2))
    options = {
        "max_autotune": True,
        "max_autotune_gemm_backends": "TRITON",
        "triton.enable_persistent_tma_matmul": True,
    }
    with torch.no_grad(), fresh_cache(), override_template_heuristics("cuda", [(mm.mm_template.uid, "mm")]):
        graph = torch.export.export(Product(), (left, right), strict=False).module()
        with scratch_of_one_program.apply():
            library = str(torch._inductor.aot_compile(graph, (left, right), options=options))
        (wrapper,) = Path(library).parent.glob("*wrapper.cpp")
        assert "make_tensor_descriptor" in wrapper.read_text(), "the product makes no tensor maps"
        run = torch._export.aot_load(library, "cuda")
        run(left, right)
        # The scratch is allocated anew in each call: here, where one block is free, among others that are not.
        beside = [torch.full((SMALLEST,), 7, dtype=torch.uint8, device="cuda") for _ in range(4000)]
        torch.cuda.synchronize()
        del beside[1000]
        result = run(left, right)
        torch.cuda.synchronize()
    assert all((one == 7).all() for one in beside)
    assert (result.double() - left.double() @ right.double()).abs().max() < 1
