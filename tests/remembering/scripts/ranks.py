"""Data parallel over ranks, as torchrun starts them: `torchrun --nproc-per-node 2 ranks.py`."""

import torch
import torch.distributed as dist
from models import GPT
from torch.nn.parallel import DistributedDataParallel

import aotc


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = aotc.compile(GPT(), train=True)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    data = torch.randint(0, 50, (8, dist.get_world_size(), 4, 17))[:, dist.get_rank()]
    for rows in data:
        _, loss = parallel(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        print(f"{loss.item() / dist.get_world_size():.5f}")
    dist.barrier()  # a rank that ends while another still talks to it can end that one
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
