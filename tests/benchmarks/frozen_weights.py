"""Frozen weights of a GPT with four buckets: store, load, and the memory of several processes. A script, not a test.

    python tests/benchmarks/frozen_weights.py                          # float32, 4 processes
    python tests/benchmarks/frozen_weights.py --dtype bfloat16 --processes 8 --work FOLDER

The processes load one after the other, call every bucket, and stay. When all have come so far, each gives its
/proc/self/smaps_rollup: PSS counts a page that several processes share once over all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = ((1, 32), (1, 128), (4, 32), (8, 64))


def child(store: Path) -> None:
    import torch

    import aotc

    torch.set_num_threads(1)
    aotc.load  # noqa: B018  imports what it needs
    start = time.perf_counter()
    compiled = aotc.load("gpt", store=store)
    seconds = time.perf_counter() - start
    for shape in BUCKETS:
        compiled(torch.randint(0, 1000, shape))
    print(json.dumps(seconds), flush=True)
    sys.stdin.readline()
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    print(json.dumps({name: int(lines[name].split()[0]) * 1024 / 1e6 for name in ("Rss", "Pss")}), flush=True)
    sys.stdin.readline()


def build(folder: Path, dtype: str) -> Path:
    model = {
        "factory": "examples.models:gpt",
        "kwargs": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 8000, "positions": 1024},
        "dtype": dtype,
        "mode": "default",
        "weights": "frozen",
        "inputs": {"input_ids": {"shape": ["batch", "seq"], "dtype": "int64", "init": {"randint": [0, 1000]}}},
        "buckets": [{"batch": batch, "seq": seq} for batch, seq in BUCKETS],
    }
    manifest, store = folder / f"{dtype}.yaml", folder / f"{dtype}-store"
    manifest.write_text(json.dumps({"version": 1, "models": {"gpt": model}}))
    command = [sys.executable, "-m", "aotc", "build", manifest, "--store", store, "--jobs", "1"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=sys.stderr)
    return store


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def start(store: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", __file__, "--child", str(store)]
    return subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def run(store: Path, processes: int) -> None:
    stored = sum(path.stat().st_size for path in (store / "blobs" / "sha256").iterdir())
    running, seconds, memory = [], [], []
    for _ in range(processes):
        running.append(start(store))
        seconds.append(json.loads(answer(running[-1])))
    for process in running:
        go_on(process)
        memory.append(json.loads(answer(process)))
    for process in running:
        go_on(process)
        process.wait()
    print(f"store        {stored / 1e6:8.0f} MB")
    print(f"load         {statistics.median(seconds):8.2f} s, the least {min(seconds):.2f} s")
    print(f"RSS of one   {statistics.median(each['Rss'] for each in memory):8.0f} MB")
    print(f"PSS of {processes:<4}  {sum(each['Pss'] for each in memory):8.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--work", type=Path, help="a folder that keeps the store; else a temporary one")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        run(build(folder, options.dtype), options.processes)


if __name__ == "__main__":
    main()
