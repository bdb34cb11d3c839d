"""`generate()` of models with a sliding window, in all layers or in one of two; with other caches, too."""

import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM

import aotc

SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 50,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}


def mistral():
    return MistralForCausalLM(MistralConfig(num_hidden_layers=1, **SMALL))


def gemma():
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(num_hidden_layers=2, head_dim=8, layer_types=layers, **SMALL))


def main():
    for make in (mistral, gemma):
        torch.manual_seed(0)
        model = aotc.compile(make().eval())
        prompt = torch.randint(0, 50, (1, 5))
        for given in ({}, {"cache_implementation": "static"}, {"cache": DynamicCache()}):
            options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0, **given}
            print(model.generate(prompt, **options).tolist())


if __name__ == "__main__":
    main()
