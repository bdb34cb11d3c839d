"""`generate()` of a vision-language model by parts: its vision tower with the projector, and its language model."""

from __future__ import annotations

from typing import Any

import torch
from compiled_generation import STORE, compare, generate_by, twin
from parts import IMAGE_TOKEN, CachedEmbeddings, llava
from torch import Tensor

import aotc

model = llava()


def compile_model() -> None:
    text = aotc.load("llava-text", CachedEmbeddings(twin(model), batch=1, length=64).eval(), store=STORE)
    model.model.get_image_features = aotc.load("llava-vision", model.model, store=STORE)

    def step(ids: Tensor, start: Tensor, mm_encoder_outputs: Any = None, **_: Any) -> Tensor:
        embeddings = model.get_input_embeddings()(ids)
        if mm_encoder_outputs:  # in the prompt
            images = torch.cat(mm_encoder_outputs["image"].pooler_output)
            embeddings = embeddings.masked_scatter((ids == IMAGE_TOKEN)[..., None], images)
        return text(embeddings, start)

    generate_by(model, step)


prompt = torch.tensor([[5, *[IMAGE_TOKEN] * 16, 17, 42]])
compare(model, compile_model, input_ids=prompt, pixel_values=torch.randn(1, 3, 32, 32))
