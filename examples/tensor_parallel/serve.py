"""Greedy generation by all ranks: `torchrun --nproc-per-node=2 serve.py 5 17 42 8`. Rank 0 prints."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from model import llama

import aotc

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
group = dist.group.WORLD
store = Path(__file__).resolve().parent / "aotc-store"
compiled = aotc.load("llama", llama(group=group).eval().to(device), store=store, ranks=aotc.Ranks(group, timeout=60))

tokens, start, found = [int(token) for token in sys.argv[1:]], 0, []
with torch.no_grad():
    for _ in range(16):
        logits = compiled(torch.tensor([tokens], device=device), torch.tensor(start, device=device))
        start += len(tokens)
        tokens = [int(logits.argmax())]  # the same on every rank: the sums are
        found += tokens
if group.rank() == 0:
    print(*found)
dist.destroy_process_group()
