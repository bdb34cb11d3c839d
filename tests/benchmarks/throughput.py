"""Publishing and reading, as ratios to the `zstd` command and to a plain copy of the same bytes. A script, not a test.

    python tests/benchmarks/throughput.py                            # 256 MB of torch's own library, one file and 64
    python tests/benchmarks/throughput.py --megabytes 64 --files 16
    python tests/benchmarks/throughput.py --source /some/library.so --folder /dev/shm

The bytes are the beginning of a real library. Every way works on the same files in the same folder, in turn, round
after round; what is printed is the least of the rounds, by the clock and of cores: what threads gain is in the first
alone, what other work on the machine costs mostly too. `zstd` runs with the store's level and one thread. "sha256"
reads and hashes the decompressed bytes once, on one thread: no reader that checks them can be quicker on one core.

- publish: from files to blobs in a new store, on the disk for good (fsync), as `zstd` is not asked to;
- read: from blobs to checked files in memory, as each load does; against `zstd -d`, and `zstd -d` and then sha256.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "store")]

import torch  # noqa: E402
from sample_artifacts import make_variant  # noqa: E402

from aotc.records import File  # noqa: E402
from aotc.runtime.libraries.files import read_all  # noqa: E402
from aotc.store.layout.blobs import DEFAULT_LEVEL  # noqa: E402
from aotc.store.layout.store import Store  # noqa: E402

MB = 1_000_000
CHUNK = 1 << 20


class Taken(NamedTuple):
    """Seconds by the clock, and of cores: the process's and its children's."""

    seconds: float
    cores: float


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

    # -- what is measured ----------------------------------------------------------------------------------------------

    def copy(self) -> Taken:
        folder = self.new_folder("copy")
        return timed(lambda: [shutil.copyfile(path, folder / path.name) for path in self.files], folder)

    def sha256(self) -> Taken:
        def hash_all() -> None:
            for path in self.files:
                with path.open("rb") as stream:
                    digest = hashlib.sha256()
                    while chunk := stream.read(CHUNK):
                        digest.update(chunk)

        return timed(hash_all)

    def zstd(self) -> Taken:
        folder = self.new_folder("zstd")
        return timed(lambda: zstd(f"-{DEFAULT_LEVEL}", "--output-dir-flat", folder, *self.files), folder)

    def unzstd(self, packed: Path) -> Taken:
        folder = self.new_folder("unzstd")
        return timed(lambda: zstd("-d", "--output-dir-flat", folder, *sorted(packed.iterdir())), folder)

    def publish(self) -> Taken:
        folder = self.new_folder("publish")
        store = Store.create(folder / "store")
        return timed(lambda: put_files(store, self.files), folder)

    def read(self, store: Store, files: list[File]) -> Taken:
        """Each file as a variant of its own, as the libraries of an artifact's buckets are."""
        variants = [make_variant((file,)) for file in files]
        return timed(lambda: read_all(variants, store.blobs))


def put_files(store: Store, paths: list[Path]) -> list[File]:
    return [store.blobs.put_file_zstd(path) for path in paths]


def zstd(*arguments: object) -> None:
    subprocess.run(["zstd", "-q", "--single-thread", *map(str, arguments)], check=True)


def timed(work: Callable[[], object], made: Path | None = None) -> Taken:
    """What was made is removed afterwards."""
    start, cores = time.perf_counter(), core_seconds()
    work()
    taken = Taken(time.perf_counter() - start, core_seconds() - cores)
    if made is not None:
        shutil.rmtree(made)
    return taken


def core_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(bench: Bench, rounds: int) -> None:
    store = Store.create(bench.folder / "store")
    files = put_files(store, bench.files)
    packed = bench.new_folder("packed")
    zstd(f"-{DEFAULT_LEVEL}", "--output-dir-flat", packed, *bench.files)
    ways: dict[str, Callable[[], Taken]] = {
        "copy": bench.copy,
        "sha256": bench.sha256,
        "zstd": bench.zstd,
        "publish": bench.publish,
        "zstd -d": lambda: bench.unzstd(packed),
        "read": lambda: bench.read(store, files),
    }
    seconds: dict[str, list[Taken]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name].append(way())
    report(bench, files, seconds)


def report(bench: Bench, files: list[File], seconds: dict[str, list[Taken]]) -> None:
    ratio = sum(file.blob_size for file in files) / bench.size
    print(f"\n{len(bench.files)} files, {bench.size / MB:.0f} MB in all; blobs are {ratio:.3f} of that")
    print(f"{'':14}{'s':>8}{'MB/s':>8}{'ms/MB':>8}{'core s':>8}  ratio of seconds (of core seconds)")
    best = {name: Taken(min(t.seconds for t in taken), min(t.cores for t in taken)) for name, taken in seconds.items()}
    best["zstd -d + sha256"] = Taken(*map(sum, zip(best["zstd -d"], best["sha256"], strict=True)))
    against = {
        "publish": ("zstd", "copy"),
        "read": ("zstd -d", "zstd -d + sha256", "copy"),
    }
    for name in seconds:
        taken = best[name]
        ratios = ", ".join(
            f"{taken.seconds / best[other].seconds:.2f} ({taken.cores / best[other].cores:.2f}) × {other}"
            for other in against.get(name, ())
        )
        speed = f"{bench.size / MB / taken.seconds:8.0f}{taken.seconds * 1e9 / bench.size:8.2f}"
        print(f"{name:14}{taken.seconds:8.2f}{speed}{taken.cores:8.2f}  {ratios}")


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
