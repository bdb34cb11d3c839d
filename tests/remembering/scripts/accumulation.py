"""Gradient accumulation: four micro batches a step."""

import torch
from models import GPT

import aotc


def main():
    torch.manual_seed(0)
    data = torch.randint(0, 50, (12, 4, 17))
    model = aotc.compile(GPT(), train=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, rows in enumerate(data):
        _, loss = model(rows[:, :-1], rows[:, 1:])
        (loss / 4).backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        print(f"{loss.item():.5f}")


if __name__ == "__main__":
    main()
