"""`generate()` of a causal model: with a cache that grows, with a static one, greedy and sampled."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import aotc


def main():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    model = aotc.compile(LlamaForCausalLM(config).eval())
    prompt = torch.randint(0, 50, (1, 5))
    for given in ({}, {"cache_implementation": "static"}, {"do_sample": True, "temperature": 0.8}):
        for _ in range(2):
            torch.manual_seed(1)
            options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, **given}
            print(model.generate(prompt, **options).tolist())


if __name__ == "__main__":
    main()
