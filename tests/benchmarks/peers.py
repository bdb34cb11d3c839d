"""CPU time of a call beside ONNX Runtime and OpenVINO, in float32: models of transformers, live and frozen weights.

    pip install -e '.[peers]' transformers
    python tests/benchmarks/peers.py                       # one thread
    python tests/benchmarks/peers.py --threads 2 --model bert

Everything runs in one process, in turns, after one call each; the figures are medians (least) of a round's CPU
milliseconds, so that a busy machine disturbs all of them alike. Values are compared with eager's first.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

TOKENS = {"shape": [1, 128], "dtype": "int64", "init": {"randint": [0, 8000]}}
IMAGE = {"shape": [1, 3, 224, 224]}
ROUNDS = 25


class Output(nn.Module):
    """A model of transformers, with one tensor as its result."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.model(x), self.name)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return Output(BertModel(BertConfig()), "last_hidden_state")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return Output(GPT2Model(GPT2Config(n_embd=384, n_head=6, use_cache=False)), "last_hidden_state")


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    small = ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    return Output(ViTModel(small, add_pooling_layer=False), "last_hidden_state")


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    return Output(ResNetForImageClassification(ResNetConfig(**sizes, num_labels=1000)), "logits")


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    return Output(ConvNextForImageClassification(ConvNextConfig(num_labels=1000)), "logits")


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (bert, TOKENS),
    "gpt2": (gpt2, TOKENS),
    "vit": (vit, IMAGE),
    "resnet": (resnet, IMAGE),
    "convnext": (convnext, IMAGE),
}
"""BERT-base, a GPT-2 of width 384, ViT-S/16, ResNet-18, ConvNeXt-T."""


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def build(name: str, folder: Path, threads: int) -> Path:
    models = {
        weights: {
            "factory": "tests/benchmarks/peers.py:made",
            "kwargs": {"name": name},
            "weights": weights,
            "inputs": {"x": MODELS[name][1]},
        }
        for weights in ("live", "frozen")
    }
    (folder / "manifest.yaml").write_text(json.dumps({"version": 1, "models": models}))
    command = [sys.executable, "-m", "aotc", "build", folder / "manifest.yaml", "--store", folder / "store"]
    as_served = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([*command, "--jobs", "1"], cwd=ROOT, env=as_served, check=True, stdout=sys.stderr)
    return folder / "store"


def measure(name: str, folder: Path, threads: int) -> dict[str, list[float]]:
    import aotc
    from aotc.tools.bench.peers import export_onnx, onnxruntime_session, openvino_session

    module, described = made(name), MODELS[name][1]
    shape = described["shape"]
    x = torch.randint(0, 8000, shape) if "init" in described else torch.randn(shape)
    store = build(name, folder, threads)
    path = folder / "model.onnx"
    export_onnx(module, (x,), {}, path)
    given = {"input0": x.numpy()}
    served = aotc.load("live", module, store=store), aotc.load("frozen", store=store)
    sessions = onnxruntime_session(str(path), threads), openvino_session(str(path), threads)
    calls: dict[str, Callable[[], Any]] = {
        "eager": lambda: module(x),
        "aotc, live": lambda: served[0](x),
        "aotc, frozen": lambda: served[1](x),
        "ONNX Runtime": lambda: torch.from_numpy(sessions[0](given)[0]),
        "OpenVINO": lambda: torch.from_numpy(sessions[1](given)[0]),
    }
    expected = calls["eager"]()
    for call in calls.values():
        torch.testing.assert_close(call(), expected, atol=1e-3, rtol=1e-3)
    times: dict[str, list[float]] = {contender: [] for contender in calls}
    for _ in range(ROUNDS):
        for contender, call in calls.items():
            start = time.process_time()
            call()
            times[contender].append((time.process_time() - start) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.model or MODELS:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            times = measure(name, Path(folder), options.threads)
        ahead = min(statistics.median(times[peer]) for peer in ("ONNX Runtime", "OpenVINO"))
        ours = min(statistics.median(each) for contender, each in times.items() if contender.startswith("aotc"))
        cells = [f"{statistics.median(each):.1f} ({min(each):.1f})" for each in times.values()]
        load = f"load {os.getloadavg()[0]:.0f}"
        print(f"| {name} | {' | '.join(cells)} | {ours / ahead:.2f} |  {load}", flush=True)


if __name__ == "__main__":
    main()
