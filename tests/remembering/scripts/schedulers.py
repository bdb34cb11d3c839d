"""Schedulers of the learning rate, one after the other, and one that looks at the loss."""

import torch
from models import GPT
from torch.optim import lr_scheduler

import aotc


def main():
    torch.manual_seed(0)
    data = torch.randint(0, 50, (10, 4, 17))
    model = aotc.compile(GPT(), train=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 7)], [3])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for rows in data:
        _, loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        plateau.step(loss.item())
        print(f"{loss.item():.5f} at {optimizer.param_groups[0]['lr']:.6f}")


if __name__ == "__main__":
    main()
