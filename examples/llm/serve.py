"""Greedy generation with a compiled language model: neither transformers nor a compiler is imported.

python serve.py 5 17 42 8
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

import aotc

FOLDER = Path(__file__).resolve().parent
compiled = aotc.load("llm", weights=FOLDER / "model.safetensors", store=FOLDER / "aotc-store")
cache = threading.Lock()
"""Both buckets write to the one key-value cache, so that one request is generated at a time."""


def generate(prompt: list[int], count: int) -> list[int]:
    """The `count` most likely tokens after `prompt`."""
    found: list[int] = []
    tokens, start = prompt, 0
    with cache:
        for _ in range(count):
            logits = compiled(torch.tensor([tokens]), torch.tensor(start))  # [1, vocabulary], of the last token
            start += len(tokens)
            tokens = [int(logits.argmax())]
            found += tokens
    return found


if __name__ == "__main__":
    print(*generate([int(token) for token in sys.argv[1:]], 16))
    for name, bucket in compiled.stats().buckets.items():
        print(f"{name}: {bucket.calls} calls", file=sys.stderr)
