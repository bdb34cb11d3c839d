"""A loop with a float that varies: a number of Python, and the same as a tensor."""

import torch
from torch import Tensor, nn

import aotc


class Tempered(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.width = width
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        return (self.linear(x) / temperature).softmax(-1)


@torch.no_grad()
def main():
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = aotc.compile(Tempered().eval())
    for step in range(40):
        print(f"{model(x, torch.tensor(1.0 + step / 10))[0, 0].item():.5f}")
    for step in range(12):
        print(f"{model(x, 1.0 + step / 10)[0, 0].item():.5f}")


if __name__ == "__main__":
    main()
