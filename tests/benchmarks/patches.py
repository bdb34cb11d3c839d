"""What each performance patch of torch gains on its yardstick: built with it and without, by `patches: {NAME: off}`.

    python tests/benchmarks/patches.py                          # those for this machine's GPU, or else for CPUs
    python tests/benchmarks/patches.py --patch tf32_tiles       # one of them (repeatable)
    python tests/benchmarks/patches.py --device cpu --jobs 1

A row of the table has

- latency: milliseconds of a call, in one process that times both in turn; the medians, and their ratio. On a GPU of a
  call with nothing queued before it, by CUDA events.
- first call: seconds, in a process of its own with an empty cache of the GPU's driver, which may compile kernels then.
- build: seconds of the unit's build.
- error: the largest difference from float64, as a share of its largest value.

A patch that gains less than 3 % of each of the three is deleted; aotc/compiler/patches/README.md has the last table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import torch  # noqa: E402
import yaml  # noqa: E402
from torch import Tensor, nn  # noqa: E402

ROUNDS = 40


@dataclass(frozen=True)
class Yardstick:
    """The model that shows what a patch gains: a function of this file, and what a manifest says of it."""

    factory: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "cuda"
    more: dict[str, Any] = field(default_factory=dict)
    layout: str = "contiguous"


YARDSTICKS = {
    "half_precision_functions": Yardstick("pointwise", (1024, 4096), "float16"),
    "depthwise_template": Yardstick("depthwise", (32, 192, 28, 28), "float16", layout="channels_last"),
    "tf32_tiles": Yardstick("block", (32, 128, 768), "float32", more={"float32_matmul_precision": "high"}),
    "no_tma_templates_of_float32": Yardstick("linears", (1024, 1024), "float32"),
    "serial_small_loops": Yardstick("small", (1, 64), "float32", device="cpu"),
    "products_in_onednn": Yardstick("bert", (1, 128, 768), "float32", device="cpu"),
    "constants_of_constructors": Yardstick(
        "detector", (1, 3, 224, 224), "float32", device="cpu", more={"weights": "frozen"}
    ),
}


# -- the yardsticks ---------------------------------------------------------------------------------------------------


def pointwise() -> nn.Module:
    from examples.models import pointwise_heavy

    return pointwise_heavy(4096)


def block() -> nn.Module:
    from examples.models import tiny_block

    return tiny_block(768, 4)


class Encoder(nn.Module):
    """BERT-base's first four layers, of transformers."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.model = BertModel(BertConfig(num_hidden_layers=4), add_pooling_layer=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state  # type: ignore[no-any-return]


def bert() -> nn.Module:
    return Encoder()


class Detector(nn.Module):
    """YOLOS-Ti, of transformers, whose position embeddings are resized by `interpolate`."""

    def __init__(self) -> None:
        from transformers import YolosConfig, YolosForObjectDetection

        super().__init__()
        sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [224, 224]}
        self.model = YolosForObjectDetection(YolosConfig(**sizes))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).pred_boxes  # type: ignore[no-any-return]


def detector() -> nn.Module:
    return Detector()


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.linears(x)  # type: ignore[no-any-return]


def linears() -> nn.Module:
    return Linears()


