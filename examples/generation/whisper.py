"""`generate()` of Whisper: the compiled encoder takes the spectrogram, and each token is a call of the decoder."""

from __future__ import annotations

import torch
from compiled_generation import STORE, compare, generate_by, twin
from parts import CachedDecoder, whisper

import aotc

model = whisper()


def compile_model() -> None:
    decoder = aotc.load("whisper-decoder", CachedDecoder(twin(model), batch=1, length=64).eval(), store=STORE)
    aotc.attach(model, STORE, models={"model.encoder": "whisper-encoder"})
    generate_by(model, lambda ids, start, encoder_outputs, **_: decoder(ids, start, encoder_outputs[0]))


compare(model, compile_model, input_features=torch.randn(1, 16, 100))
