"""What a call costs through the extension, through Python, in eager, in torch's own runner and by `aotc.standalone`:
python tests/benchmarks/native_call.py [cuda]

Linear layers of width 4: one (2 weights), the same for a call that is padded, 100 in sequence (200 weights), and 12 in
sequence, each compiled as a region.
Microseconds a call (of a region, a twelfth of the model's), the best of many; the runner is given the weights by hand
and checks nothing. On a GPU, the time that a call keeps its thread: each model is a CUDA graph, and there is a GPT of
12 layers (width 768, bf16, 1 × 128 tokens).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import aotc
import aotc.standalone
from aotc.runtime.libraries.library import open_library
from aotc.runtime.libraries.runner import open_runner

ROOT = Path(__file__).parents[2]
DEVICE = "cuda" if "cuda" in sys.argv[1:] else "cpu"
SYNCHRONIZED = f"import torch; torch.{DEVICE}.synchronize()"
MANIFEST = """
version: 1
defaults: {mode: default}
models:
  one: {factory: "native_call.py:linear_layers", kwargs: {count: 1}, inputs: {input: {shape: [2, 4]}}}
  padded:
    factory: "native_call.py:linear_layers"
    kwargs: {count: 1}
    inputs: {input: {shape: [n, 4], pad: {n: 0}}}
    outputs: {crop: [n]}
    buckets: [{n: 4}]
  many: {factory: "native_call.py:linear_layers", kwargs: {count: 100}, inputs: {input: {shape: [2, 4]}}}
  regions:
    factory: "native_call.py:linear_layers"
    kwargs: {count: 12}
    inputs: {input: {shape: [2, 4]}}
    regions: ["*"]
"""
GPT = """
  gpt:
    factory: "native_call.py:gpt"
    dtype: bfloat16
    inputs: {input: {shape: [1, 128], dtype: int64, init: {randint: [0, 32000]}}}
"""


def linear_layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def gpt() -> nn.Module:
    """A GPT of 12 layers that gives logits."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(32000, 768),
        nn.TransformerEncoder(layer, 12, enable_nested_tensor=False),
        nn.LayerNorm(768),
        nn.Linear(768, 32000, bias=False),
    )


def microseconds(call: Callable[[Any], Any], given: Any) -> float:
    number = 20 if DEVICE == "cuda" else 200  # a GPU is that many calls behind
    return min(timeit.repeat(lambda: call(given), SYNCHRONIZED, number=number, repeat=200)) / number * 1e6


def loaded(ref: str, module: nn.Module, native: str) -> Any:
    runners: list[Any] = []

    def keep(files: Any, device: Any, concurrency: int) -> Any:
        runners.append(open_runner(files, device, concurrency, calls_back=False))
        return open_library(files, device, concurrency)

    with patch.dict(os.environ, {"AOTC_NATIVE_CALL": native}), patch("aotc.runtime.load.open_library", keep):
        return aotc.load(ref, module, device=DEVICE).forward, runners[0]


def shown(times: dict[str, float]) -> str:
    return ", ".join(f"{way} {time:.1f}" for way, time in times.items()) + " µs"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "manifest.yaml"
        on_gpu = "defaults: {mode: default, targets: [cuda], cuda_graphs: always}"
        text = MANIFEST.replace("defaults: {mode: default}", on_gpu) + GPT if DEVICE == "cuda" else MANIFEST
        manifest.write_text(text)
        shutil.copy(__file__, folder)
        command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", f"{folder}/store"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        models = {"one": linear_layers(1), "padded": linear_layers(1), "many": linear_layers(100)}
        for name, module in (models | ({"gpt": gpt().bfloat16()} if DEVICE == "cuda" else {})).items():
            module.eval().to(DEVICE)
            (native, runner), (python, _) = (loaded(f"{folder}/store#{name}", module, each) for each in "10")
            given = torch.rand(2, 4, device=DEVICE)
            if name == "gpt":
                given = torch.randint(32000, (1, 128), device=DEVICE)
            tensors = dict(module.named_parameters())
            names = [argument.state for argument in native.artifact.variants[0].arguments]
            whole = torch.zeros(4, 4, device=DEVICE) if name == "padded" else given
            taken = [tensors[name] if name else whole for name in names]
            with torch.no_grad():
                times = {
                    "extension": microseconds(native, given),
                    "Python": microseconds(python, given),
                    "eager": microseconds(module, given),
                    "torch's runner": microseconds(runner.run if DEVICE == "cuda" else runner._run, taken),
                }
            if DEVICE == "cpu":
                arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
                standalone = aotc.standalone.load(f"{folder}/store#{name}", weights=arrays)
                times["standalone"] = microseconds(standalone, given.numpy())
            print(f"{name}, {len(names) - 1} weights: {shown(times)}")
        times = {}
        for way, each in (("extension", "1"), ("Python", "0")):
            module, given = linear_layers(12).eval().to(DEVICE), torch.rand(2, 4, device=DEVICE)
            with torch.no_grad():
                times["eager"] = microseconds(module, given) / 12
                loaded(f"{folder}/store#regions", module, each)
                times[way] = microseconds(module, given) / 12
        print(f"a region: {shown(times)}")


if __name__ == "__main__":
    main()
