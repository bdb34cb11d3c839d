"""Many processes load one artifact at once on a host that has none of it hot. A script, not a test.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/many_processes.py                     # 64 processes
    python tests/benchmarks/many_processes.py --processes 16 --store aotc-store --ref quickstart --rounds 3

Each process is an interpreter of its own that imports torch, makes the module and waits; when all wait, all load. Every
answer is compared with eager's. A decompression is counted where it happens: each process wraps the zstd decompressor
that `aotc.store.blobs` uses, and writes down every frame that it reads. The seconds are those of `aotc.load` alone,
with all processes on this machine's cores: the quickest, the median and the slowest.
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
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 900
"""Seconds until all processes must be ready, and until all must be done."""


def child(store: Path, ref: str, folder: Path, number: int, rounds: int) -> None:
    import torch

    import aotc
    from aotc.store import blobs
    from examples.models import transformer_block

    frames = 0
    real = blobs.zstandard

    class Counting:
        """The module zstandard, with a decompressor that counts."""

        ZstdError = real.ZstdError

        class ZstdDecompressor:
            def __init__(self, **options: Any) -> None:
                self._real = real.ZstdDecompressor(**options)

            def stream_reader(self, *arguments: Any, **options: Any) -> Any:
                nonlocal frames
                frames += 1
                return self._real.stream_reader(*arguments, **options)

    blobs.zstandard = Counting  # type: ignore[assignment]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = transformer_block(width=256, heads=4).eval()
    inputs = [torch.randn(batch, 128, 256) for batch in (1, 4)]
    expected = [module(x) for x in inputs]
    aotc.load  # noqa: B018  imports what it needs
    answers = []
    for turn in range(rounds):
        (folder / f"ready-{turn}-{number}").touch()
        while not (folder / f"go-{turn}").exists():
            time.sleep(0.002)
        frames = 0
        start = time.perf_counter()
        compiled = aotc.load(ref, module, store=store, cache=folder / f"hot-{turn}")
        seconds = time.perf_counter() - start
        right = all(torch.allclose(compiled(x), y, atol=1e-4) for x, y in zip(inputs, expected, strict=True))
        answers.append({"seconds": seconds, "frames": frames, "right": right})
    print(json.dumps(answers))


def run(options: argparse.Namespace, folder: Path) -> int:
    command = [sys.executable, "-W", "ignore", __file__, "--folder", str(folder), "--rounds", str(options.rounds)]
    command += ["--store", str(options.store.resolve()), "--ref", options.ref, "--child"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(options.processes)
    ]
    try:
        for turn in range(options.rounds):
            wait_for(folder, f"ready-{turn}-*", running)
            (folder / f"go-{turn}").touch()
        answers = [json.loads(process.communicate(timeout=PATIENCE)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
    failed = 0
    for turn in range(options.rounds):
        failed += report([answer[turn] for answer in answers], folder / f"hot-{turn}" / "hot-v1")
    return 1 if failed else 0


def wait_for(folder: Path, pattern: str, running: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(list(folder.glob(pattern))) < len(running):
        if time.monotonic() > deadline or any(process.poll() for process in running):
            raise SystemExit("a process failed before it was ready")
        time.sleep(0.05)


def report(answers: list[dict[str, Any]], hot: Path) -> int:
    files = [path for path in (hot / "files" / "sha256").iterdir() if not path.name.startswith(".tmp-")]
    frames = sum(answer["frames"] for answer in answers)
    by_process = Counter(answer["frames"] for answer in answers)
    seconds = sorted(answer["seconds"] for answer in answers)
    right = sum(answer["right"] for answer in answers)
    left = list(hot.rglob(".tmp-*"))
    print(
        f"{len(answers)} processes: {right} right, {len(files)} blobs, {frames} decompressions "
        f"({', '.join(f'{count} processes did {did}' for did, count in sorted(by_process.items()))}), "
        f"{len(left)} temporaries left; load {seconds[0]:.3f} s, {statistics.median(seconds):.3f}, {seconds[-1]:.3f}"
    )
    return int(right < len(answers) or frames != len(files) or bool(left))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--store", type=Path, default=Path("aotc-store"))
    parser.add_argument("--ref", default="quickstart")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(options.store, options.ref, options.folder, options.child, options.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
