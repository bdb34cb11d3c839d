"""Models of transformers, with random weights."""

from __future__ import annotations

import torch
from torch import nn


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
