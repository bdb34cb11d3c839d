"""Sentence embeddings: batches of sentences of many lengths, a mean over their tokens."""

import torch
from transformers import BertConfig, BertModel

import aotc


def batches(count):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        lengths = torch.randint(3, 30, (4,), generator=generator)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        yield {"input_ids": torch.randint(0, 50, mask.shape, generator=generator) * mask, "attention_mask": mask}


@torch.inference_mode()
def main():
    torch.manual_seed(0)
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    model = aotc.compile(BertModel(config).eval())
    for batch in batches(20):
        hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][..., None]
        embedded = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
        print(*(f"{value:.4f}" for value in embedded[:, 0].tolist()))


if __name__ == "__main__":
    main()
