"""Decoder-only language models of transformers with a cache that stays where it is, for `manifests/llm.yaml`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, StaticCache


class CachedLM(nn.Module):
    """A causal language model and its key-value cache, which are buffers: written in place, kept between calls.

    `forward` takes token ids `[batch, seq]` and the position of the first of them, an int64 tensor without axes, and
    gives the logits of the last one, `[batch, vocabulary]`. A prompt starts at 0, which forgets what was there; each
    further token starts at the number of those before it. There is room for `length` tokens.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache = StaticCache(config=config, max_cache_len=length)
        for index in range(len(self.cache.layers)):
            for kind in ("keys", "values"):
                empty = torch.zeros(batch, heads, length, size, dtype=model.dtype)
                self.register_buffer(f"{kind}_{index}", empty, persistent=False)

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        for index, layer in enumerate(self.cache.layers):
            # The buffers themselves, wherever `.to()` has moved them, and a length that is this call's own.
            layer.keys, layer.values = getattr(self, f"keys_{index}"), getattr(self, f"values_{index}")
            layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
            layer.cumulative_length = start.clone()
        positions = start + torch.arange(input_ids.shape[1], device=input_ids.device)
        result = self.model(
            input_ids,
            position_ids=positions.unsqueeze(0),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return result.logits[:, -1]


def cached_lm(config: Any, batch: int = 1, length: int = 1024) -> CachedLM:
    """The causal language model of a configuration, with room for `batch` × `length` tokens."""
    return CachedLM(AutoModelForCausalLM.from_config(config), batch, length)
