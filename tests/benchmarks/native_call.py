"""What a call costs through the extension, through Python, in eager and in torch's own runner:
python tests/benchmarks/native_call.py

Linear layers of width 4: one (2 weights), 100 in sequence (200 weights), and 12 in sequence, each compiled as a region.
Microseconds a call (of a region, a twelfth of the model's), the best of many; the runner is given the weights by hand
and checks nothing.
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
from aotc.runtime.libraries.library import open_library
from aotc.runtime.libraries.runner import open_runner

ROOT = Path(__file__).parents[2]
MANIFEST = """
version: 1
defaults: {mode: default}
models:
  one: {factory: "native_call.py:linear_layers", kwargs: {count: 1}, inputs: {input: {shape: [2, 4]}}}
  many: {factory: "native_call.py:linear_layers", kwargs: {count: 100}, inputs: {input: {shape: [2, 4]}}}
  regions:
    factory: "native_call.py:linear_layers"
    kwargs: {count: 12}
    inputs: {input: {shape: [2, 4]}}
    regions: ["*"]
"""


def linear_layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def microseconds(call: Callable[[Any], Any], given: Any) -> float:
    return min(timeit.repeat(lambda: call(given), number=200, repeat=200)) / 200 * 1e6


def loaded(ref: str, module: nn.Module, native: str) -> Any:
    runners: list[Any] = []

    def keep(files: Any, device: Any, concurrency: int) -> Any:
        runners.append(open_runner(files, device, concurrency, calls_back=False))
        return open_library(files, device, concurrency)

    with patch.dict(os.environ, {"AOTC_NATIVE_CALL": native}), patch("aotc.runtime.load.open_library", keep):
        return aotc.load(ref, module).forward, runners[0]


def shown(times: dict[str, float]) -> str:
    return ", ".join(f"{way} {time:.1f}" for way, time in times.items()) + " µs"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "manifest.yaml"
        manifest.write_text(MANIFEST)
        shutil.copy(__file__, folder)
        command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", f"{folder}/store"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        for name, count in (("one", 1), ("many", 100)):
            module = linear_layers(count).eval()
            (native, runner), (python, _) = (loaded(f"{folder}/store#{name}", module, each) for each in "10")
            given = torch.rand(2, 4)
            tensors = dict(module.named_parameters())
            names = [argument.state for argument in native.artifact.variants[0].arguments]
            taken = [tensors[name] if name else given for name in names]
            with torch.no_grad():
                times = {
                    "extension": microseconds(native, given),
                    "Python": microseconds(python, given),
                    "eager": microseconds(module, given),
                    "torch's runner": microseconds(runner._run, taken),
                }
            print(f"{2 * count} weights: {shown(times)}")
        times = {}
        for way, each in (("extension", "1"), ("Python", "0")):
            module = linear_layers(12).eval()
            with torch.no_grad():
                times["eager"] = microseconds(module, given) / 12
                loaded(f"{folder}/store#regions", module, each)
                times[way] = microseconds(module, given) / 12
        print(f"a region: {shown(times)}")


if __name__ == "__main__":
    main()
