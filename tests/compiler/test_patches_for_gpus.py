"""What patches for GPUs change in Inductor, as far as it shows without one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.patches import constant_prologues, strides_of_queries


@pytest.mark.parametrize("patched", [True, False])
def test_strides_of_a_query_are_decided_before_they_are_read(monkeypatch: pytest.MonkeyPatch, patched: bool) -> None:
    """Those that the generated code has: of what is computed from a transposed tensor, the transposed one's."""
    from torch._inductor import config, ir
    from torch._inductor.kernel.flex import flex_attention
    from torch._inductor.lowering import lowerings

    read: list[tuple[int, ...]] = []
    generated: list[tuple[int, ...]] = []

    def create(query: Any) -> Any:  # as Inductor's own begins: it reads, then makes a view, which decides
        query = ir.ExternKernel.realize_input(query)
        read.append(tuple(map(int, query.get_stride())))
        generated.append(tuple(map(int, ir.as_storage_and_layout(query)[1].stride)))
        return lowerings[torch.ops.aten.neg.default](query)

    monkeypatch.setattr(flex_attention, "create_flex_decoding_kernel", create)
    erfinv = torch.ops.aten.erfinv.default  # in the place of FlexAttention, which is lowered so on a GPU alone
    monkeypatch.setitem(lowerings, erfinv, lambda x: flex_attention.create_flex_decoding_kernel(x))

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.erfinv(x.view(2, 32, 4, 8).transpose(1, 2) * 1.5)

    x = torch.rand(2, 32, 32)
    exported = torch.export.export(Attends(), (x,)).module()
    with strides_of_queries.apply() if patched else nullcontext(), config.patch(force_disable_caches=True):
        torch._inductor.compile(exported, [x])
    assert generated == [(1024, 8, 32, 1)]
    assert (read == generated) is patched


@pytest.mark.parametrize(("bytes_read", "fused"), [(0, False), (8, True)])
def test_what_reads_no_memory_is_not_put_into_a_template(
    monkeypatch: pytest.MonkeyPatch, bytes_read: int, fused: bool
) -> None:
    from torch._inductor.scheduler import Scheduler

    scheduler: Any = Scheduler
    monkeypatch.setattr(scheduler, "check_prologue_fusion_heuristics_fusable", lambda *_: True)
    prologue = SimpleNamespace(get_read_buffer_sizes=lambda: bytes_read)
    with constant_prologues.apply():
        asked = scheduler.check_prologue_fusion_heuristics_fusable
        assert asked(None, prologue, None, None) is fused
