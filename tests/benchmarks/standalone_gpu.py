"""A GPU without torch beside aotc with torch, eager and `torch.compile`: the start, and a call. One run, one GPU.

    pip install -e '.[build]' transformers
    python tests/benchmarks/standalone_gpu.py [--model blocks --model modernbert …] [--rounds 3]

Models are in bfloat16 (blocks in float16), of random weights in a checkpoint that lies in the page cache. Code is built
with max-autotune, for `runtime: standalone` and for torch. Of fresh processes, the least of all rounds (one where there
is torch): milliseconds from the start of the process to the first output, whose inputs come from the CPU, and of a call
whose inputs lie on the GPU, to the end of its work (the median of 300). And the largest difference from eager's first
output, as a share of `1 + |expected|`. `tokens` is a Llama of 1.05 billion parameters with its cache, which chooses
tokens: `text` is the end of 32 tokens after a prompt of 32, and a call one further token, from the CPU and back. Its
`apart` is by how much the logit of a token of this text is at most below eager's greatest, after the same text: logits
of bfloat16 tie.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]
LIBRARY = "tests/benchmarks/library_calls.py"
IDS = {"dtype": "int64", "init": {"randint": [0, 1000]}}
MODELS: dict[str, dict[str, Any]] = {
    "blocks": {
        "factory": "tests/benchmarks/standalone_gpu.py:blocks",
        "dtype": "float16",
        "inputs": {"input": {"shape": [4, 128, 512]}},
    },
    "modernbert": {
        "factory": f"{LIBRARY}:modernbert",
        "inputs": {
            "input_ids": {"shape": [4, 256], **IDS},
            "attention_mask": {"shape": [4, 256], "dtype": "int64", "init": "ones"},
        },
    },
    "qwen3": {"factory": f"{LIBRARY}:qwen3", "inputs": {"input_ids": {"shape": [1, 128], **IDS}}},
    "whisper": {"factory": f"{LIBRARY}:whisper", "inputs": {"input_features": {"shape": [2, 80, 3000]}}},
    "swin": {"factory": f"{LIBRARY}:swin", "inputs": {"x": {"shape": [1, 3, 224, 224]}}},
    "unet": {
        "factory": f"{LIBRARY}:unet",
        "inputs": {
            "sample": {"shape": [1, 4, 64, 64]},
            "timestep": {"shape": [], **IDS},
            "encoder_hidden_states": {"shape": [1, 77, 2048]},
        },
    },
    "decode": {
        "factory": "tests/benchmarks/standalone_gpu.py:llama",
        "inputs": {"input_ids": {"shape": [1, 1], **IDS}, "start": {"shape": [], "dtype": "int64", "init": "zeros"}},
    },
}
MODELS["tokens"] = {
    "factory": "tests/benchmarks/standalone_gpu.py:token_llama",
    "inputs": {
        "input_ids": {"shape": [1, "seq"], **IDS},
        "start": {"shape": [], "dtype": "int64", "init": "zeros"},
        "temperature": {"shape": [], "dtype": "float32", "init": "zeros"},
        "seed": {"shape": [], "dtype": "int64", "init": "zeros"},
    },
    "buckets": [{"seq": 1}, {"seq": 32}],
}
PROMPT, TEXT = 32, 32
WAYS = ("without torch", "aotc with torch", "torch.compile", "eager")
CALLS = 300
STEPS: dict[str, float] = {}
"""Of this process: milliseconds from its start until each was done."""


TOKENS: list[int] = []


def done(step: str) -> None:
    STEPS[step] = 1000 * (time.time() - float(os.environ["BEGAN"]))


def blocks() -> Any:
    from torch import nn

    from examples.models import transformer_block

    return nn.Sequential(*(transformer_block(width=512, heads=8) for _ in range(4)))


def llama() -> Any:
    """As `llm-2gb` of manifests/llm.yaml."""
    from examples.language_models import cached_lm

    return cached_lm(config_of_2gb(), length=2048)


def token_llama() -> Any:
    """As `llm-2gb-tokens` of manifests/llm.yaml, with other buckets."""
    from examples.language_models import token_lm

    return token_lm(config_of_2gb(), length=2048)


def config_of_2gb() -> Any:
    from transformers import LlamaConfig

    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(names, (2048, 8192, 8, 32, 8), strict=True))
    return LlamaConfig(**sizes, vocab_size=128256, dtype="bfloat16")


# -- one process ------------------------------------------------------------------------------------------------------


def child(way: str, name: str, folder: Path) -> dict[str, Any]:
    done("script")
    forms = json.loads((folder / f"{name}.json").read_text())
    calling = without_torch if way == "without torch" else with_torch
    call, first = calling(way, name, folder, forms)
    told: dict[str, Any] = {"steps": STEPS, "values": first()}
    for _ in range(20):
        call()
    took = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - began))
    return told | {"tokens": TOKENS, "call": statistics.median(took), "torch": "torch" in sys.modules}


Calling = tuple[Callable[[], Any], Callable[[], str]]


def without_torch(way: str, name: str, folder: Path, forms: list[list[Any]]) -> Calling:
    import aotc.early

    files = folder / "store", folder / f"{name}.safetensors"
    aotc.early.start(f"{name}-alone", store=files[0], weights=files[1], cuda=True)
    import aotc.standalone
    from aotc.standalone.cpu_environment import open_cpu
    from aotc.tensors.strides import strides_in

    trust = aotc.Trust(allow_untested=True)
    done("imports")
    open_cpu().open_gpu(0)
    done("driver")
    model = aotc.standalone.load(f"{name}-alone", store=files[0], weights=files[1], device="cuda", trust=trust)
    core, data = open_cpu(), (folder / f"{name}.bin").read_bytes()
    given = [core.placed(data, at, dtype, tuple(shape), strides_in("contiguous", shape)) for dtype, shape, at in forms]
    done("load")
    first = _first(model(*given))
    done("first")
    if name == "tokens":

        def integer(value: int, shape: tuple[int, ...]) -> Any:
            return core.placed(value.to_bytes(8, "little"), 0, "int64", shape, (1,) * len(shape))

        step = text(model, given, first, integer, lambda result: int(memoryview(result)[0]))
        return step, lambda: kept_tokens(folder, way)
    there = core.to_gpu(given, 0)

    def values() -> str:
        path = folder / f"{name}-{way}.bin"
        path.write_bytes(memoryview(core.strided(first, (math.prod(first.shape) * first.itemsize,), (1,), 0, "uint8")))
        return str(path)

    return lambda: model(*there), values


def with_torch(way: str, name: str, folder: Path, forms: list[list[Any]]) -> Calling:
    import torch

    data = bytearray((folder / f"{name}.bin").read_bytes())
    given = [
        torch.frombuffer(data, dtype=getattr(torch, dtype), count=math.prod(shape), offset=at).reshape(shape).cuda()
        for dtype, shape, at in forms
    ]
    torch.set_grad_enabled(False)
    weights = folder / f"{name}.safetensors"
    if way == "aotc with torch":
        import aotc

        model: Any = aotc.load(name, store=folder / "store", weights=weights, device="cuda")
    else:
        from safetensors.torch import load_model

        with torch.device("cuda"):
            model = made(name).eval()
        load_model(model, weights, strict=False, device="cuda")
        if way == "torch.compile":
            model = torch.compile(model, mode="max-autotune")
    done("load")
    first = _first(model(*given)).cpu()
    done("first")
    if name == "tokens":

        def integer(value: int, shape: tuple[int, ...]) -> Any:
            return torch.full(shape, value, device="cuda")

        def values_of_text() -> str:
            if way == "eager":
                texts = {
                    path.stem.partition("-")[2]: json.loads(path.read_text()) for path in folder.glob("tokens-*.json")
                }
                found = {other: behind(model, given, tokens, integer) for other, tokens in texts.items()}
                (folder / "behind.json").write_text(json.dumps(found))
            return kept_tokens(folder, way)

        return text(model, given, first, integer, int), values_of_text

    def call() -> None:
        model(*given)
        torch.cuda.synchronize()

    def values() -> str:
        path = folder / f"{name}-{way}.bin"
        path.write_bytes(first.contiguous().view(torch.uint8).numpy().tobytes())
        return str(path)

    return call, values


def text(model: Any, prompt: list[Any], first: Any, integer: Callable[..., Any], token_of: Callable[[Any], int]) -> Any:
    """The further tokens, and a call for one more."""
    tokens = [token_of(first)]

    def step() -> None:
        start = integer(PROMPT + len(tokens) % 1024 - 1, ())
        tokens.append(token_of(model(integer(tokens[-1], (1, 1)), start, *prompt[2:])))

    while len(tokens) < TEXT:
        step()
    done("text")
    TOKENS.extend(tokens)
    return step


def kept_tokens(folder: Path, way: str) -> str:
    path = folder / f"tokens-{way}.json"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def behind(model: Any, prompt: list[Any], tokens: list[int], integer: Callable[..., Any]) -> float:
    """By how much the logit of one of the tokens is at most below the greatest of the model."""
    from examples.language_models import CachedLM

    (ids, start, *_), most = prompt, 0.0
    for at, token in enumerate(tokens):
        logits = CachedLM.forward(model, ids, start)[0]
        most = max(most, float(logits.max() - logits[token]))
        ids, start = integer(token, (1, 1)), integer(PROMPT + at, ())
    return most


def _first(result: Any) -> Any:
    while not hasattr(result, "__dlpack__"):
        result = next(iter(result.values())) if isinstance(result, Mapping) else result[0]
    return result


def made(name: str) -> Any:
    import torch

    described = MODELS[name]
    file, function = described["factory"].split(":")
    factory = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
    return factory().to(getattr(torch, described.get("dtype", "bfloat16")))


# -- the run ----------------------------------------------------------------------------------------------------------


def prepare(name: str, folder: Path) -> None:
    """Its checkpoint, and inputs: their forms in NAME.json, their bytes in NAME.bin."""
    import torch
    from safetensors.torch import save_model

    torch.manual_seed(0)
    described = MODELS[name]
    with torch.device("cuda"):
        module = made(name).eval()
    save_model(module, str(folder / f"{name}.safetensors"))
    forms, data = [], bytearray()
    for form in described["inputs"].values():
        kind = form.get("dtype", described.get("dtype", "bfloat16"))
        shape = [PROMPT if size == "seq" else size for size in form["shape"]]
        if form.get("init") in ("zeros", "ones"):
            value = getattr(torch, form["init"])(shape, dtype=getattr(torch, kind))
        elif kind != "int64":
            value = torch.randn(shape).to(getattr(torch, kind))
        else:
            value = torch.randint(*form["init"]["randint"], shape)
        forms.append([kind, shape, len(data)])
        data += value.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        data += bytes(-len(data) % 64)
    (folder / f"{name}.json").write_text(json.dumps(forms))
    (folder / f"{name}.bin").write_bytes(data)


def spawn(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {
        "BEGAN": str(time.time()),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "standalone_gpu.py"), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def told_by(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        return {}
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def build(names: list[str], folder: Path, alone: bool) -> None:
    """Both artifacts of each model, and torch.compile's caches, beside each other."""
    models: dict[str, Any] = {}
    for name in names:
        described = {"dtype": "bfloat16", "targets": ["cuda"]} | MODELS[name]
        models |= {} if alone else {name: described}
        models[f"{name}-alone"] = described | {"runtime": "standalone"}
    (folder / "manifest.yaml").write_text(json.dumps({"version": 1, "models": models}))
    command = [sys.executable, "-m", "aotc", "build", str(folder / "manifest.yaml"), "--store", str(folder / "store")]
    building = subprocess.Popen([*command, "--jobs", str(2 * len(models))], cwd=ROOT, stdout=sys.stderr)
    warmed = [] if alone else [name for name in names if name != "tokens"]
    warming = [spawn(folder, "--child", "torch.compile", name, str(folder)) for name in warmed]
    for each in warming:
        told_by(each)
    building.wait()


