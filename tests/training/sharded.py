"""One rank of FSDP2 around a model of which regions are compiled: `sharded.py STORE DEVICE`, with the variables of
torchrun.

Prints a JSON line: by each parameter how far gradients and one step of SGD are from those of the whole model in eager,
over the batches of all ranks.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import aotc

sys.path.insert(0, str(Path(__file__).parent))
from trained_models import stack

DEVICE = torch.device(sys.argv[2], int(os.environ["RANK"]) if sys.argv[2] == "cuda" else None)


def ids(rank: int) -> torch.Tensor:
    return torch.randint(0, 10, (4, 8), generator=torch.Generator().manual_seed(rank)).to(DEVICE)


def main() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", device_id=DEVICE)
    else:
        dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = stack().train().to(DEVICE)
    eager = copy.deepcopy(module)
    compiled = aotc.load(f"{sys.argv[1]}#stack", module)
    for block in module.blocks:
        fully_shard(block)
    fully_shard(module)
    loss = compiled(ids(rank))
    loss.backward()
    torch.testing.assert_close(loss, eager(ids(rank)))
    sum(eager(ids(each)) / count for each in range(count)).backward()
    expected = dict(eager.named_parameters())
    found = dict(module.named_parameters())
    gradients = {
        name: float((each.grad.full_tensor() - expected[name].grad).abs().max())
        for name, each in found.items()
        if each.grad is not None
    }
    for model in (module, eager):
        torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1).step()
    steps = {name: float((each.full_tensor() - expected[name]).detach().abs().max()) for name, each in found.items()}
    after = compiled(ids(0)) - eager(ids(0))
    said = {
        "without": [name for name, each in expected.items() if (each.grad is None) != (found[name].grad is None)],
        "gradients": gradients,
        "steps": steps,
        "after": float(after.detach().abs()),
        "calls": compiled.stats().calls,
    }
    print(json.dumps(said), flush=True)
    dist.destroy_process_group()
    os._exit(0)  # torch's own end of FSDP2 with gloo aborts 1 of 40 processes, in eager too


if __name__ == "__main__":
    main()