class Depthwise(nn.Module):
    """Blocks of MobileNet's kind: a convolution of each channel, then one of all channels of a point."""

    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for window in (3, 5, 7):
            parts += [nn.Conv2d(192, 192, window, padding=window // 2, groups=192), nn.ReLU(), nn.Conv2d(192, 192, 1)]
        self.parts = nn.Sequential(*parts).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)  # type: ignore[no-any-return]


def depthwise() -> nn.Module:
    return Depthwise()


class Small(nn.Module):
    """Many loops of little work, between sums that keep them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        x = x.expand(16, 64)
        for norm in self.norms:
            x = x + norm(x).softmax(0)
        return x


def small() -> nn.Module:
    return Small()


# -- building ---------------------------------------------------------------------------------------------------------


def write_manifest(folder: Path, names: list[str]) -> Path:
    models = {}
    for name in names:
        yardstick = YARDSTICKS[name]
        dims = {f"d{axis}": size for axis, size in enumerate(yardstick.shape)}
        entry = {
            "factory": f"patches.py:{yardstick.factory}",
            "dtype": yardstick.dtype,
            "targets": ["cuda" if yardstick.device == "cuda" else "native"],
            "inputs": {"x": {"shape": list(dims), "layout": yardstick.layout}},
            "buckets": [dims],
            **yardstick.more,
        }
        models[f"{name}-with"] = entry
        models[f"{name}-without"] = {**entry, "patches": {name: False}}
    (folder / "patches.py").write_text(Path(__file__).read_text())
    (folder / "own_caches.py").write_text((HERE / "own_caches.py").read_text())
    path = folder / "manifest.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "models": models}))
    return path


def build(manifest: Path, store: Path, jobs: int, variables: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "aotc", "build", manifest, "--store", store, "--jobs", jobs, "--json"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=variables, stdout=subprocess.PIPE, check=False)
    return dict(json.loads(done.stdout))


# -- measuring, each in a process of its own --------------------------------------------------------------------------


def made(name: str) -> tuple[nn.Module, Tensor]:
    yardstick = YARDSTICKS[name]
    torch.manual_seed(0)
    torch.set_float32_matmul_precision(yardstick.more.get("float32_matmul_precision", "highest"))
    dtype = getattr(torch, yardstick.dtype)
    module = globals()[yardstick.factory]().to(yardstick.device, dtype).eval()
    x = torch.randn(yardstick.shape, device=yardstick.device, dtype=dtype)
    if yardstick.layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    return module, x


def first_call(name: str, way: str, store: str) -> dict[str, float]:
    import aotc

    module, x = made(name)
    wait(x)
    began = time.perf_counter()
    with torch.no_grad():
        aotc.load(f"{name}-{way}", module, store=store)(x)
    wait(x)
    return {"first": time.perf_counter() - began}


def latencies(name: str, store: str) -> dict[str, float]:
    import aotc

    module, x = made(name)
    expected = module.double()(x.double()).detach()
    found: dict[str, float] = {}
    calls: dict[str, Callable[[], Tensor]] = {}
    for way in ("with", "without"):
        compiled = aotc.load(f"{name}-{way}", made(name)[0], store=store)
        calls[way] = lambda compiled=compiled: compiled(x)  # type: ignore[misc]
    made(name)  # the precision that it sets
    with torch.no_grad():
        for way, call in calls.items():
            found[f"error {way}"] = float((call().double() - expected).abs().max() / expected.abs().max())
        for way in calls:
            milliseconds(calls[way], x, 20)
        times: dict[str, list[float]] = {way: [] for way in calls}
        for _ in range(ROUNDS):
            for way, call in calls.items():
                times[way].append(milliseconds(call, x, 20))
    return {**found, **{way: statistics.median(each) for way, each in times.items()}}


def milliseconds(call: Callable[[], Tensor], x: Tensor, count: int) -> float:
    wait(x)
    if not x.is_cuda:
        began = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - began) / count * 1e3
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / count


def wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def in_child(arguments: list[str], variables: dict[str, str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child", *arguments],
        env=variables,
        stdout=subprocess.PIPE,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patch", action="append", choices=list(YARDSTICKS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *arguments = options.child
        print(json.dumps({"first": first_call, "latencies": latencies}[kind](*arguments)))
        return
    names = [name for name in options.patch or YARDSTICKS if YARDSTICKS[name].device == options.device]
    with tempfile.TemporaryDirectory(prefix="aotc-patches-") as work:
        measure(names, Path(work), options.jobs)


def measure(names: list[str], work: Path, jobs: int) -> None:
    variables, store = environment(work / "caches"), work / "store"
    report = build(write_manifest(work, names), store, jobs, variables)
    failed = {unit["model"]: unit for unit in report["units"] if unit["status"] == "failed"}
    seconds = {unit["model"]: unit["seconds"] for unit in report["units"]}
    print("| patch | latency with, without, ratio | first call | build | error |")
    print("|---|---:|---:|---:|---:|")
    for name in names:
        ways = [f"{name}-with", f"{name}-without"]
        if wrong := [failed[way] for way in ways if way in failed]:
            print(f"| {name} | failed: {str(wrong)[:300]} |", flush=True)
            continue
        drivers = {way: str(work / f"driver-{name}-{way}") for way in ("with", "without")}
        firsts = [
            in_child(["first", name, way, str(store)], {**variables, "CUDA_CACHE_PATH": cache})
            for way, cache in drivers.items()
        ]
        found = in_child(["latencies", name, str(store)], variables)
        if not found or not all(firsts):
            print(f"| {name} | failed: see above |", flush=True)
            continue
        cells = (
            f"{found['with']:.4f}, {found['without']:.4f} ms, {found['with'] / found['without']:.3f}",
            f"{firsts[0]['first']:.3f}, {firsts[1]['first']:.3f} s",
            f"{seconds[ways[0]]:.1f}, {seconds[ways[1]]:.1f} s",
            f"{found['error with']:.1e}, {found['error without']:.1e}",
        )
        print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
