"""The GPT of `examples/models.py`, whole and by regions: build, artifact, call. A script, not a test.

    python tests/benchmarks/regions.py                                   # 12 layers, float32, this CPU
    python tests/benchmarks/regions.py --layers 12 24 48
    python tests/benchmarks/regions.py --target cuda --dtype bfloat16

Both are built with an empty store and empty caches, the same manifest but for `regions: ["blocks.*"]`, one unit at a
time. Seconds are the unit's own, from the start of its process to its files in the store, and the whole command's.
Bytes are those of all files, with report and picks. A call is timed in this process, eager, whole and by regions in
turn, and the ratio is the median of the rounds' ratios. Run nothing else meanwhile. On a GPU, regions are also called
with a CUDA graph of each, with none, and with one graph around the whole call.

`--torch` adds the whole as torch's own `aoti_compile_and_package` makes it, with max-autotune and without weights, in a
process of its own with empty caches: that process's seconds, and the bytes of its libraries, compressed as aotc does.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import zstandard

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import aotc  # noqa: E402
from aotc.records import Artifact  # noqa: E402
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle  # noqa: E402
from aotc.store.layout.store import Store  # noqa: E402
from aotc.store.layout.units import load_unit  # noqa: E402
from aotc.store.reference import Reference  # noqa: E402
from examples.models import gpt  # noqa: E402

ROUNDS = 30


def manifest(options: argparse.Namespace, layers: int, regions: str) -> str:
    return f"""
version: 1
models:
  gpt:
    factory: examples.models:gpt
    kwargs: {{layers: {layers}, width: {options.width}, heads: 8, vocabulary: 1000, positions: 1024}}
    dtype: {options.dtype}
    targets: [{options.target}]
    {regions}
    inputs: {{input_ids: {{shape: [batch, seq], dtype: int64, init: {{randint: [0, 1000]}}}}}}
    buckets: [{{batch: 1, seq: 128}}]
"""


class Built:
    """What a build gave: the store, the record, the seconds of all units, and of each its stages."""

    def __init__(self, options: argparse.Namespace, layers: int, regions: str, work: Path) -> None:
        path, self.store = work / "manifest.yaml", work / "store"
        work.mkdir()
        path.write_text(manifest(options, layers, regions))
        command = [sys.executable, "-m", "aotc", "build", path, "--store", self.store, "--json"]
        began = time.monotonic()
        caches = {**os.environ, "AOTC_CACHE_DIR": str(work / "caches")}
        ran = subprocess.run(command, cwd=ROOT, env=caches, capture_output=True, text=True, check=False)
        self.command_seconds = time.monotonic() - began
        if ran.returncode:
            sys.exit(ran.stdout + ran.stderr)
        self.notes = [note for unit in json.loads(ran.stdout)["units"] for note in unit["notes"]]
        units = [load_unit(path) for path in (self.store / ".aotc" / "units").glob("*.json")]
        self.seconds = sum(unit.seconds for unit in units)
        self.stages = units[0].stages
        store = Store.open(self.store)
        (entry,) = read_bundle(store, Reference(None, "gpt", tag="latest")).artifacts
        self.artifact: Artifact = read_artifact(store, entry.digest)
        files = {file.blob: file for file in each_file(self.artifact)}.values()
        self.compressed, self.decompressed = sum(file.blob_size for file in files), sum(file.size for file in files)


BY_TORCH = """
import sys
import torch
from examples.models import gpt

layers, width, dtype, device, package = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
model = gpt(layers=layers, width=width).to(getattr(torch, dtype)).eval().to(device)
x = torch.randint(0, 1000, (1, 128), device=device)
options = {"max_autotune": True, "aot_inductor.package_constants_in_so": False}
with torch.no_grad():
    exported = torch.export.export(model, (x,))
    torch._inductor.aoti_compile_and_package(exported, package_path=package, inductor_configs=options)
