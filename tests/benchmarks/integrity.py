"""Every change of a store is refused before a byte is mapped, or harmless: with counts. A script, not a test.

    python tests/benchmarks/integrity.py                          # all three; an hour on one core
    python tests/benchmarks/integrity.py small                    # every byte of a small artifact, all 255 other values
    python tests/benchmarks/integrity.py real --store aotc-store --ref quickstart    # every byte of a built one
    python tests/benchmarks/integrity.py large --changes 10000    # random changes of 20 MB, the same for one --seed

Each change is tried on all that `aotc.load` reads before it maps (`tests/store/damage.py`): a change is refused with an
AotcError, or harmless, where what is given is exactly the right bundle, record and bytes, or else a finding. A change
of a blob must be refused: harmless ones can only be in `index.json` and `oci-layout`.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "store")]

from damage import Sweep, changed, every_byte  # noqa: E402
from sample_artifacts import CREATED, make_artifact, make_variant, put_file, stored_artifact  # noqa: E402

from aotc.store.layout.publishing import publish  # noqa: E402
from aotc.store.layout.store import Store  # noqa: E402

MB = 1_000_000
REAL_VALUES = 1
"""Other values of each byte of a built artifact: its blobs have hundreds of thousands."""


def small(folder: Path, options: argparse.Namespace) -> int:
    store = Store.create(folder / "store")
    publish(store, "tiny", "latest", [stored_artifact(store, folder, (1,))], created=CREATED)
    return sweep_bytes(Sweep(store.path, "tiny"), 255)


def real(folder: Path, options: argparse.Namespace) -> int:
    copied = Path(shutil.copytree(options.store, folder / "store"))
    return sweep_bytes(Sweep(copied, options.ref), REAL_VALUES)


def sweep_bytes(sweep: Sweep, values: int) -> int:
    begin = time.perf_counter()
    for path in sweep.files:
        data = path.read_bytes()
        for position, value in every_byte(data, values):
            new = data[:position] + bytes([value]) + data[position + 1 :]
            sweep.try_bytes(path, new, f"byte {position} to {value}")
        print(f"  {path.name[:16]:18}{len(data):9} bytes, {time.perf_counter() - begin:6.0f} s", flush=True)
    return report(sweep, f"{values} other values of every byte")


def large(folder: Path, options: argparse.Namespace) -> int:
    sweep = large_sweep(folder, options)
    random, kinds = Random(options.seed), Counter[str]()
    others = [path.read_bytes() for path in sweep.files]
    blob = max(sweep.files, key=lambda path: path.stat().st_size)
    for number in range(options.changes):
        path = blob if random.random() < 0.7 else random.choice(sweep.files)
        what, new = changed(path.read_bytes(), random, others)
        kinds[what.split(" at ")[0]] += 1
        sweep.try_bytes(path, new, what)
        if number % 1000 == 999:
            print(f"  {number + 1} changes", flush=True)
    print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    return report(sweep, f"random changes of {blob.stat().st_size / MB:.1f} MB (seed {options.seed})")


def large_sweep(folder: Path, options: argparse.Namespace) -> Sweep:
    """A library of 20 MB: the beginning of torch's own, and bytes that cannot be compressed."""
    import torch

    with (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").open("rb") as stream:
        library = stream.read(12 * MB) + Random(options.seed).randbytes(8 * MB)
    store = Store.create(folder / "store")
    artifact = make_artifact((make_variant((put_file(store, folder, "model.so", library),)),))
    publish(store, "tiny", "latest", [artifact], created=CREATED)
    return Sweep(store.path, "tiny")


def report(sweep: Sweep, what: str) -> int:
    for finding in sweep.findings[:50]:
        print(f"FINDING {finding}")
    harmless = ", ".join(f"{count} in {name}" for name, count in sorted(sweep.harmless_in.items()))
    print(
        f"{what}: {sweep.tried} changes tried in {len(sweep.files)} files, {sweep.refused} refused, "
        f"{sweep.harmless} harmless ({harmless or 'none'}), {len(sweep.findings)} findings"
    )
    return len(sweep.findings)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("small", "real", "large"))
    parser.add_argument("--store", type=Path, default=Path("aotc-store"), help="of `real`")
    parser.add_argument("--ref", default="quickstart", help="of `real`")
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.disable()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    findings = 0
    for way in (small, large) if options.what is None else (globals()[options.what],):
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            findings += way(Path(folder), options)
        print(f"{way.__name__}: {time.perf_counter() - begin:.0f} s\n", flush=True)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
