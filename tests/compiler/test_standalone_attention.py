"""Attention on a GPU without torch's kernels: what FlexAttention computes, and which calls its template takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from aotc.compiler.codegen.standalone_attention import (
    BLOCK,
    _below_the_diagonal,
    _flex,
    _has_template,
    _laid_as,
    attention_generated,
)

SCALE = 0.25  # of heads of 16


def operands(rows: int = 7, columns: int = 9, heads: int = 4, of_keys: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, rows), (of_keys, columns), (of_keys, columns))
    query, key, value = (torch.randn(2, *each, 16, generator=generator) for each in sizes)
    return query, key, value


def masks() -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 9), (2, 1, 1, 9), (2, 1, 7, 9), (1, 4, 7, 9), (2, 4, 7, 9), (4, 7, 1)]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [None, *drawn, *(each > -1 for each in drawn)]


@pytest.mark.parametrize("mask", masks(), ids=lambda mask: "none" if mask is None else f"{mask.dtype}{[*mask.shape]}")
@pytest.mark.parametrize("of_keys", [4, 2])
def test_a_mask_is_applied_as_in_eager(mask: Tensor | None, of_keys: int) -> None:
    query, key, value = operands(of_keys=of_keys)
    expected = F.scaled_dot_product_attention(query, key, value, mask, scale=SCALE, enable_gqa=of_keys != 4)
    torch.testing.assert_close(_flex(query, key, value, mask, False, SCALE), expected)


@pytest.mark.parametrize(("rows", "columns"), [(7, 9), (9, 7), (1, 5), (300, 300), (300, 140), (140, 300)])
def test_a_causal_mask_begins_at_the_first_row_and_column(rows: int, columns: int) -> None:
    query, key, value = operands(rows, columns)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=SCALE)
    torch.testing.assert_close(_flex(query, key, value, None, True, SCALE), expected)


def test_a_row_of_which_nothing_is_left_is_zero() -> None:
    query, key, value = operands()
    mask = torch.ones(7, 9, dtype=torch.bool)
    mask[3] = False
    assert not _flex(query, key, value, mask, False, SCALE)[:, :, 3].any()


@pytest.mark.parametrize(("rows", "columns"), [(3, 3), (4, 2), (2, 4)])
def test_the_blocks_that_are_computed_hold_each_element_on_and_below_the_diagonal(rows: int, columns: int) -> None:
    """Those on the diagonal are masked, those to its left are not, and no other is computed."""
    table = _below_the_diagonal(torch.ones(()), rows, columns)
    masked, whole = (BlockMask.from_kv_blocks(*table[at : at + 2], BLOCK_SIZE=BLOCK).to_dense()[0, 0] for at in (0, 2))
    row, column = torch.arange(rows)[:, None], torch.arange(columns)
    assert torch.equal(masked.bool(), row == column) and torch.equal(whole.bool(), row > column)


def of_gpu(*shape: int, dtype: torch.dtype = torch.float16) -> Any:
    """What a call is judged by, of a tensor on a GPU."""
    return SimpleNamespace(shape=shape, dtype=dtype, device=torch.device("cuda"), dim=lambda: len(shape))


BOOLS = of_gpu(2, 1, 8, 8, dtype=torch.bool)
CALLS = [
    (of_gpu(2, 4, 8, 64), of_gpu(2, 4, 8, 64), BOOLS, {}, True),
    (of_gpu(2, 4, 8, 64), of_gpu(2, 2, 8, 64), None, {"enable_gqa": True}, True),
    (of_gpu(2, 4, 8, 64), of_gpu(2, 2, 8, 64), None, {}, False),
    (of_gpu(2, 4, 8, 8), of_gpu(2, 4, 8, 8), None, {}, False),
    (of_gpu(4, 8, 64), of_gpu(4, 8, 64), None, {}, False),
    (of_gpu(2, 4, 8, 64), of_gpu(2, 4, 8, 64), None, {"dropout_p": 0.1}, False),
    (of_gpu(2, 4, 8, 64), of_gpu(2, 4, 8, 64, dtype=torch.float32), None, {}, False),
    (of_gpu(2, 4, 8, 64, dtype=torch.float64), of_gpu(2, 4, 8, 64, dtype=torch.float64), None, {}, False),
    (of_gpu(2, 4, 0, 64), of_gpu(2, 4, 8, 64), None, {}, False),
    (of_gpu(2, 4, 8, 64), of_gpu(2, 4, 8, 64), of_gpu(2, 1, 8, 8, dtype=torch.int64), {}, False),
]


@pytest.mark.parametrize(("query", "key", "mask", "options", "taken"), CALLS)
def test_the_template_takes_what_its_kernel_can_compute(
    query: Any, key: Any, mask: Any, options: dict[str, Any], taken: bool
) -> None:
    assert _has_template(query, key, key, mask, options) == taken
    on_a_cpu = SimpleNamespace(**{**vars(query), "device": torch.device("cpu")})
    assert not _has_template(on_a_cpu, key, key, mask, options)


def test_a_result_lies_as_the_graph_was_captured_for() -> None:
    result = torch.arange(24.0).reshape(1, 2, 3, 4)
    of_rows = torch.empty(1, 3, 2, 4).transpose(1, 2)
    assert _laid_as(result, of_rows).stride() == of_rows.stride()
    assert torch.equal(_laid_as(result, of_rows), result)
    assert _laid_as(result, result).data_ptr() == result.data_ptr()


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_elsewhere_attention_is_composed_and_the_graph_is_as_before() -> None:
    x = torch.randn(1, 2, 8, 16)
    graph: Any = torch.export.export(Attends(), (x,), strict=False).module()
    before = graph.code

    def traced() -> str:
        return make_fx(graph, tracing_mode="fake")(x).code

    assert "_scaled_dot_product_flash_attention_for_cpu" in traced()
    with attention_generated(graph):
        composed = traced()
    assert "scaled_dot_product" not in composed and "bmm" in composed and "softmax" in composed
    assert graph.code == before and "_scaled_dot_product_flash_attention_for_cpu" in traced()