def difference(one: Path, other: Path, dtype: str) -> float:
    import torch

    kind = getattr(torch, dtype)
    a, b = (torch.frombuffer(bytearray(each.read_bytes()), dtype=kind).double() for each in (one, other))
    return float(((a - b).abs() / (1 + b.abs())).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="beside eager alone")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--prepare", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        way, name, where = asked.child
        print(json.dumps(child(way, name, Path(where))))
        return
    if asked.prepare:
        prepare(asked.prepare[0], Path(asked.prepare[1]))
        print("{}")
        return
    os.environ["LIBRARY_CALLS_DEVICE"] = "cuda"
    names = asked.model or list(MODELS)
    with tempfile.TemporaryDirectory() as temporary:
        folder, began = Path(temporary), time.monotonic()
        for each in [spawn(folder, "--prepare", name, str(folder)) for name in names]:
            told_by(each)
        build(names, folder, asked.alone)
        print(f"made in {time.monotonic() - began:.0f} s", flush=True)
        for name in names:
            ways = (WAYS[0], WAYS[-1]) if asked.alone else WAYS
            found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
            for at in range(asked.rounds):
                for way in ways if at < 1 else ways[:1]:  # processes with torch take seconds
                    if way == "torch.compile" and name == "tokens":  # of two sizes it makes one for all
                        continue
                    found[way].append(told_by(spawn(folder, "--child", way, name, str(folder))))
            print_row(name, found)


