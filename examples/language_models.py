"""Decoder-only language models of transformers with a cache that stays where it is, for `manifests/llm.yaml`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import StaticLayer


class CachedLM(nn.Module):
    """A causal language model and its key-value cache, which are buffers: written in place, kept between calls.

    `forward` takes token ids `[batch, seq]` and the position of the first of them, an int64 tensor without axes, and
    gives the logits of the last one, `[batch, vocabulary]`. A prompt starts at 0, which forgets what was there; each
    further token starts at the number of those before it. There is room for `length` tokens, also in layers that look
    at a window of them: a cache of the window alone counts its tokens in Python. What convolutions keep of the tokens
    before is kept, too; recurrent states are not.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        self.cache = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=length)
        for index, layer in enumerate(self.cache.layers):
            if getattr(layer, "is_sliding", False):
                self.cache.layers[index] = StaticLayer(max_cache_len=length)
        with torch.no_grad():  # one token, which says how large the keys and values of each layer are
            self.logits(**self.one_token(batch))
        for index, layer in enumerate(self.cache.layers):
            if any(state is not None for state in getattr(layer, "recurrent_states", {}).values()):
                raise ValueError(
                    f"layer {index} of {type(model).__name__} keeps recurrent states, which are not buffers"
                )
            for kind, held in _tensors_of(layer).items():
                self.register_buffer(f"{kind}_{index}", torch.zeros_like(held), persistent=False)

    def one_token(self, batch: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(batch, 1, dtype=torch.int64, device=self.model.device)}

    def logits(self, **inputs: Any) -> Tensor:
        """Of the last token, by the model's own forward."""
        result = self.model(**inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return result.logits[:, -1]

    def forward(self, input_ids: Tensor, start: Tensor) -> Tensor:
        return self.logits(input_ids=input_ids, position_ids=self.begin(start, input_ids))

    def begin(self, start: Tensor, tokens: Tensor) -> Tensor:
        """Let the cache be the buffers, with `start` tokens in it. Returns the positions of `tokens`, `[1, seq]`."""
        for index, layer in enumerate(self.cache.layers):
            # The buffers themselves, wherever `.to()` has moved them, and a length that is this call's own.
            for kind in _tensors_of(layer):
                held = getattr(self, f"{kind}_{index}")
                layer.dtype, layer.device, layer.is_initialized = held.dtype, held.device, True
                if kind in ("keys", "values"):
                    setattr(layer, kind, held)
                    layer.cumulative_length = start.clone()
                else:
                    held.copy_(held.where(start > 0, 0.0))
                    layer.conv_states[int(kind.removeprefix("conv"))] = held
        return (start + torch.arange(tokens.shape[1], device=tokens.device)).unsqueeze(0)


class TokenLM(CachedLM):
    """The same for one text, and it chooses the next token: logits stay where the code runs.

    `forward` also takes a temperature (float32, at 0 the likeliest token is chosen) and a seed (int64), both without
    axes, and gives the token, int64 `[1]`.
    """

    def forward(self, input_ids: Tensor, start: Tensor, temperature: Tensor, seed: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(input_ids, start)[0].float()
        return sampled_token(logits, temperature, seed, start + input_ids.shape[1])


class CachedEmbeddings(CachedLM):
    """The same over `[batch, seq, width]`, embeddings of tokens and of what stands among them, as images."""

    def one_token(self, batch: int) -> dict[str, Any]:
        return {"inputs_embeds": self.model.get_input_embeddings()(super().one_token(batch)["input_ids"])}

    def forward(self, inputs_embeds: Tensor, start: Tensor) -> Tensor:
        return self.logits(inputs_embeds=inputs_embeds, position_ids=self.begin(start, inputs_embeds))


class CachedDecoder(CachedLM):
    """The decoder of an encoder-decoder: `forward` takes the encoder's `[batch, source, width]` as well.

    The cache holds the decoder's own keys and values. Those of the encoder's states are computed in each call.
    """

    def one_token(self, batch: int) -> dict[str, Any]:
        width = self.model.config.hidden_size
        return {**super().one_token(batch), "encoded": torch.zeros(batch, 2, width, device=self.model.device)}

    def logits(self, **inputs: Any) -> Tensor:
        result = self.model(
            decoder_input_ids=inputs["input_ids"],
            encoder_outputs=(inputs["encoded"],),
            past_key_values=EncoderDecoderCache(self.cache, DynamicCache()),
            use_cache=True,
        )
        return result.logits[:, -1]

    def forward(self, input_ids: Tensor, start: Tensor, encoded: Tensor) -> Tensor:  # type: ignore[override]
        self.begin(start, input_ids)
        return self.logits(input_ids=input_ids, encoded=encoded)


def sampled_token(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """A token by `softmax(logits / temperature)`, int64 `[1]`; `logits` are of one text, float32 `[vocabulary]`.

    Gumbel noise is added to the logits, and the greatest is taken. Code without torch has no random numbers: the noise
    is a hash of the seed, the position and the token's number, so that a text can be repeated on any machine.
    """
    tokens = torch.arange(len(logits), device=logits.device)
    key = _hashed(_hashed(_hashed(seed) ^ (seed >> 32)) ^ position)
    uniform = (_hashed(_hashed(tokens) ^ key).float() + 0.5) * ((1 - 2**-24) / 2**32)  # within (0, 1), finest near 0
    scores = logits - temperature * torch.log(-torch.log1p(-uniform))
    # The greatest of each row, then of the rows: a GPU computes rows at once, and one long row slowly.
    rows = pad(scores, (0, -len(scores) % ROWS), value=-torch.inf).view(ROWS, -1)
    greatest, columns = rows.max(dim=1)
    row = greatest.argmax(dim=0, keepdim=True)
    return row * rows.shape[1] + columns[row]


ROWS = 256
_LOW = 0xFFFFFFFF


def _hashed(number: Tensor) -> Tensor:
    """32 bits of the lower 32 of an int64, by Chris Wellons' `lowbias32`; a sum first, since its 0 would stay 0. No
    product overflows: a factor is less by 2**32 than there, and so are the bits that count."""
    number = ((number & _LOW) + 0x9E3779B9) & _LOW
    number = ((number ^ (number >> 16)) * 0x7FEB352D) & _LOW
    number = ((number ^ (number >> 15)) * (0x846CA68B - 2**32)) & _LOW
    return number ^ (number >> 16)


def _tensors_of(layer: Any) -> dict[str, Tensor]:
    """What a layer of a cache holds: keys and values, or states of convolutions; nothing where it uses another's."""
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    convolved = {f"conv{number}": state for number, state in getattr(layer, "conv_states", {}).items()}
    return {kind: held for kind, held in {"keys": keys, "values": values, **convolved}.items() if held is not None}


def cached_lm(config: Any, batch: int = 1, length: int = 1024) -> CachedLM:
    """The causal language model of a configuration, with room for `batch` × `length` tokens."""
    return CachedLM(AutoModelForCausalLM.from_config(config), batch, length)


def token_lm(config: Any, length: int = 1024) -> TokenLM:
    """The same, which chooses tokens, for one text of at most `length` tokens."""
    return TokenLM(AutoModelForCausalLM.from_config(config), 1, length)
