"""A Llama of 2 GB over two GPUs: first output and latency of aotc, of `torch.compile` in each rank, and of one GPU.

python tests/benchmarks/ranks.py
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "tensor_parallel")]
from model import Llama, OneRank  # noqa: E402

WORKS = ("aotc", "eager", "compile")
MANIFEST = """version: 1
defaults:
  mode: default
  dtype: bfloat16
  targets: [cuda]
  cuda_graphs: always
  graph_sizes: {seq: [128]}
  buckets:
    - {seq: 1}
    - {seq: {range: [2, 256], tune_at: 128}}
models:
"""
MODEL = """  MODEL:
    factory: tests/benchmarks/ranks.py:part
    PARALLEL
    inputs:
      tokens: {shape: [1, seq], dtype: int64, init: {randint: [0, 32000]}}
      start: {shape: [], dtype: int64, init: zeros}
"""


def part(group: Any = None) -> Llama:
    torch.manual_seed(0)
    return Llama(32000, 2048, 18, 16, 5632, 512, group or OneRank())


def work(what: str, store: str, began: float) -> dict[str, Any]:
    """In one rank: the seconds until the first output, and medians of both kinds of calls."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device, group = torch.device("cuda", rank), None
    torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("nccl", device_id=device, timeout=datetime.timedelta(seconds=120))
        group = dist.group.WORLD
    with torch.device(device):
        module = part(group).bfloat16().eval()
    run: Callable[..., Any] = module
    if what == "aotc":
        import aotc

        ranks = aotc.Ranks(group, timeout=60) if group else None
        run = aotc.load("ranks" if group else "whole", module, store=store, ranks=ranks)
    elif what == "compile":
        run = torch.compile(module)
    calls = {
        name: (torch.tensor([tokens], device=device), torch.tensor(0, device=device))
        for name, tokens in (("decode", [4]), ("prefill of 128", list(range(128))))
    }
    said: dict[str, Any] = {"what": what, "ranks": size}
    with torch.no_grad():
        run(*calls["decode"])
        torch.cuda.synchronize()
        said["first output, s"] = round(time.time() - began, 1)
        for name, call in calls.items():
            said[f"{name}, ms"] = round(median_ms(run, call, group), 2)
    return said


def median_ms(run: Callable[..., Any], call: tuple[Any, ...], group: Any, count: int = 40) -> float:
    times = []
    for number in range(8 + count):
        if number == 8 and group is not None:
            dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run(*call)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1000 * sorted(times[8:])[count // 2]


def start(what: str, ranks: int, store: Path, caches: Path) -> None:
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    script = [str(Path(__file__).resolve()), "--work", what, "--store", str(store), "--began", str(time.time())]
    # NVLink's multicast needs rights that a container may lack.
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches), "NCCL_NVLS_ENABLE": "0"}
    subprocess.run([sys.executable, *launcher, *script], env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, help="measure this in one rank (the script starts itself)")
    parser.add_argument("--store")
    parser.add_argument("--began", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.work:
        said = work(arguments.work, arguments.store, arguments.began)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(said), flush=True)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        manifest, store = Path(folder, "manifest.yaml"), Path(folder, "store")
        models = [("ranks", "parallel: {tensor: 2}"), ("whole", "cuda_graphs: always")]
        text = "".join(MODEL.replace("MODEL", name).replace("PARALLEL", line) for name, line in models)
        manifest.write_text(MANIFEST + text)
        command = [sys.executable, "-m", "aotc", "build", manifest, "--store", store, "--dummy-weights"]
        subprocess.run(command, check=True, stdout=sys.stderr, cwd=ROOT)
        for ranks in (2, 1):
            for what in WORKS:
                start(what, ranks, store, Path(folder, f"caches-{what}-{ranks}"))


if __name__ == "__main__":
    main()