def print_row(name: str, found: Mapping[str, list[dict[str, Any]]]) -> None:
    dtype, cells = MODELS[name].get("dtype", "bfloat16"), []
    eager = next((each["values"] for each in found["eager"] if each), None)
    for way, rounds in found.items():
        if not (ran := [each for each in rounds if each]):
            cells.append(f"{way}: failed")
            continue
        steps = {step: min(each["steps"][step] for each in ran) for step in ran[0]["steps"]}
        call = min(each["call"] for each in ran)
        if ran[0]["tokens"]:
            expected = next((each["tokens"] for each in found["eager"] if each), [])
            same = sum(one == other for one, other in zip(ran[0]["tokens"], expected, strict=False))
            cells.append(f"of {TEXT} tokens {same} are eager's")
            below = json.loads((Path(eager).parent / "behind.json").read_text()) if eager else {}
            apart = below.get(way, 0.0)
        else:
            apart = difference(Path(ran[0]["values"]), Path(eager), dtype) if eager else float("nan")
        told = ", ".join(f"{step} {at:.0f}" for step, at in steps.items())
        cells.append(f"{way}: {told} ms, call {call:.3f} ms, apart {apart:.4f}")
        assert all(each["torch"] == (way != "without torch") for each in ran)
    print(f"{name} | {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
