"""`model.generate()` of transformers with compiled code: what the four examples of this folder have in common."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

FOLDER = Path(__file__).resolve().parent
STORE = FOLDER / "aotc-store"
sys.path.insert(0, str(FOLDER.parent))  # language_models.py

Step = Callable[..., Tensor]
"""From tokens `[batch, seq]`, the position of the first (an int64 tensor without axes), and whatever else `generate()`
passes, to the logits of the last token."""


def generate_by(model: Any, step: Step) -> None:
    """Let `model.generate()` call `step` in the place of the model's forward.

    `generate()` makes an empty cache, and counts tokens by it; the keys and values are in buffers of the compiled code.
    So its cache is given one number for each token.
    """

    @functools.wraps(model.forward)
    def forward(**inputs: Any) -> ModelOutput:
        name = next(name for name in ("cache", "past_key_values") if name in inputs)
        cache = inputs.pop(name)
        decoder_ids, ids = inputs.pop("decoder_input_ids", None), inputs.pop("input_ids", None)
        tokens = ids if decoder_ids is None else decoder_ids
        logits = step(tokens, torch.tensor(int(cache.get_seq_length())), **inputs)
        marks = torch.zeros(1, 1, tokens.shape[1], 1)
        getattr(cache, "self_attention_cache", cache).update(marks, marks, 0)
        return ModelOutput(logits=logits[:, None], **{name: cache})

    model.forward = forward


def twin(model: Any) -> Any:
    """A second module over the same tensors: compiled code is loaded for it, and refuses a forward that is replaced."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def compare(model: Any, compile_model: Callable[[], None], **inputs: Any) -> None:
    """Generate with eager, then with compiled code, and print both. Exits with an error where the tokens differ."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = model.generate(**inputs, **options)[0].tolist()
        compile_model()
        tokens = model.generate(**inputs, **options)[0].tolist()
    print(f"eager: {expected}\naotc:  {tokens}")
    if tokens != expected:
        sys.exit("the tokens differ")
