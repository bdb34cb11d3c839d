"""Checkpoints of a training: saved, and resumed by a new model and a new optimizer."""

import tempfile
from pathlib import Path

import torch
from models import GPT

import aotc


def begin():
    model = aotc.compile(GPT(), train=True)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, batches):
    for rows in batches:
        _, loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"{loss.item():.5f}")


def main():
    torch.manual_seed(0)
    data = torch.randint(0, 50, (8, 4, 17))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "checkpoint.pt")
        model, optimizer = begin()
        train(model, optimizer, data[:4])
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 4}, path)
        train(model, optimizer, data[4:])

        resumed, optimizer = begin()
        saved = torch.load(path)
        resumed.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(resumed, optimizer, data[saved["step"] :])


if __name__ == "__main__":
    main()
