"""A loop by accelerate in mixed precision, with accumulation and an evaluation."""

import torch
from accelerate import Accelerator
from models import ConvNet

import aotc


def main():
    torch.manual_seed(0)
    rows = torch.utils.data.TensorDataset(torch.randn(32, 3, 16, 16), torch.randint(0, 5, (32,)))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    model = aotc.compile(ConvNet(), train=True)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05), torch.utils.data.DataLoader(rows, batch_size=4)
    )
    for images, labels in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        print(f"{loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        for images, labels in loader:
            print(f"{torch.nn.functional.cross_entropy(model(images), labels).item():.3f}")


if __name__ == "__main__":
    main()
