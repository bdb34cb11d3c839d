"""Models of training.py, which return their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Gpt(nn.Module):
    """A language model with tied embeddings; its result is the loss of each next token."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def gpt(**sizes: int) -> nn.Module:
    return Gpt(**sizes)


class Classifier(nn.Module):
    """BERT with a classifier; dropout is 0, so that all contenders have one loss curve."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=4)
        self.bert = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.bert(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return F.cross_entropy(logits, ids[:, 0] % 4)


def bert(**sizes: Any) -> nn.Module:
    return Classifier(**sizes)


class Adapted(nn.Module):
    """A frozen linear layer with an adapter of low rank."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Llama(nn.Module):
    """A small Llama of which only adapters are trained, in each layer."""

    def __init__(self, rank: int, **sizes: Any) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.llama = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).requires_grad_(False)
        for layer in self.llama.model.layers:
            layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, rank)
            layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj, rank)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.llama(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def lora(**sizes: Any) -> nn.Module:
    return Llama(**sizes)
