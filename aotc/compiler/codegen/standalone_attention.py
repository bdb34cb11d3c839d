"""Attention on a GPU without torch's kernels: FlexAttention's template where it takes the call, else products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotc.compiler.autotune.attention import ATTENTION, attentions_traced_as
from aotc.compiler.scoped import replaced_items

BLOCK = 128
"""Rows and columns of a block of a causal mask: blocks above the diagonal are left out. Calls with fewer rows take
FlexAttention's template for decoding, whose tile holds the rows of all heads that share a key."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_OPTIONS = {
    "PRESCALE_QK": False,
    "ROWS_GUARANTEED_SAFE": False,
    "BLOCKS_ARE_CONTIGUOUS": False,
    "WRITE_DQ": True,
    "OUTPUT_LOGSUMEXP": False,
    "OUTPUT_MAX": False,
}
"""Of the template, as `torch.nn.attention.flex_attention.flex_attention` sets them for inference."""


@contextmanager
def attention_generated(graph: fx.GraphModule) -> Iterator[None]:
    """While active, each attention of the graph is traced as FlexAttention where its template takes the call. Others,
    and those that Inductor finds by itself, are traced as products and a softmax."""
    with attentions_traced_as(graph, _generated), sdpa_kernel(SDPBackend.MATH), _masks_stored():
        yield


@contextmanager
def _masks_stored() -> Iterator[None]:
    """While active, masks that the graph computes are stored before a template reads them: Inductor puts the code that
    computes them into the template, and fails where their shapes are not the template's."""
    from torch._inductor import ir
    from torch._inductor.lowering import lowerings

    (operator,) = (entry for entry in lowerings if str(entry) == "flex_attention")
    lower: Callable[..., Any] = lowerings[operator]

    def in_memory(captured: Any) -> Any:
        if not isinstance(captured, ir.TensorBox):
            return captured
        storage, layout = ir.as_storage_and_layout(ir.ExternKernel.realize_input(captured))
        return ir.TensorBox(ir.ReinterpretView(data=storage, layout=layout))  # a stored buffer without reads is inlined

    def stored(*args: Any, **kwargs: Any) -> Any:
        *others, of_score, of_mask = args
        return lower(*others, [*map(in_memory, of_score)], [*map(in_memory, of_mask)], **kwargs)

    with replaced_items(lowerings, {operator: stored}):
        yield


