"""Publish and materialise, as ratios to the `zstd` command and to a plain copy of the same bytes. A script, not a test.

    python tests/benchmarks/throughput.py                            # 256 MB of torch's own library, one file and 64
    python tests/benchmarks/throughput.py --megabytes 64 --files 16
    python tests/benchmarks/throughput.py --source /some/library.so --folder /dev/shm

The bytes are the beginning of a real library. Every way works on the same files in the same folder, in turn, round
after round; what is printed is the quickest round of each, in MB/s of the decompressed bytes, and the ratios of these.
`zstd` runs with the store's level and one thread. "sha256" reads and hashes the decompressed bytes once on one thread:
no reader that checks them can be quicker on one core.

- publish: from files to blobs in a new store, on the disk for good (fsync), as `zstd` is not asked to;
- materialise: from blobs to hot copies, where there are none; against `zstd -d`, and `zstd -d` and then sha256;
- hot: the hot copies are there and are checked, as each load does.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from aotc.records import File
from aotc.store import HotCopies, Store
from aotc.store.blobs import DEFAULT_LEVEL

MB = 1_000_000
CHUNK = 1 << 20


class Bench:
    """The same bytes as files, as blobs of a store, and as files of the `zstd` command."""

    def __init__(self, source: Path, megabytes: int, count: int, folder: Path) -> None:
        self.folder = folder
        self.size = megabytes * MB // count * count
        self.files = self._split(source, count)
        self.rounds = 0

    def _split(self, source: Path, count: int) -> list[Path]:
        raw = self.folder / "raw"
        raw.mkdir()
        part = self.size // count
        paths = [raw / f"library-{number}.so" for number in range(count)]
        with source.open("rb") as stream:
            for path in paths:
                data = stream.read(part)
                if len(data) < part:
                    raise SystemExit(f"{source} has less than {self.size} bytes")
                path.write_bytes(data)
        return paths

    def new_folder(self, name: str) -> Path:
        self.rounds += 1
        path = self.folder / f"{name}-{self.rounds}"
        path.mkdir()
        return path

    # -- what is measured: each gives its seconds ---------------------------------------------------------------------

    def copy(self) -> float:
        folder = self.new_folder("copy")
        return timed(lambda: [shutil.copyfile(path, folder / path.name) for path in self.files], folder)

    def sha256(self) -> float:
        def hash_all() -> None:
            for path in self.files:
                with path.open("rb") as stream:
                    digest = hashlib.sha256()
                    while chunk := stream.read(CHUNK):
                        digest.update(chunk)

        return timed(hash_all)

    def zstd(self) -> float:
        folder = self.new_folder("zstd")
        return timed(lambda: zstd(f"-{DEFAULT_LEVEL}", "--output-dir-flat", folder, *self.files), folder)

    def unzstd(self, packed: Path) -> float:
        folder = self.new_folder("unzstd")
        return timed(lambda: zstd("-d", "--output-dir-flat", folder, *sorted(packed.iterdir())), folder)

    def publish(self) -> float:
        folder = self.new_folder("publish")
        store = Store.create(folder / "store")
        return timed(lambda: put_files(store, self.files), folder)

    def materialise(self, store: Store, files: list[File]) -> float:
        cache = self.new_folder("hot")
        return timed(lambda: materialise(cache, store, files), cache)

    def hot(self, cache: Path, store: Store, files: list[File]) -> float:
        return timed(lambda: materialise(cache, store, files))


def put_files(store: Store, paths: list[Path]) -> list[File]:
    return [store.blobs.put_file_zstd(path) for path in paths]


def materialise(cache: Path, store: Store, files: list[File]) -> None:
    """Each file as a variant of its own, as the libraries of an artifact's buckets are."""
    hot = HotCopies(cache)
    for file in files:
        hot.materialise([file], store.blobs)


def zstd(*arguments: object) -> None:
    subprocess.run(["zstd", "-q", "--single-thread", *map(str, arguments)], check=True)


def timed(work: Callable[[], object], made: Path | None = None) -> float:
    """Seconds; what was made is removed afterwards."""
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    if made is not None:
        shutil.rmtree(made)
    return seconds


def measure(bench: Bench, rounds: int) -> None:
    store = Store.create(bench.folder / "store")
    files = put_files(store, bench.files)
    packed, cache = bench.new_folder("packed"), bench.new_folder("cache")
    zstd(f"-{DEFAULT_LEVEL}", "--output-dir-flat", packed, *bench.files)
    materialise(cache, store, files)
    ways: dict[str, Callable[[], float]] = {
        "copy": bench.copy,
        "sha256": bench.sha256,
        "zstd": bench.zstd,
        "publish": bench.publish,
        "zstd -d": lambda: bench.unzstd(packed),
        "materialise": lambda: bench.materialise(store, files),
        "hot": lambda: bench.hot(cache, store, files),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way())
    report(bench, files, seconds)


def report(bench: Bench, files: list[File], seconds: dict[str, list[float]]) -> None:
    ratio = sum(file.blob_size for file in files) / bench.size
    print(f"\n{len(bench.files)} files, {bench.size / MB:.0f} MB in all; blobs are {ratio:.3f} of that")
    print(f"{'':14}{'s':>8}{'MB/s':>8}{'ms/MB':>8}  ratio of seconds")
    quickest = {name: min(taken) for name, taken in seconds.items()}
    quickest["zstd -d + sha256"] = quickest["zstd -d"] + quickest["sha256"]
    against = {
        "publish": ("zstd", "copy"),
        "materialise": ("zstd -d", "sha256", "zstd -d + sha256", "copy"),
        "hot": ("sha256", "copy"),
    }
    for name in seconds:
        taken = quickest[name]
        ratios = ", ".join(f"{taken / quickest[other]:.2f} × {other}" for other in against.get(name, ()))
        print(f"{name:14}{taken:8.2f}{bench.size / MB / taken:8.0f}{taken * 1e9 / bench.size:8.2f}  {ratios}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--files", type=int, default=64, help="how many the bytes are split into, after one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to work; else the temporary folder")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, level {DEFAULT_LEVEL}")
    for count in dict.fromkeys((1, options.files)):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(Bench(options.source, options.megabytes, count, Path(folder)), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
