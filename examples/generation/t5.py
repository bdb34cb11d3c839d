"""`generate()` of T5: the compiled encoder is in its place, and each token is a call of the compiled decoder."""

from __future__ import annotations

import torch
from compiled_generation import STORE, compare, generate_by, twin
from parts import CachedDecoder, t5

import aotc

model = t5()


def compile_model() -> None:
    decoder = aotc.load("t5-decoder", CachedDecoder(twin(model), batch=1, length=64).eval(), store=STORE)
    aotc.attach(model, STORE, models={"encoder": "t5-encoder"})
    generate_by(model, lambda ids, start, encoder_outputs, **_: decoder(ids, start, encoder_outputs[0]))


ids = torch.tensor([[5, 17, 42, 8, 23, 77, 4, 9, 1]])
compare(model, compile_model, input_ids=ids, attention_mask=torch.ones_like(ids))  # as a tokenizer gives them