def _generated(node: fx.Node) -> Callable[..., Any]:
    expected = node.meta.get("val")

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any, **options: Any
    ) -> Tensor:
        given = dict(zip(("dropout_p", "is_causal"), more, strict=False)) | options
        if not _has_template(query, key, value, attn_mask, given):
            composed: Tensor = ATTENTION(query, key, value, attn_mask, *more, **options)
            return composed
        causal, scale = given.get("is_causal", False), given.get("scale")
        result = _flex(query, key, value, attn_mask, causal, 1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        return _laid_as(result, expected) if isinstance(expected, Tensor) else result

    attention.__name__ = attention.__qualname__ = "generated_attention"
    return attention


def _has_template(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    tensors = (query, key, value)
    if any(each.dim() != 4 or each.device.type != "cuda" or each.dtype != query.dtype for each in tensors):
        return False
    if query.dtype not in _FLOATS or options.get("dropout_p") or not isinstance(options.get("scale"), float | None):
        return False
    heads, of_keys, size, of_value = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    if not all(isinstance(each, int) for each in (heads, of_keys, size, of_value)) or min(size, of_value) < 16:
        return False
    if heads != of_keys and (not options.get("enable_gqa") or heads % of_keys or value.shape[1] != of_keys):
        return False
    # The template is chosen by the number of rows, which a range of sizes must decide.
    rows = query.shape[2]
    if not (statically_known_true(rows >= BLOCK) or statically_known_true(rows < BLOCK)):
        return False
    sizes = (query.shape[0], rows, key.shape[2], key.shape[0] - query.shape[0] + 1)
    if not all(statically_known_true(each > 0) for each in sizes):
        return False
    return mask is None or (mask.dtype in (torch.bool, *_FLOATS) and 2 <= mask.dim() <= 4)


def _flex(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import BlockMask

    rows, columns = query.shape[2], key.shape[2]
    scored, masked = _unchanged, _causal if causal else _all
    of_score: tuple[Tensor, ...] = ()
    of_mask: tuple[Tensor, ...] = ()
    if mask is not None:
        small, place = _without_single_axes(mask)
        if mask.dtype == torch.bool:
            masked, of_mask = _masked_by(place), (small,)
        else:
            scored, of_score = _scored_by(place), (small,)
    blocks, size = _whole(query), (_ANY_SIZE, _whole_blocks(columns))
    if causal and isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > BLOCK:
        blocks, size = _below_the_diagonal(query, -(-rows // BLOCK), -(-columns // BLOCK)), (BLOCK, BLOCK)
    form: dict[str, Any] = dict(zip(_BLOCKS, blocks, strict=False))
    form |= {"BLOCK_SIZE": size, "seq_lengths": (rows, columns), "compute_q_blocks": False}
    table = BlockMask.from_kv_blocks(**form).as_tuple()
    options = _OPTIONS | {"FORCE_USE_FLEX_ATTENTION": not _fits_one_tile(query, key)}
    result: tuple[Tensor, ...] = flex_attention(
        query, key, value, scored, (*table[:-1], masked), scale, options, of_score, of_mask
    )
    return result[0]


def _fits_one_tile(query: Tensor, key: Tensor) -> bool:
    """Whether the template for decoding has registers for the rows of all heads that share a key."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(query.shape[2] * (query.shape[1] // key.shape[1]) <= BLOCK)


# -- masks: of a score, the sequence, the head, the row and the column -------------------------------------------------


def _unchanged(score: Tensor, *_: Any) -> Tensor:
    return score


def _all(sequence: Tensor, *_: Any) -> Tensor:
    return sequence.new_ones((), dtype=torch.bool)


def _causal(sequence: Tensor, head: Tensor, row: Tensor, column: Tensor, *_: Any) -> Tensor:
    return row >= column


def _without_single_axes(mask: Tensor) -> tuple[Tensor, Callable[..., Any]]:
    """The mask without its axes of one element, and what chooses the indices of those that are left."""
    missing = 4 - mask.dim()
    kept = [axis for axis in range(mask.dim()) if not (isinstance(mask.shape[axis], int) and mask.shape[axis] == 1)]
    small = mask.squeeze(tuple(axis for axis in range(mask.dim()) if axis not in kept))
    return small, lambda places: tuple(places[axis + missing] for axis in kept)


def _masked_by(place: Callable[..., Any]) -> Callable[..., Tensor]:
    def masked(*places: Tensor) -> Tensor:
        *indices, mask = places
        return mask[place(indices)]

    return masked


def _scored_by(place: Callable[..., Any]) -> Callable[..., Tensor]:
    def scored(score: Tensor, *places: Tensor) -> Tensor:
        *indices, mask = places
        return score + mask[place(indices)]

    return scored


# -- blocks of a mask: how many of each row of blocks are computed, and which ------------------------------------------

_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_ANY_SIZE = 1 << 30


def _whole_blocks(columns: Any) -> int:
    """The size of a block of all columns, which the template for decoding divides among the processors."""
    return -(-columns // BLOCK) * BLOCK if isinstance(columns, int) else _ANY_SIZE


def _whole(like: Tensor) -> tuple[Tensor, ...]:
    """One block of all."""
    return torch.ones((1, 1, 1), dtype=torch.int32, device=like.device), torch.zeros(
        (1, 1, 1, 1), dtype=torch.int32, device=like.device
    )


def _below_the_diagonal(like: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    """Those on the diagonal are masked, those to its left are whole."""
    row = torch.arange(rows, dtype=torch.int32, device=like.device)
    column = torch.arange(columns, dtype=torch.int32, device=like.device)
    on_diagonal = torch.where(column == 0, row[:, None], column)[None, None]
    to_its_left = column.expand(rows, columns)[None, None].contiguous()
    return (row < columns).to(torch.int32)[None, None], on_diagonal, row.clamp(max=columns)[None, None], to_its_left


def _laid_as(result: Tensor, expected: Tensor) -> Tensor:
    """With axes in the order of the tensor that the model got: views that follow were captured for it."""
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3)):
        if expected.permute(axes).is_contiguous():
            return result.permute(axes).contiguous().permute(axes)
    return result
