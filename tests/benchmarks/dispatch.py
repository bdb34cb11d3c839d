"""What a call costs beyond the compiled code: dispatch, guards, padding. A script, not a test: timings fail nothing.

    python tests/benchmarks/dispatch.py                        # two minutes, one of them a compile
    python tests/benchmarks/dispatch.py --rounds 200 --json

The model is `x + 1` on 8 elements, so that nearly all of a call is overhead. It is compiled once, with a range; then
artifacts of 1, 10 and 1,000 fixed buckets are put together whose variants all name that one library, which is right at
every size. The callables are timed in turn, round after round, in one process and one thread:

- runner: `torch._C._aoti`'s runner on the library, with no check of anything; what overhead is measured against;
- C interface: `aotc.runtime.libraries.library.CLibrary`, which a callable uses on a CPU: it releases the GIL;
- exact, padded: an aotc callable at a request that is a bucket's size, or pads into it (7 elements to 8);
- exact, every bucket in turn: the same over all buckets, so nothing stays in the CPU's caches;
- torch.compile: `dynamic=False`, warm, so its guards are checked and nothing is compiled; and eager.

A figure is that of the quickest tenth of the rounds, so that what else the machine does counts little.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SIZE, STEP = 8, 2
MANIFEST = """\
version: 1
models:
  trivial:
    factory: trivial.py:Trivial
    inputs: {x: {shape: [n], pad: {n: 0}}}
    buckets: [{n: {range: [2, 4096], tune_at: 8}}]
"""
MODEL = """\
from torch import nn


class Trivial(nn.Module):
    def forward(self, x):
        return x + 1
"""


class Figures(NamedTuple):
    """Microseconds per call of each way, one for each round."""

    rounds: dict[str, list[float]]

    def of(self, way: str) -> float:
        """The round of the quickest tenth: what a call costs where nothing else runs meanwhile."""
        return statistics.quantiles(self.rounds[way], n=10, method="inclusive")[0]

    def overhead(self, way: str) -> float:
        return self.of(way) - self.of("runner")


def build(folder: Path) -> Path:
    """The store with the one unit; compiled unless the folder holds it."""
    (folder / "trivial.py").write_text(MODEL)
    (folder / "manifest.yaml").write_text(MANIFEST)
    store = folder / "store"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "aotc", "build", str(folder / "manifest.yaml"), "--store", str(store)]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return store


def make_callables(folder: Path, store: Path, counts: Sequence[int]) -> dict[str, Callable[[], object]]:
    """Each way by name, ready to be called without arguments."""
    sys.path.insert(0, str(folder))
    import msgspec
    import torch
    from trivial import Trivial

    from aotc.records import Output
    from aotc.runtime.libraries.files import FilesInMemory
    from aotc.runtime.libraries.library import CLibrary
    from aotc.runtime.load import bind_artifact, compiled_module
    from aotc.runtime.select import Chosen
    from aotc.store.layout.bundle import read_artifact, read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference

    opened = Store.open(store)
    (entry,) = read_bundle(opened, parse_reference("trivial")).artifacts
    artifact = read_artifact(opened, entry.digest)
    (variant,) = artifact.variants
    files = FilesInMemory(variant, opened.blobs)
    module = Trivial().eval()

    def callable_of(count: int) -> Any:
        variants = tuple(
            msgspec.structs.replace(
                variant, bucket={"n": SIZE + STEP * index}, conditions=(), outputs=(Output(index=0, dims=("n",)),)
            )
            for index in range(count)
        )
        chosen = Chosen(
            msgspec.structs.replace(artifact, variants=variants),
            torch.device("cpu"),
            files_of=lambda _: files,
            read_file=lambda file: opened.blobs.load(file, 1 << 20),
        )
        call = bind_artifact(chosen, module)
        return compiled_module(call)

    x, short = torch.randn(SIZE), torch.randn(SIZE - 1)
    with files.opened() as path:
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(path, 1)
        c_library = CLibrary(path, 1)
    compiled_by_torch = torch.compile(module, dynamic=False, fullgraph=True)
    ways: dict[str, Callable[[], object]] = {
        "runner": lambda: runner.run([x]),
        "C interface": lambda: c_library.run((x,)),
        "eager": lambda: module(x),
        "torch.compile": lambda: compiled_by_torch(x),
    }
    for count in counts:
        compiled = callable_of(count)
        ways[f"exact, {count}"] = lambda compiled=compiled: compiled(x)  # type: ignore[misc]
        ways[f"padded, {count}"] = lambda compiled=compiled: compiled(short)  # type: ignore[misc]
        if count > 1:
            inputs = [torch.randn(SIZE + STEP * index) for index in range(count)]
            ways[f"in turn, {count}"] = _in_turn(compiled, inputs)
        assert torch.equal(compiled(x), x + 1) and torch.equal(compiled(short), short + 1)
    return ways


def _in_turn(compiled: Any, inputs: list[Any]) -> Callable[[], object]:
    position = 0

    def call() -> object:
        nonlocal position
        position = (position + 1) % len(inputs)
        return compiled(inputs[position])

    return call


def measure(ways: dict[str, Callable[[], object]], rounds: int, calls: int) -> Figures:
    """Time every way in each round, `calls` calls at a time, in an order that turns with the rounds."""
    figures: dict[str, list[float]] = {name: [] for name in ways}
    for call in ways.values():
        for _ in range(2000):
            call()
    names = list(ways)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            call = ways[name]
            began = time.perf_counter_ns()
            for _ in range(calls):
                call()
            figures[name].append((time.perf_counter_ns() - began) / calls / 1000)
    return Figures(figures)


def ratios(figures: Figures, counts: Sequence[int]) -> dict[str, float]:
    """The two that are required (below 1, and at most 1.2), and the padded form of the second."""
    few, many = counts[0], counts[-1]
    return {
        f"overhead, exact with {few} / torch.compile": figures.overhead(f"exact, {few}")
        / figures.overhead("torch.compile"),
        f"call, exact with {many} / with {few}": figures.of(f"exact, {many}") / figures.of(f"exact, {few}"),
        f"call, padded with {many} / with {few}": figures.of(f"padded, {many}") / figures.of(f"padded, {few}"),
    }


def show(figures: Figures, found: dict[str, float]) -> None:
    print("| way | µs per call | over the runner |\n|---|---|---|")
    for way in figures.rounds:
        label = way.replace("in turn", "exact, every bucket in turn") + (" buckets" if way[-1].isdigit() else "")
        label = label.replace(", 1 buckets", ", 1 bucket")
        print(f"| {label} | {figures.of(way):.2f} | {figures.overhead(way):.2f} |")
    print()
    for label, ratio in found.items():
        print(f"{label}: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--calls", type=int, default=500, help="calls of each way in a round")
    parser.add_argument("--buckets", type=int, nargs="+", default=[1, 10, 1000])
    parser.add_argument("--folder", type=Path, help="keep the compiled unit here, and find it again")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        figures = measure(make_callables(folder, build(folder), options.buckets), options.rounds, options.calls)
    found = ratios(figures, options.buckets)
    if options.json:
        medians = {way: {"us": figures.of(way), "overhead_us": figures.overhead(way)} for way in figures.rounds}
        print(json.dumps({"ways": medians, "ratios": found}, indent=2))
    else:
        show(figures, found)


if __name__ == "__main__":
    main()
