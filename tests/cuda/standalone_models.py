"""Models that run on a GPU without torch, small and of random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    return BertModel(BertConfig(vocab_size=128, **sizes), add_pooling_layer=False).eval()


def clip() -> nn.Module:
    """Of its two logits one is a view of the other."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 99, "eos_token_id": 98, "max_position_embeddings": 64}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()


class Queries(nn.Module):
    """A product of zeros, as of DETR's queries."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.value(torch.zeros_like(x)) + x
        return result


def queries() -> nn.Module:
    return Queries().eval()


class Wide(nn.Module):
    """Its table of 573 MB reaches the GPU by several threads; each row is read."""

    ROWS = 140_000

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(self.ROWS, 2048)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.table(ids).amax(-1)
        return result


def wide() -> nn.Module:
    return Wide().eval()


def vocoder() -> nn.Module:
    """HiFi-GAN, whose convolutions are transposed and dilated."""
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    torch.manual_seed(0)
    upsampled = {"upsample_initial_channel": 32, "upsample_rates": [4], "upsample_kernel_sizes": [8]}
    blocks = {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]]}
    return SpeechT5HifiGan(SpeechT5HifiGanConfig(model_in_dim=80, **upsampled, **blocks)).eval()


class Attentions(nn.Module):
    """Queries of rotary embeddings are computed from transposed tensors, as here."""

    CASES = (
        (1, 2, "bool"),
        (2, 8, ""),
        (5, 2, "float"),
        (16, 2, "bool"),
        (33, 8, "causal"),
        (100, 2, "causal"),
        (128, 2, "bool"),
    )
    """Rows, heads of keys, and the mask."""

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return torch.cat([self.attended(x, keys, values, *case).flatten(1) for case in self.CASES], 1)

    def attended(self, x: Tensor, keys: Tensor, values: Tensor, rows: int, heads: int, kind: str) -> Tensor:
        query = x[:, :rows].unflatten(-1, (8, 64)).transpose(1, 2) * 1.5
        seen = torch.arange(keys.shape[2], device=x.device) <= torch.arange(rows, device=x.device)[:, None] + 7
        mask: Tensor | None = None
        if kind == "bool":
            mask = seen
        elif kind == "float":
            mask = torch.where(seen, 0.0, -torch.inf).to(x.dtype)
        options = {"is_causal": kind == "causal", "enable_gqa": heads < 8}
        attended = scaled_dot_product_attention(query, keys[:, :heads], values[:, :heads], mask, **options)
        return attended.transpose(1, 2).flatten(2)


def attentions() -> nn.Module:
    return Attentions().eval()


class Decode(nn.Module):
    """A Llama with transformers' static cache over two buffers of the module."""

    LENGTH = 64

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=96, intermediate_size=256, max_position_embeddings=self.LENGTH, **sizes)
        self.model = LlamaForCausalLM(config)
        self.register_buffer("keys", torch.zeros(2, 1, 2, self.LENGTH, 32))
        self.register_buffer("values", torch.zeros(2, 1, 2, self.LENGTH, 32))

    def forward(self, input_ids: Tensor, position: Tensor) -> Tensor:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=self.LENGTH)
        for layer, keys, values in zip(cache.layers, self.keys, self.values, strict=True):
            layer.keys, layer.values, layer.cumulative_length = keys, values, position[0].clone()
            layer.device, layer.is_initialized = keys.device, True
        result: Tensor = self.model(input_ids, past_key_values=cache, use_cache=True).logits
        return result


def decode() -> nn.Module:
    return Decode().eval()
