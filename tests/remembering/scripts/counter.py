"""A model that counts its calls, in training and in evaluation."""

import torch
from models import Layer

import aotc


class Counting(Layer):
    def __init__(self, width: int = 8) -> None:
        super().__init__(width)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        self.steps += 1
        return super().forward(x)


def main():
    torch.manual_seed(0)
    data = torch.randn(8, 4, 8)
    model = aotc.compile(Counting(), train=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in data:
        loss = (model(rows) - rows).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.5f}")
    model.eval()
    with torch.no_grad():
        for rows in data[:3]:
            print(f"{model(rows).sum().item():.5f}")
    print(model.seen, model.steps.item())


if __name__ == "__main__":
    main()
