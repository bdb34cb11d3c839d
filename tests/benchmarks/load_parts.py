"""Where the time of a load goes: an artifact of many buckets, part by part. A script, not a test.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/load_parts.py                         # 64 buckets
    python tests/benchmarks/load_parts.py --buckets 256 --pad 5000000 --store aotc-store --rounds 9

The artifact is made of the quickstart's: each bucket has the library of its first one with other bytes at the end, so
that all differ as those of real buckets do (`--pad` bytes more make them as large as one likes). Each round is a fresh
process that imports torch, makes the module and then loads; the files were read before, so they are in the page cache.
What is printed is the least of the rounds, in milliseconds by the clock: everything that a load does is in one part.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

PARTS = {
    "read_bundle": "read the bundle",
    "read_artifact": "read and decode the record",
    "select_artifact": "compare with this machine",
    "check_module": "compare the module",
    "bind_state": "bind the module's tensors",
    "read_all": "read, decompress and check the files",
    "open_library": "map the libraries",
    "Compiled": "prepare dispatch and guards",
}


def make_store(source: Path, folder: Path, buckets: int, pad: int) -> tuple[Path, int]:
    """A store with the artifact of many buckets, and the bytes of its libraries."""
    import msgspec
    from doctoring import artifact_of, copy_store, library_bytes, with_library

    from aotc.store.layout.publishing import publish

    store = copy_store(source, folder)
    artifact = artifact_of(store, "quickstart")
    first = artifact.variants[0]
    library = library_bytes(store, first)
    variants = []
    for number in range(buckets):
        bytes_of_its_own = number.to_bytes(8, "little") * (pad // 8 + 1)
        variant = with_library(store, first, library + bytes_of_its_own)
        variants.append(msgspec.structs.replace(variant, bucket={**first.bucket, "batch": number + 1}))
    many = msgspec.structs.replace(artifact, variants=tuple(variants))
    publish(store, "quickstart", "many", [many], created="2026-01-02T03:04:05Z")
    return store.path, buckets * len(library + bytes_of_its_own)


def child(store: Path) -> None:
    """Load once, and print the milliseconds of each part."""
    import torch

    import aotc
    from examples.models import transformer_block

    load = aotc.load
    taken = dict.fromkeys(PARTS, 0.0)
    for name in PARTS:
        wrap(load.__globals__, name, taken)
    torch.manual_seed(0)
    module = transformer_block(width=256, heads=4).eval()
    start = time.perf_counter()
    load("quickstart:many", module, store=store)
    print(json.dumps({**taken, "all": (time.perf_counter() - start) * 1000}))


def wrap(functions: dict[str, Any], name: str, taken: dict[str, float]) -> None:
    real: Callable[..., Any] = functions[name]

    def timed(*arguments: Any, **options: Any) -> Any:
        start, others = time.perf_counter(), sum(taken.values())
        try:
            return real(*arguments, **options)
        finally:  # parts that it has called count for themselves
            taken[name] += (time.perf_counter() - start) * 1000 - (sum(taken.values()) - others)

    functions[name] = timed


def run(options: argparse.Namespace, folder: Path) -> None:
    store, size = make_store(options.store, folder, options.buckets, options.pad)
    command = [sys.executable, "-W", "ignore", __file__, "--store", str(store), "--child"]
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        ran = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        rounds.append(json.loads(ran.stdout.splitlines()[-1]))
    megabytes = size / 1e6
    print(f"{options.buckets} buckets, {megabytes:.0f} MB of libraries, {os.cpu_count()} cores, {len(rounds)} rounds")
    quickest = {name: min(one[name] for one in rounds) for name in rounds[0]}
    rest = min(one["all"] - sum(one[name] for name in PARTS) for one in rounds)
    for name, what in PARTS.items():
        print(f"  {what:36}{quickest[name]:8.1f} ms{quickest[name] / megabytes:8.2f} ms/MB")
    print(f"  {'the rest':36}{rest:8.1f} ms")
    print(f"  {'all':36}{quickest['all']:8.1f} ms{quickest['all'] / megabytes:8.2f} ms/MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("aotc-store"))
    parser.add_argument("--buckets", type=int, default=64)
    parser.add_argument("--pad", type=int, default=0, help="bytes that each library is made larger by")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.store)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
