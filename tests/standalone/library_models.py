"""Models of transformers, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LENGTH = 16
"""Of the decoder's cache, in tokens."""


def bert() -> nn.Module:
    """A BERT of transformers, of two layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    return transformers.BertModel(config).eval()


def resnet() -> nn.Module:
    """ResNet-18, as transformers has it."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
    )
    return transformers.ResNetModel(config).eval()


def dinov2() -> nn.Module:
    """Its pooled output is a view of its last hidden state."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
    )
    return transformers.Dinov2Model(config).eval()


def llama() -> Any:
    """A decoder of transformers, of two layers."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    generation = transformers.GenerationConfig(use_cache=True, cache_implementation="static")
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config = generation
    return model


def decoder() -> nn.Module:
    """The decoder with transformers' static cache as its buffers, as transformers exports it."""
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    return TorchExportableModuleWithStaticCache(llama(), batch_size=1, max_cache_len=LENGTH).eval()


class Continuing(nn.Module):
    """The decoder with transformers' static cache over tensors that the caller passes in."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, input_ids: Tensor, position: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Of ids [1, 1] at a position [1]; keys and values, [layers, 1, heads, length, width], are written to."""
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=LENGTH)
        for layer, own_keys, own_values in zip(cache.layers, keys, values, strict=True):
            layer.keys, layer.values, layer.cumulative_length = own_keys, own_values, position[0].clone()
            layer.device, layer.is_initialized = keys.device, True
        result: Tensor = self.model(input_ids, cache=cache, use_cache=True).logits
        return result
