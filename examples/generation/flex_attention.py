"""`generate()` of a causal language model with FlexAttention: its mask over the cache is part of the compiled code."""

from __future__ import annotations

import torch
from compiled_generation import STORE, compare, generate_by, twin
from parts import CachedLM, llama_flex

import aotc

model = llama_flex()


def compile_model() -> None:
    compiled = aotc.load("llama-flex", CachedLM(twin(model), batch=1, length=64).eval(), store=STORE)
    generate_by(model, lambda ids, start, **_: compiled(ids, start))


compare(model, compile_model, input_ids=torch.tensor([[5, 17, 42, 8, 23]]))
