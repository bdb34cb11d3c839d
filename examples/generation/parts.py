"""The models of the examples, small and with random weights, and the parts of them that are compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from language_models import CachedDecoder, CachedEmbeddings, CachedLM

LLAMA = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
T5 = T5Config(vocab_size=100, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
WHISPER = WhisperConfig(
    vocab_size=100,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    num_mel_bins=16,
    max_source_positions=50,
    max_target_positions=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=3,
)
VISION = CLIPVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8
)
IMAGE_TOKEN = 99
LLAVA = LlavaConfig(text_config=LLAMA, vision_config=VISION, image_token_id=IMAGE_TOKEN, image_seq_length=16)


def made(kind: Any, config: Any) -> Any:
    """The same random weights in every process, so large that tokens differ. For trained ones:
    `kind.from_pretrained(name).eval()`."""
    torch.manual_seed(0)
    model = kind(config).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    return model


def llama() -> Any:
    return made(LlamaForCausalLM, LLAMA)


def llama_flex() -> Any:
    """The same, with FlexAttention: transformers' own `attn_implementation="flex_attention"` compiles when it runs."""
    AttentionInterface.register("flex", _attend)
    AttentionMaskInterface.register("flex", _mask)
    return made(LlamaForCausalLM, LlamaConfig(**LLAMA.to_diff_dict(), attn_implementation="flex"))


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
    result = flex_attention(query, key, value, block_mask=mask, scale=scaling, enable_gqa=True)
    return result.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: int,
    mask_function: Any,
    device: Any,
    **_: Any,
) -> BlockMask:
    """Of a cache whose start is a tensor, and without padding: each token sees those before it."""
    began = q_offset + 0  # of now: the cache counts on in place
    mask = lambda b, head, row, column: mask_function(b, head, row + began, column + kv_offset)  # noqa: E731
    return create_block_mask(mask, batch_size, None, q_length, kv_length, device=device)


def t5() -> Any:
    return made(T5ForConditionalGeneration, T5)


def whisper() -> Any:
    return made(WhisperForConditionalGeneration, WHISPER)


def llava() -> Any:
    return made(LlavaForConditionalGeneration, LLAVA)


def llama_cached() -> nn.Module:
    return CachedLM(llama(), batch=1, length=64)


def llama_flex_cached() -> nn.Module:
    return CachedLM(llama_flex(), batch=1, length=64)


def t5_encoder() -> nn.Module:
    return t5().get_encoder()


def t5_decoder() -> nn.Module:
    return CachedDecoder(t5(), batch=1, length=64)


def whisper_encoder() -> nn.Module:
    return whisper().get_encoder()


def whisper_decoder() -> nn.Module:
    return CachedDecoder(whisper(), batch=1, length=64)


def llava_vision() -> nn.Module:
    return llava().model


def llava_text() -> nn.Module:
    return CachedEmbeddings(llava(), batch=1, length=64)
