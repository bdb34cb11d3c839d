"""Many processes load one artifact at once: seconds, and the memory of each. A script, not a test.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/many_processes.py                     # 64 processes
    python tests/benchmarks/many_processes.py --processes 16 --store aotc-store --ref quickstart

Each process is an interpreter of its own that imports torch, makes the module and waits; when all wait, all load. Every
answer is compared with eager's. The seconds are those of `aotc.load` alone, with all processes on this machine's cores.
The memory is each process's own /proc/self/smaps_rollup, before the loads and after a call of each bucket: RSS counts
a page that several processes share in each of them, PSS counts a share of it. A process holds its libraries alone.
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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900
"""Seconds until all processes must have reached a step."""
STEPS = ("memory before", "load", "memory after", "end")
"""A process begins each when all processes have done the one before."""


def child(store: Path, ref: str, folder: Path, number: int) -> None:
    import torch

    import aotc
    from examples.models import transformer_block

    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = transformer_block(width=256, heads=4).eval()
    inputs = [torch.randn(batch, 128, 256) for batch in (1, 4)]
    expected = [module(x) for x in inputs]
    aotc.load  # noqa: B018  imports what it needs
    meet(folder, "memory before", number)
    before = memory()
    meet(folder, "load", number)
    start = time.perf_counter()
    compiled = aotc.load(ref, module, store=store)
    seconds = time.perf_counter() - start
    right = all(torch.allclose(compiled(x), y, atol=1e-4) for x, y in zip(inputs, expected, strict=True))
    meet(folder, "memory after", number)
    after = memory()
    meet(folder, "end", number)
    print(json.dumps({"seconds": seconds, "right": right, "before": before, "after": after}))


def meet(folder: Path, step: str, number: int) -> None:
    """Wait until every process has come here."""
    (folder / f"{step} {number}").touch()
    while not (folder / step).exists():
        time.sleep(0.002)


def memory() -> dict[str, float]:
    """MB of this process."""
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return {name: int(lines[name].split()[0]) * 1024 / 1e6 for name in ("Rss", "Pss")}


def run(options: argparse.Namespace, folder: Path) -> int:
    command = [sys.executable, "-W", "ignore", __file__, "--folder", str(folder), "--store"]
    command += [str(options.store.resolve()), "--ref", options.ref, "--child"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(options.processes)
    ]
    try:
        for step in STEPS:
            wait_for(folder, f"{step} *", running)
            (folder / step).touch()
        answers = [json.loads(process.communicate(timeout=PATIENCE)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
    return report(answers)


def wait_for(folder: Path, pattern: str, running: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob(pattern))) < len(running):
        if time.monotonic() > deadline or any(process.poll() for process in running):
            raise SystemExit(f"a process has not come to {pattern!r}")
        time.sleep(0.05)


def report(answers: list[dict[str, Any]]) -> int:
    right = sum(answer["right"] for answer in answers)
    print(f"{len(answers)} processes, {right} of them right; the least, the median and the most:")
    print(f"load {spread((answer['seconds'] for answer in answers), '.3f')} s")
    for name in ("Rss", "Pss"):
        whole = spread((answer["after"][name] for answer in answers), ".0f")
        added = spread((answer["after"][name] - answer["before"][name] for answer in answers), ".1f")
        print(f"{name.upper()} of a process {whole} MB, of which load and calls {added}")
    return int(right < len(answers))


def spread(values: Iterable[float], form: str) -> str:
    ordered = sorted(values)
    return ", ".join(format(value, form) for value in (ordered[0], statistics.median(ordered), ordered[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--store", type=Path, default=Path("aotc-store"))
    parser.add_argument("--ref", default="quickstart")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.store, options.ref, options.folder, options.child)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
