"""A training script like nanoGPT's `train.py`: batches that are sliced, a cosine schedule, evaluations, a sample."""

import math

import torch
from models import GPT

import aotc

batch_size, block_size, steps, lr = 4, 16, 12, 1e-2
data = torch.randint(0, 50, (2000,), generator=torch.Generator().manual_seed(0))


def get_batch(generator):
    at = torch.randint(len(data) - block_size - 1, (batch_size,), generator=generator)
    rows = torch.stack([data[i : i + block_size + 1] for i in at])
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    generator = torch.Generator().manual_seed(1)
    losses = [model(*get_batch(generator))[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


@torch.no_grad()
def sample(model, idx, count):
    model.eval()
    for _ in range(count):
        logits, _ = model(idx[:, -block_size:])
        idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    model.train()
    return idx


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(2)
    model = aotc.compile(GPT(), train=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        if step % 6 == 0:
            print(f"step {step}: val loss {estimate_loss(model):.5f}")
        _, loss = model(*get_batch(generator))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"iter {step}: loss {loss.item():.5f}")
    print(sample(model, data[None, :4], 20).tolist())


if __name__ == "__main__":
    main()
