"""Which attention a model is traced with; the races themselves need a GPU (tests/cuda/test_cuda_attention.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_export_module
from torch.nn import functional as F

from aotc.compiler.autotune import attention
from aotc.compiler.autotune.attention import attention_chosen, fastest
from aotc.compiler.autotune.picker import Picker


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return torch.cond(y.sum() > 0, lambda y: F.scaled_dot_product_attention(y, y, y), torch.sin, (y,))


X = torch.randn(1, 2, 8, 16)


def exported() -> torch.fx.GraphModule:
    return torch.export.export(Attends(), (X,), strict=False).graph_module


def traced(graph: torch.fx.GraphModule) -> str:
    return aot_export_module(graph, (X,), trace_joint=False)[0].print_readable(print_output=False)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"flash": 1.0, "efficient": 2.0, "cudnn": 0.74}, "cudnn"),
        ({"flash": 1.0, "efficient": 2.0, "cudnn": 0.76}, "flash"),
        ({"flash": 2.0, "efficient": 1.0, "cudnn": 0.76}, "efficient"),
        ({"flash": float("inf"), "efficient": float("inf"), "cudnn": 5.0}, "cudnn"),
    ],
)
def test_what_is_compiled_at_run_time_must_save_a_quarter(times: dict[str, float], winner: str) -> None:
    assert fastest(times) == winner


def other_attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.tan()


def test_each_attention_is_traced_as_it_was_decided_and_the_graph_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the branches of a graph, too."""
    graph = exported()
    before, as_torch_decides = graph.code, traced(graph)
    assert as_torch_decides.count("_scaled_dot_product_flash_attention_for_cpu.default(") == 2
    monkeypatch.setattr(attention, "_call_of", lambda node: node)
    monkeypatch.setattr(attention, "_decide", lambda *_: "other")
    monkeypatch.setitem(attention._TRACED, "other", other_attention)
    with attention_chosen(graph, Picker(), race=True):
        chosen = traced(graph)
    assert "_scaled_dot_product" not in chosen and chosen.count("aten.tan.default(") == 2
    assert graph.code == before and traced(graph) == as_torch_decides


def test_on_a_cpu_nothing_is_decided() -> None:
    graph, picker = exported(), Picker()
    expected = traced(graph)
    with attention_chosen(graph, picker, race=True):
        assert traced(graph) == expected
    assert not picker.picks
