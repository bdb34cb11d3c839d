"""Tiny diffusion models of diffusers with random weights, for manifest.yaml, denoise.py and lora.py.

For trained models: `FluxTransformer2DModel.from_pretrained(…, subfolder="transformer")`, and so on.
"""

from __future__ import annotations

import peft
import torch
from diffusers import (
    AutoencoderKL,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    WanTransformer3DModel,
)

import aotc.adapters


def flux(double_blocks: int = 4, single_blocks: int = 6) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=double_blocks,
        num_single_layers=single_blocks,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )


def sd3() -> SD3Transformer2DModel:
    torch.manual_seed(0)
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=16,
    )


def sdxl_unet() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        norm_num_groups=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1),
        projection_class_embeddings_input_dim=80,  # 32 of the pooled prompt, and 6 sizes × 8
        cross_attention_dim=32,
    )


def vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        force_upcast=False,
    )


def wan() -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=64,
        num_layers=3,
        rope_max_seq_len=32,
    )


def flux_with_adapters() -> FluxTransformer2DModel:
    """With two adapters of rank 4 or less: of any values, which the service replaces."""
    model = flux()
    for name in ("style", "subject"):
        model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v"]), name)
    return aotc.adapters.prepare(model, rank=4)
