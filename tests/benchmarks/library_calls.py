"""What a call of a library's model costs its thread: python tests/benchmarks/library_calls.py [cuda] [NAME…]

Models of transformers (ModernBERT, Qwen3, the encoder of Whisper), of timm (Swin) and of diffusers (a UNet), where
these are installed: small ones on a CPU, and on a GPU ModernBERT-base, 12 layers of Qwen3, Whisper's and Swin's own
sizes in bfloat16, each as a CUDA graph. Microseconds a call, the best of many: through the extension, through Python,
in eager, and with `--compile` by torch.compile (on a GPU with `mode="reduce-overhead"`). On a GPU also what no caller
can do without: torch's copies of the inputs into such a graph of the same code, its replay, and copies of the results.
Before them: how many calls the extension made, of those that were asked of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
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
from torch.utils._pytree import tree_leaves

import aotc

ROOT = Path(__file__).parents[2]
ON_GPU = "cuda" in sys.argv[1:] or os.environ.get("LIBRARY_CALLS_DEVICE") == "cuda"
DEVICE = "cuda" if ON_GPU else "cpu"


def modernbert() -> nn.Module:
    from transformers import ModernBertConfig, ModernBertModel

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ModernBertConfig(**({} if ON_GPU else small), attn_implementation="sdpa")  # by default as base
    return ModernBertModel(config)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3Model

    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    sizes = dict(zip(names, (1024, 3072, 16, 8, 12) if ON_GPU else (64, 96, 2, 1, 2), strict=True))
    return Qwen3Model(Qwen3Config(**sizes, head_dim=128 if ON_GPU else 32, use_cache=False))


def whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    small = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 96}
    config = WhisperConfig(**({"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8} if ON_GPU else small))
    return WhisperEncoder(config)


def swin() -> nn.Module:
    import timm

    return timm.create_model("swin_tiny_patch4_window7_224")


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    channels = (320, 640, 1280) if ON_GPU else (32, 64)
    blocks = len(channels) - 1
    return UNet2DConditionModel(
        block_out_channels=channels,
        down_block_types=("DownBlock2D", *["CrossAttnDownBlock2D"] * blocks),
        up_block_types=(*["CrossAttnUpBlock2D"] * blocks, "UpBlock2D"),
        cross_attention_dim=2048 if ON_GPU else 32,
        attention_head_dim=8,
        layers_per_block=2 if ON_GPU else 1,
        norm_num_groups=32,
    )


IDS = {"dtype": "int64", "init": {"randint": [0, 1000]}}
LENGTH = 256 if ON_GPU else 16
MODELS: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any]]] = {
    "modernbert": (
        modernbert,
        "transformers",
        {
            "input_ids": {"shape": [4, LENGTH], **IDS},
            "attention_mask": {"shape": [4, LENGTH], "dtype": "int64", "init": "ones"},
            "output_attentions": None,
            "output_hidden_states": None,
            "return_dict": None,
        },
    ),
    "qwen3": (qwen3, "transformers", {"input_ids": {"shape": [1, 128 if ON_GPU else 16], **IDS}}),
    "whisper": (whisper, "transformers", {"input_features": {"shape": [2, 80, 3000]}}),
    "swin": (swin, "timm", {"x": {"shape": [1, 3, 224, 224]}}),
    "unet": (
        unet,
        "diffusers",
        {
            "sample": {"shape": [1, 4, 64 if ON_GPU else 8, 64 if ON_GPU else 8]},
            "timestep": {"shape": [], "dtype": "int64", "init": {"randint": [0, 1000]}},
            "encoder_hidden_states": {"shape": [1, 77, 2048 if ON_GPU else 32]},
        },
    ),
}


def arguments(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for name, spec in inputs.items():
        if spec is None:
            given[name] = None
        elif spec.get("dtype") == "int64":
            made = torch.ones if spec["init"] == "ones" else torch.zeros
            given[name] = made(spec["shape"], dtype=torch.int64, device=DEVICE)
        else:
            given[name] = torch.rand(spec["shape"], dtype=dtype, device=DEVICE)
    return given


def microseconds(call: Callable[..., Any], given: dict[str, Any]) -> float:
    number = 20  # a GPU is that many calls behind
    for _ in range(3):
        call(**given)
    wait = f"import torch; torch.{DEVICE}.synchronize()"
    return min(timeit.repeat(lambda: call(**given), wait, number=number, repeat=40)) / number * 1e6


def replay(compiled: Callable[..., Any], given: dict[str, Any]) -> Callable[..., Any]:
    """A CUDA graph of a call: torch's copies of the inputs into it, its replay, and copies of the results."""
    held = {name: each.clone() if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    compiled(**held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [each for each in tree_leaves(compiled(**held)) if isinstance(each, torch.Tensor)]

    def call(**given: Any) -> Any:
        for name, each in given.items():
            if isinstance(each, torch.Tensor):
                held[name].copy_(each)
        graph.replay()
        return [each.clone() for each in results]

    return call


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="*", metavar="NAME")
    made.add_argument("--compile", action="store_true")
    options = made.parse_args()
    wanted = [name for name in options.names if name != "cuda"] or [*MODELS]
    wanted = [name for name in wanted if importlib.util.find_spec(MODELS[name][1]) is not None]
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        models = {
            name: {
                "factory": f"library_calls.py:{name}",
                "inputs": MODELS[name][2],
                **({"dtype": "bfloat16", "targets": ["cuda"], "cuda_graphs": "always"} if ON_GPU else {}),
            }
            for name in wanted
        }
        manifest = Path(folder) / "manifest.yaml"
        manifest.write_text(json.dumps({"version": 1, "defaults": {"mode": "default"}, "models": models}))
        shutil.copy(__file__, folder)
        command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", f"{folder}/store"]
        environment = {**os.environ, "LIBRARY_CALLS_DEVICE": DEVICE}
        subprocess.run(command, check=False, stdout=sys.stderr, cwd=ROOT, env=environment)
        for name in wanted:
            try:
                print(f"{name}: {measured(f'{folder}/store#{name}', name, dtype, options.compile)}", flush=True)
            except aotc.AotcError as error:
                print(f"{name}: {str(error)[:300]}", flush=True)


def measured(ref: str, name: str, dtype: torch.dtype, compile_too: bool) -> str:
    make, _, inputs = MODELS[name]
    module, given, times = make().eval().to(DEVICE, dtype), arguments(inputs, dtype), dict[str, float]()
    with torch.no_grad():
        for way, switch in (("extension", "1"), ("Python", "0")):
            with patch.dict(os.environ, {"AOTC_NATIVE_CALL": switch}):
                call = aotc.load(ref, module, device=DEVICE)
            times[way] = microseconds(call, given)
            if way == "extension":
                native = call.forward.native
                ran, asked = (sum(row[0] for row in native.counts()) if native else 0), call.stats().calls
        if ON_GPU:
            direct = aotc.load(ref, module, device=DEVICE, graphs=aotc.Graphs(use="never"))
            times["torch's replay and copies"] = microseconds(replay(direct, given), given)
        times["eager"] = microseconds(module, given)
        if compile_too:
            compiled = torch.compile(module, mode="reduce-overhead" if ON_GPU else None)
            times["torch.compile"] = microseconds(compiled, given)
    return f"{ran} of {asked} calls; " + ", ".join(f"{way} {time:.1f}" for way, time in times.items()) + " µs"


if __name__ == "__main__":
    main()