"""


def by_torch(options: argparse.Namespace, layers: int, device: str, work: Path) -> str:
    """Torch's row of the table."""
    work.mkdir()
    package, caches = work / "model.pt2", {"TORCHINDUCTOR_CACHE_DIR": str(work / "caches"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BY_TORCH, *map(str, (layers, options.width, options.dtype, device, package))]
    began = time.monotonic()
    subprocess.run(command, env={**os.environ, **caches}, capture_output=True, check=True)
    seconds = time.monotonic() - began
    with zipfile.ZipFile(package) as files:
        libraries = [files.read(name) for name in files.namelist() if name.endswith((".so", ".cubin"))]
    compressed = sum(len(zstandard.ZstdCompressor(level=18).compress(library)) for library in libraries)
    return f"| by torch | – | {seconds:.1f} | {compressed / 1e3:.0f} | {sum(map(len, libraries)) / 1e3:.0f} | – |"


def example(device: str) -> torch.Tensor:
    return torch.randint(0, 1000, (1, 128), device=device)


def captured(call: Callable[..., Any], x: torch.Tensor) -> Callable[..., Any]:
    """The whole call, eager code between regions included, as a service may capture it where it knows that it can."""
    static, stream, graph = x.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        call(static)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        output = call(static)

    def replay(x: torch.Tensor) -> torch.Tensor:
        static.copy_(x)
        graph.replay()
        return output.clone()

    return replay


def call_ms(function: Callable[..., Any], x: torch.Tensor) -> float:
    synchronize()
    began = time.perf_counter()
    function(x)
    synchronize()
    return (time.perf_counter() - began) * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(options: argparse.Namespace, layers: int, work: Path) -> None:
    whole = Built(options, layers, "", work / f"whole-{layers}")
    regions = Built(options, layers, 'regions: ["blocks.*"]', work / f"regions-{layers}")
    device = "cuda" if options.target.startswith("cuda") else "cpu"
    torch_row = by_torch(options, layers, device, work / f"torch-{layers}") if options.torch else ""
    eager = gpt(layers=layers, width=options.width).to(getattr(torch, options.dtype)).eval().to(device)
    calls: dict[str, Callable[..., Any]] = {
        "eager": eager,
        "whole": aotc.load("gpt", copy.deepcopy(eager), store=whole.store),
        "regions": aotc.load("gpt", copy.deepcopy(eager), store=regions.store),
    }
    if device == "cuda":
        for way in ("always", "never"):
            module = copy.deepcopy(eager)
            calls[f"regions, graphs {way}"] = aotc.load("gpt", module, store=regions.store, graphs=aotc.Graphs(use=way))
        calls["regions, in the caller's graph"] = captured(calls["regions, graphs never"], example(device))
    x = example(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        expected = eager(x).float()
        differences = {name: (call(x).float() - expected).abs().max().item() for name, call in calls.items()}
        for round_ in range(ROUNDS + 3):
            for name, call in calls.items():
                took = call_ms(call, x)
                if round_ >= 3:
                    times[name].append(took)
    median = {name: statistics.median(listed) for name, listed in times.items()}
    slower = statistics.median(r / w for r, w in zip(times["regions"], times["whole"], strict=True))
    print(f"\n{layers} layers, width {options.width}, {options.dtype}, {options.target}, torch {torch.__version__}\n")
    print("| | build s | command s | compressed KB | decompressed KB | call ms |")
    print("|---|---:|---:|---:|---:|---:|")
    print(f"| eager | – | – | – | – | {median['eager']:.3f} |")
    print(torch_row, end="\n" if torch_row else "")
    for name, built in (("whole", whole), ("regions", regions)):
        sizes = f"{built.compressed / 1e3:.0f} | {built.decompressed / 1e3:.0f}"
        print(f"| {name} | {built.seconds:.1f} | {built.command_seconds:.1f} | {sizes} | {median[name]:.3f} |")
    print(
        f"| regions / whole | {regions.seconds / whole.seconds:.2f} | "
        f"{regions.command_seconds / whole.command_seconds:.2f} | {regions.compressed / whole.compressed:.2f} | "
        f"{regions.decompressed / whole.decompressed:.2f} | {slower:.3f} |"
    )
    for name, difference in differences.items():
        print(f"{name}: {median[name]:.3f} ms, differs from eager by {difference:.3g} of {expected.abs().max():.3g}")
    picks = [variant.launch for variant in regions.artifact.variants]
    print(f"picked launch of each region: {picks}")
    for name, built in (("whole", whole), ("regions", regions)):
        print(f"{name}, stages begin after s: {built.stages}")
    print("\n".join(regions.notes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--target", default="native")
    parser.add_argument("--torch", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aotc-regions-") as work:
        for layers in options.layers:
            measure(options, layers, Path(work))


if __name__ == "__main__":
    main()
