"""Automatic mixed precision: autocast around the forward, a scaler around the backward."""

import torch
from models import GPT

import aotc


def main():
    torch.manual_seed(0)
    data = torch.randint(0, 50, (8, 4, 17))
    model = aotc.compile(GPT(), train=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for rows in data:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _, loss = model(rows[:, :-1], rows[:, 1:])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"{loss.item():.3f}")
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        print(f"{model(data[0, :, :-1], data[0, :, 1:])[1].item():.3f}")


if __name__ == "__main__":
    main()
