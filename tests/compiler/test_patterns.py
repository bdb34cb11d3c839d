"""Replacements by pattern: attention made of other operators, and constants folded into frozen weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.freezing_patterns import freezing_passes
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch.fx.experimental.proxy_tensor import make_fx

from aotc.compiler.patches import attention_patterns, folded_constants

PERMUTED = (0, 2, 1, 3)

# Heads, positions and widths are equal, so that no shape tells one axis from another.
SAME = {
    "divided": lambda q, k, v, m: (q @ k.transpose(-2, -1) / 2.0).softmax(-1) @ v,
    "by number of the axis": lambda q, k, v, m: (q @ k.transpose(2, 3) * 0.5).softmax(3) @ v,
    "masked": lambda q, k, v, m: (q @ k.transpose(-2, -1) / 2.0 + m).softmax(-1) @ v,
    "permuted": lambda q, k, v, m: (
        (q.permute(PERMUTED) @ k.permute(PERMUTED).transpose(-2, -1) / 2.0).softmax(-1) @ v.permute(PERMUTED)
    ),
    "of three axes": lambda q, k, v, m: F.dropout(q[0].bmm(k[0].transpose(1, 2)).softmax(-1), 0.0).bmm(v[0]),
}
OTHER = {
    "over queries": lambda q, k, v, m: (q @ k.transpose(-2, -1) / 2.0).softmax(-2) @ v,
    "over heads": lambda q, k, v, m: (q @ k.transpose(-2, -1) * 0.5).softmax(1) @ v,
    "masked, over queries": lambda q, k, v, m: (q @ k.transpose(-2, -1) / 2.0 + m).softmax(-2) @ v,
    "keys in one permute": lambda q, k, v, m: (
        (q.permute(PERMUTED) @ k.permute(0, 2, 3, 1) * 0.5).softmax(-1) @ v.permute(PERMUTED)
    ),
    "keys of other samples": lambda q, k, v, m: (q @ k.permute(1, 0, 3, 2) / 2.0).softmax(-1) @ v,
    "values of other heads": lambda q, k, v, m: (
        (q.permute(PERMUTED) @ k.permute(PERMUTED).transpose(-2, -1) / 2.0).softmax(-1) @ v.permute(1, 2, 0, 3)
    ),
    "three axes, over samples": lambda q, k, v, m: F.dropout(q[0].bmm(k[0].transpose(1, 2)).softmax(0), 0.0).bmm(v[0]),
    "each head its scale": lambda q, k, v, m: (q @ k.transpose(-2, -1) / m.exp() + m).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", [*SAME, *OTHER])
def test_only_attention_is_replaced_by_attention(name: str) -> None:
    function, inputs = {**SAME, **OTHER}[name], [torch.randn(4, 4, 4, 4) for _ in range(4)]
    graph = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    with torch.no_grad(), attention_patterns.apply():
        joint_graph_passes(graph, torch.device("cpu"))
    assert ("scaled_dot_product" in graph.code) == (name in SAME)
    torch.testing.assert_close(graph(*inputs), function(*inputs))


def number(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.5)


IMAGES, ROWS = torch.randn(2, 4, 4, 4), torch.randn(6, 4)
FOLDED: dict[str, tuple[Callable[..., nn.Module], Tensor, Callable[[Tensor], Tensor]]] = {
    "a value a channel": (lambda: nn.Conv2d(4, 4, 1), IMAGES, lambda y: y * number(4, 1, 1) + number(1, 4, 1, 1)),
    "grouped": (lambda: nn.Conv2d(4, 4, 1, groups=2), IMAGES, lambda y: (y - number(4, 1, 1)) / number(4, 1, 1)),
    "a number": (lambda: nn.Conv2d(4, 4, 1, bias=False), IMAGES, lambda y: y * 2.5),
}
LEFT: dict[str, tuple[Callable[..., nn.Module], Tensor, Callable[[Tensor], Tensor]]] = {
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3), IMAGES, lambda y: y * number(4, 1, 1) + number(4, 1, 1)),
    "transposed, grouped": (lambda: nn.ConvTranspose2d(4, 4, 3, groups=2), IMAGES, lambda y: y * number(4, 1, 1)),
    "a value a column": (lambda: nn.Conv2d(4, 4, 1), IMAGES, lambda y: y * number(1, 4)),
    "a value a row": (lambda: nn.Conv3d(4, 4, 1), IMAGES[None].view(1, 4, 2, 4, 4), lambda y: y + number(1, 4, 1)),
    "more axes than the result": (lambda: nn.Linear(4, 4), ROWS, lambda y: y.reshape(6, 4) + number(1, 1, 4)),
    "another last axis": (lambda: nn.Linear(4, 4), ROWS, lambda y: y.reshape(24, 1) * number(4)),
}


@pytest.mark.parametrize("name", [*FOLDED, *LEFT])
def test_constants_are_folded_along_channels(name: str) -> None:
    make, x, then = {**FOLDED, **LEFT}[name]
    torch.manual_seed(0)
    layer = make().eval().requires_grad_(False)
    table = select_decomp_table()
    graph = make_fx(lambda x: then(layer(x)), decomposition_table=table, tracing_mode="real")(x)
    with torch.no_grad(), config.patch(enable_linear_binary_folding=True), folded_constants.apply():
        expected = then(layer(x))
        freezing_passes(graph, [x])
        torch.testing.assert_close(graph(x), expected)
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    arithmetic = {torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.div.Tensor}
    assert bool(arithmetic.intersection(calls)) == (name in LEFT)
