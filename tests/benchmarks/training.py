"""The start and the step of training: eager, torch.compile, its saved cache artifacts, and aotc. A script, not a test.

    python tests/benchmarks/training.py --model gpt                  # a GPT of 12 layers
    python tests/benchmarks/training.py --model bert --steps 200     # a BERT with a classifier, 200 steps
    python tests/benchmarks/training.py --model lora                 # adapters of a small Llama, by regions

Each contender runs in a fresh process with caches of its own: the seconds from its start to the end of the first step
(with `import torch`, the model's initialisation and a fused AdamW), the median of later steps, the peak of memory, and
the loss of each step. `step` is aotc with an `aotc.TrainingStep`: on a GPU, one CUDA graph. On a GPU, sizes are larger
and autocast computes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]  # `cuda.py` is not torch's
CONTENDERS = ("eager", "compile", "artifacts", "aotc", "step")
RATE, WARMUP = 1e-4, 100
"""The learning rate, and the steps until it is reached. Without these the loss has spikes, and no curve repeats."""

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {
        "kwargs": {"layers": 12, "width": 128, "heads": 4, "vocabulary": 1000, "length": 64},
        "ids": (4, 64, 1000),
    },
    "bert": {
        "kwargs": {
            "vocab_size": 1000,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 512,
        },
        "ids": (4, 64, 1000),
    },
    "lora": {
        "kwargs": {
            "rank": 4,
            "vocab_size": 1000,
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "num_key_value_heads": 2,
        },
        "ids": (4, 64, 1000),
        "regions": ["llama.model.layers.*"],
    },
}
LARGE: dict[str, dict[str, Any]] = {
    "gpt": {
        "kwargs": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 32000, "length": 512},
        "ids": (8, 512, 32000),
        "autocast": "bfloat16",
    },
    "bert": {"kwargs": {}, "ids": (16, 256, 30522), "autocast": "bfloat16"},
    "lora": {
        "kwargs": {
            "rank": 16,
            "vocab_size": 32000,
            "hidden_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "intermediate_size": 2816,
            "num_key_value_heads": 8,
        },
        "ids": (4, 512, 32000),
        "autocast": "bfloat16",
        "regions": ["llama.model.layers.*"],
    },
}


def main() -> None:
    options = _parser().parse_args()
    if options.worker:
        worker(json.loads(options.worker))
        return
    with tempfile.TemporaryDirectory(prefix="aotc-training-") as folder:
        work = Path(folder)
        shutil.copy(HERE / "training_models.py", work)
        gpu = options.device == "cuda"
        case = {**(LARGE if gpu else SMALL)[options.model], "model": options.model, "device": options.device}
        case |= {"steps": options.steps, "store": str(work / "store"), "artifacts": str(work / "cache-artifacts")}
        if {"aotc", "step"} & {*options.contenders}:
            build(case, work, options.jobs)
        results = {}
        for name in options.contenders:
            results[name] = run(case, name, work)
            if name == "compile" and "artifacts" in options.contenders:
                assert Path(case["artifacts"]).exists()
            print(json.dumps({"model": options.model, "contender": name, **shown(results, name)}), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"case": case, "results": results}))


def build(case: dict[str, Any], work: Path, jobs: int) -> None:
    batch, length, vocabulary = case["ids"]
    model = {
        "factory": f"training_models.py:{case['model']}",
        "kwargs": case["kwargs"],
        "train": True,
        "mode": "default",
        "targets": ["cuda" if case["device"] == "cuda" else "native"],
        "inputs": {"ids": {"shape": [batch, length], "dtype": "int64", "init": {"randint": [0, vocabulary]}}},
        **{key: case[key] for key in ("autocast", "regions") if key in case},
    }
    manifest = work / "manifest.yaml"
    manifest.write_text(json.dumps({"version": 1, "models": {case["model"]: model}}))  # JSON is YAML
    began = time.time()
    command = [sys.executable, "-m", "aotc", "build", manifest, "--store", case["store"], "--jobs", str(jobs)]
    subprocess.run(command, cwd=ROOT, env=_environment(work, "build"), check=True, stdout=sys.stderr)
    print(json.dumps({"model": case["model"], "build_s": round(time.time() - began, 1)}), flush=True)


def run(case: dict[str, Any], name: str, work: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--worker", json.dumps({**case, "contender": name, "began": time.time()})]
    done = subprocess.run(command, env=_environment(work, name), stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment(work: Path, name: str) -> dict[str, str]:
    caches = {key: str(work / name / key) for key in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "AOTC_CACHE_DIR")}
    paths = os.pathsep.join([str(ROOT), str(work), *filter(None, [os.environ.get("PYTHONPATH", "")])])
    return {**os.environ, **caches, "PYTHONPATH": paths}


def shown(results: dict[str, Any], name: str) -> dict[str, Any]:
    """What is printed: with the largest distance of its loss curve from the first contender's."""
    first, own = next(iter(results.values())), results[name]
    apart = max(abs(a - b) for a, b in zip(first["losses"], own["losses"], strict=True))
    numbers = {key: own[key] for key in ("first_step_s", "step_ms", "peak_mb", "compilers")}
    return {**numbers, "loss": [own["losses"][0], own["losses"][-1]], "loss_apart": round(apart, 6)}


def worker(case: dict[str, Any]) -> None:
    import torch

    if case["contender"] == "artifacts":
        import torch._dynamo  # which the artifacts need, and torch 2.11 imports in a circle

        torch.compiler.load_cache_artifacts(Path(case["artifacts"]).read_bytes())
    import training_models

    device = torch.device(case["device"])
    torch.manual_seed(0)
    model = getattr(training_models, case["model"])(**case["kwargs"]).to(device).train()
    parameters = [each for each in model.parameters() if each.requires_grad]
    step_of = model
    optimizers: Any = torch.optim
    if case["contender"] in ("compile", "artifacts"):
        step_of = torch.compile(model)
    elif case["contender"] in ("aotc", "step"):
        import aotc

        step_of, optimizers = aotc.load(f"{case['store']}#{case['model']}", model), aotc.optim
    optimizer = optimizers.AdamW(parameters, lr=RATE, fused=True)
    whole = aotc.TrainingStep(step_of, optimizer) if case["contender"] == "step" else None
    batch, length, vocabulary = case["ids"]
    generator = torch.Generator().manual_seed(0)
    data = [torch.randint(0, vocabulary, (batch, length), generator=generator).to(device) for _ in range(8)]
    autocast = getattr(torch, case["autocast"]) if "autocast" in case else None

    def step(number: int) -> Any:
        optimizer.zero_grad(set_to_none=True)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (number + 1) / WARMUP)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None):
            if whole is not None:
                return whole(data[number % len(data)])
            loss = step_of(data[number % len(data)])
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [step(0)]
    losses[0].item()
    first = time.time() - case["began"]
    times = []
    for number in range(1, case["steps"]):
        began = time.perf_counter()
        losses.append(step(number))
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    if case["contender"] == "compile":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(case["artifacts"]).write_bytes(saved[0])
    found = {
        "first_step_s": round(first, 2),
        "step_ms": round(statistics.median(times), 2),
        "peak_mb": round(_peak(device)),
        "compilers": [name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules],
        "losses": [round(loss.item(), 6) for loss in losses],
    }
    print(json.dumps(found))


def _peak(device: Any) -> float:
    """Megabytes: allocated on the GPU, or resident on the CPU."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    text = Path("/proc/self/status").read_text()
    return float(text.split("VmHWM:")[1].split()[0]) / 1e3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(SMALL), default="gpt")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="write all results, with the loss of each step")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
