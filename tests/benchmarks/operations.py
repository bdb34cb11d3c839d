"""What who runs builds and services meets: reloads for weeks, stores of thousands of units, builds that fail.

    python tests/benchmarks/operations.py loads --count 10000
    python tests/benchmarks/operations.py planning --stored 2000 --missing 50
    python tests/benchmarks/operations.py failing-build

`loads`: memory and mappings of a process that loads one bundle again and again, each load called and let go.
`planning`: seconds of CPU of `aotc build --dry-run`, beside one stored unit and beside many.
`failing-build`: a service that loads its tag anew for each request, while a build of that tag fails in one unit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parents[1]), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

MODEL = """
import torch

class Net(torch.nn.Linear):
    def forward(self, input):
        if input.shape[0] == 3:
            return super().forward(input).nonzero()[0].item()
        return super().forward(input)

def make():
    return Net(8, 8)
"""
"""Whose bucket of 3 cannot be built."""


def write(folder: Path, batches: Sequence[int]) -> Path:
    (folder / "model.py").write_text(MODEL)
    model = {
        "factory": "model.py:make",
        "mode": "default",
        "inputs": {"input": {"shape": ["batch", 8]}},
        "buckets": [{"batch": batch} for batch in batches],
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps({"version": 1, "models": {"net": model}}))
    return path


def build(manifest: Path, store: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", str(store), *more]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def loads(folder: Path, count: int) -> None:
    import torch

    from aotc import load

    assert build(write(folder, [2]), folder / "store").returncode == 0
    sys.path.insert(0, str(folder))
    from model import make  # type: ignore[import-not-found]

    device = "cuda" if torch.cuda.is_available() else "cpu"  # as `native` is
    module, x = make().eval().to(device), torch.ones(2, 8, device=device)
    began = time.perf_counter()
    for number in range(1, count + 1):
        with torch.no_grad():
            load("net", module, store=folder / "store")(x)
        if number in {10, count // 10, count // 2, count}:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            mappings = Path("/proc/self/maps").read_bytes().count(b"\n")
            descriptors = len(list(Path("/proc/self/fd").iterdir()))
            seconds = time.perf_counter() - began
            print(
                f"{number:6} loads: {pages * resource.getpagesize() >> 20} MiB, {mappings} mappings, "
                f"{descriptors} descriptors, {seconds:.0f} s",
                flush=True,
            )


def planning(folder: Path, stored: int, missing: int) -> None:
    assert build(write(folder, [1]), folder / "few").returncode == 0
    shutil.copytree(folder / "few", folder / "many")
    units = folder / "many" / ".aotc" / "units"
    (path,) = units.glob("*.json")
    record = json.loads(path.read_bytes())
    for number in range(stored - 1):  # as many builds of other models leave them
        other = {**record, "key": "sha256:" + sha256(str(number).encode()).hexdigest()}
        (units / f"{other['key'][7:]}.json").write_text(json.dumps(other, separators=(",", ":"), sort_keys=True))
    manifest = write(folder, range(4, 4 + missing))
    for store in ("few", "many"):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = build(manifest, folder / store, "--dry-run")
        after, took = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
        assert done.returncode == 0 and done.stdout.count("to compile\n") == missing, done.stdout + done.stderr
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        count = len(list((folder / store / ".aotc" / "units").glob("*.json")))
        print(
            f"planning of {missing} missing units beside {count} stored: {cpu:.1f} s of CPU, {took:.1f} s", flush=True
        )


SERVE = """
import sys, torch, aotc
from model import make
module, answers = make().eval(), [0, 0]
print("ready", flush=True)
while not answers[1] or sys.argv[2] not in open(sys.argv[3]).read():
    for number, size in enumerate((1, 2)):  # as a service that was started or reloaded a moment ago
        with torch.no_grad():
            aotc.load("net", module, store=sys.argv[1])(torch.ones(size, 8))
        answers[number] += 1
print("answers:", *answers)
"""


def failing_build(folder: Path) -> None:
    assert build(write(folder, [1, 2]), folder / "store").returncode == 0
    (folder / "ended").write_text("")
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parents[1]}:{folder}"}
    serve = [sys.executable, "-c", SERVE, str(folder / "store"), "ended", str(folder / "ended")]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=environment) as service:
        assert service.stdout is not None and service.stdout.readline() == "ready\n"
        done = build(write(folder, [2, 3, 4]), folder / "store")
        (folder / "ended").write_text("ended")
        said = service.stdout.read().strip()
    print(f"the build: exit code {done.returncode}")
    print(*(line for line in done.stderr.splitlines() if line.startswith(("not published", "  hint: what"))), sep="\n")
    print(f"the service, exit code {service.returncode}: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("loads").add_argument("--count", type=int, default=10_000)
    plan = commands.add_parser("planning")
    plan.add_argument("--stored", type=int, default=2_000)
    plan.add_argument("--missing", type=int, default=50)
    commands.add_parser("failing-build")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ["AOTC_CACHE_DIR"] = str(folder / "cache")
        if options.command == "loads":
            loads(folder, options.count)
        elif options.command == "planning":
            planning(folder, options.stored, options.missing)
        else:
            failing_build(folder)


if __name__ == "__main__":
    main()
