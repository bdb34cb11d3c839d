"""A tiny Flux transformer of diffusers with random weights, for manifest.yaml and denoise.py."""

from __future__ import annotations

import torch
from diffusers import FluxTransformer2DModel


def transformer(double_blocks: int = 4, single_blocks: int = 6) -> FluxTransformer2DModel:
    """For a trained model: `FluxTransformer2DModel.from_pretrained(…, subfolder="transformer")`."""
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
