"""Steps of optimizers that are fused or by all tensors at once, and those of `aotc.optim`."""

import torch
from models import GPT

import aotc

OPTIMIZERS = {
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
    "aotc AdamW": lambda parameters: aotc.optim.AdamW(parameters, lr=0.01),
}


def main():
    for name, optimizer_of in OPTIMIZERS.items():
        torch.manual_seed(0)
        data = torch.randint(0, 50, (4, 4, 17))
        model = aotc.compile(GPT(), train=True)
        optimizer = optimizer_of(model.parameters())
        for rows in data:
            _, loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{name}: {loss.item():.5f}")


if __name__ == "__main__":
    main()
