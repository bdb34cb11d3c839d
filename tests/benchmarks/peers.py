"""CPU time of a call beside ONNX Runtime and OpenVINO, in float32: models of transformers, live and frozen weights.

    pip install -e '.[peers]' transformers
    python tests/benchmarks/peers.py                       # one thread
    python tests/benchmarks/peers.py --threads 2 --model bert
    python tests/benchmarks/peers.py --threads 2 --burning 2  # beside two processes that do nothing but compute

Everything runs in one process, in turns, after one call each; the figures are medians (least) of a round's CPU
milliseconds, so that a busy machine disturbs all of them alike; with `--burning`, medians and 99th percentiles of the
wall time follow. Values are compared with eager's first.
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

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that native is the CPU

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

TOKENS = {"x": {"shape": [1, 128], "dtype": "int64", "init": {"randint": [0, 8000]}}}
IMAGE = {"x": {"shape": [1, 3, 224, 224]}}
ROUNDS = 25
PAST = 255
"""Tokens in the cache of the decode step."""


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


def efficientnet() -> nn.Module:
    from transformers import EfficientNetConfig, EfficientNetModel

    small = EfficientNetConfig(image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
    return Output(EfficientNetModel(small), "last_hidden_state")  # OpenVINO refuses its pooling


def whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return Output(WhisperEncoder(WhisperConfig()), "last_hidden_state")  # by default as whisper-tiny


def yolos() -> nn.Module:
    from transformers import YolosConfig, YolosForObjectDetection

    sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [224, 224]}
    return Output(YolosForObjectDetection(YolosConfig(**sizes)), "pred_boxes")


class DecodeStep(nn.Module):
    """One token of a Llama, whose cache of keys and values is an input."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=4, vocab_size=8000))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        from transformers import DynamicCache

        past = DynamicCache()
        for layer, (keys, values) in enumerate(cache):
            past.update(keys, values, layer)
        return self.model(x, past_key_values=past).logits  # type: ignore[no-any-return]


STEP = {
    "x": {"shape": [1, 1], "dtype": "int64", "init": {"randint": [0, 8000]}},
    "cache": {"shape": [8, 2, 1, 4, PAST, 64]},
}


def block() -> nn.Module:
    from examples.models import transformer_block

    return transformer_block(width=256, heads=4)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (bert, TOKENS),
    "gpt2": (gpt2, TOKENS),
    "vit": (vit, IMAGE),
    "resnet": (resnet, IMAGE),
    "convnext": (convnext, IMAGE),
    "block": (block, {"x": {"shape": [4, 128, 256]}}),
    "efficientnet": (efficientnet, IMAGE),
    "whisper": (whisper, {"x": {"shape": [1, 80, 3000]}}),
    "llama": (DecodeStep, STEP),
    "yolos": (yolos, IMAGE),
}
"""BERT-base, a GPT-2 of width 384, ViT-S/16, ResNet-18, ConvNeXt-T, the quickstart's block, EfficientNet-B0, the
encoder of whisper-tiny, a decode step of a Llama of width 768, YOLOS-Ti."""


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def build(name: str, folder: Path, threads: int) -> Path:
    models = {
        weights: {
            "factory": "tests/benchmarks/peers.py:made",
            "kwargs": {"name": name},
            "weights": weights,
            "targets": ["native"],
            "inputs": MODELS[name][1],
        }
        for weights in ("live", "frozen")
    }
    (folder / "manifest.yaml").write_text(json.dumps({"version": 1, "models": models}))
    command = [sys.executable, "-m", "aotc", "build", folder / "manifest.yaml", "--store", folder / "store"]
    as_served = os.environ | {"OMP_NUM_THREADS": str(threads)}
    subprocess.run([*command, "--jobs", "1"], cwd=ROOT, env=as_served, check=True, stdout=sys.stderr)
    return folder / "store"


def given_for(described: dict[str, Any]) -> tuple[Tensor, ...]:
    return tuple(
        torch.randint(0, 8000, form["shape"]) if "init" in form else torch.randn(form["shape"])
        for form in described.values()
    )


class Times:
    """Milliseconds of each call: of CPU, of all threads, and of the clock."""

    def __init__(self) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []

    def add(self, call: Callable[[], Any]) -> None:
        start, began = time.process_time(), time.perf_counter()
        call()
        self.cpu.append((time.process_time() - start) * 1e3)
        self.wall.append((time.perf_counter() - began) * 1e3)

    def cell(self, burning: int) -> str:
        wall = f"{statistics.median(self.wall):.1f}, {statistics.quantiles(self.wall, n=100)[98]:.1f}"
        return f"{statistics.median(self.cpu):.1f} ({min(self.cpu):.1f})" + (f"; {wall}" if burning else "")


def measure(name: str, folder: Path, threads: int, burning: int) -> dict[str, Times]:
    import aotc
    from aotc.tools.bench.peers import export_onnx, onnxruntime_session, openvino_session

    module, inputs = made(name), given_for(MODELS[name][1])
    store = build(name, folder, threads)
    path = folder / "model.onnx"
    export_onnx(module, inputs, {}, path)
    given = {f"input{number}": each.numpy() for number, each in enumerate(inputs)}
    served = aotc.load("live", module, store=store), aotc.load("frozen", store=store)
    sessions = onnxruntime_session(str(path), threads), openvino_session(str(path), threads)
    calls: dict[str, Callable[[], Any]] = {
        "eager": lambda: module(*inputs),
        "aotc, live": lambda: served[0](*inputs),
        "aotc, frozen": lambda: served[1](*inputs),
        "ONNX Runtime": lambda: torch.from_numpy(sessions[0](given)[0]),
        "OpenVINO": lambda: torch.from_numpy(sessions[1](given)[0]),
    }
    expected = calls["eager"]()
    for call in calls.values():
        torch.testing.assert_close(call(), expected, atol=1e-3, rtol=1e-3)
    times = {contender: Times() for contender in calls}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(burning)]
    try:
        for _ in range(ROUNDS * (4 if burning else 1)):
            for contender, call in calls.items():
                times[contender].add(call)
    finally:
        for each in others:
            each.kill()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--burning", type=int, default=0, help="processes that take the CPU away meanwhile")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.model or MODELS:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            times = measure(name, Path(folder), options.threads, options.burning)
        medians = {contender: statistics.median(each.cpu) for contender, each in times.items()}
        ahead = min(medians["ONNX Runtime"], medians["OpenVINO"])
        ours = min(medians["aotc, live"], medians["aotc, frozen"])
        cells = [each.cell(options.burning) for each in times.values()]
        load = f"load {os.getloadavg()[0]:.0f}"
        print(f"| {name} | {' | '.join(cells)} | {ours / ahead:.2f} |  {load}", flush=True)


if __name__ == "__main__":
    main()
