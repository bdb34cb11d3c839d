"""Attention that is written in Python: a bias by distance within each document, and a cache that lies in pages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

PAGE = 128


class Documents(nn.Module):
    """Causal attention over several documents in one row, with ALiBi: a bias of `slope * distance` for each head."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("slopes", torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        """`x` is `[batch, tokens, width]`; `documents` says of which document each token is, `[batch, tokens]`."""
        batch, tokens, width = x.shape
        query, key, value = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        slopes = self.slopes

        def alibi(score: Tensor, b: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return score + slopes[head] * (column - row)

        def within_document(b: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return (row >= column) & (documents[b, row] == documents[b, column])

        mask = create_block_mask(within_document, batch, None, tokens, tokens, device=x.device)
        result = flex_attention(query, key, value, score_mod=alibi, block_mask=mask)
        return self.out(result.transpose(1, 2).reshape(batch, tokens, width))


class Paged(nn.Module):
    """One further token of each sequence, whose keys and values lie in pages that all sequences share.

    `forward` takes `x [batch, 1, width]`, `lengths [batch]`, the tokens that each sequence has so far, and
    `table [batch, pages of a sequence]`, the page of the cache where each of its pages lies. Pages are 128 tokens.
    """

    def __init__(self, width: int = 64, heads: int = 4, kv_heads: int = 2, pages: int = 64) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.pages, size = heads, kv_heads, pages, width // heads
        self.query, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * kv_heads * size)
        self.register_buffer("keys", torch.zeros(1, kv_heads, pages * PAGE, size))
        self.register_buffer("values", torch.zeros(1, kv_heads, pages * PAGE, size))

    def forward(self, x: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        batch, _, _ = x.shape
        query = self.query(x).view(batch, 1, self.heads, -1).transpose(1, 2)
        key, value = self.kv(x).view(batch, 2, self.kv_heads, -1).unbind(1)
        place = table.gather(1, lengths[:, None] // PAGE)[:, 0] * PAGE + lengths % PAGE
        self.keys[0, :, place] = key.transpose(0, 1)
        self.values[0, :, place] = value.transpose(0, 1)

        used = table.shape[1]
        number = torch.arange(used, device=x.device).expand(batch, -1)
        owned = torch.full((batch, self.pages), -1, device=x.device).scatter(1, table, number)

        def of_sequence(b: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            page = owned[b, column // PAGE]
            return (page >= 0) & (page * PAGE + column % PAGE <= lengths[b])

        count = (lengths // PAGE + 1).to(torch.int32)[:, None, None]
        pages = nn.functional.pad(table, (0, self.pages - used)).to(torch.int32)[:, None, None]
        sizes = {"BLOCK_SIZE": PAGE, "seq_lengths": (1, self.pages * PAGE), "compute_q_blocks": False}
        mask = BlockMask.from_kv_blocks(count, pages, mask_mod=of_sequence, **sizes)
        keys, values = (cache.expand(batch, -1, -1, -1) for cache in (self.keys, self.values))
        return flex_attention(query, keys, values, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(2)


def table(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Pages of which none is given to two sequences: what the build runs the model with."""
    batch, used = shape
    return torch.randperm(batch * used, generator=generator).view(batch, used).to(dtype)
