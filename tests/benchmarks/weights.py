"""How a service starts with a checkpoint and no module, and what a swap of its weights costs. A script, not a test.

    python tests/benchmarks/weights.py                                  # BERT-base on the CPU: about 4 minutes
    python tests/benchmarks/weights.py --device cuda --gigabytes 2      # an LLM of 8 layers, bf16, on the GPU
    python tests/benchmarks/weights.py --layers 2 --repeat 1            # a quick try

Random weights of an unmodified model of transformers are saved as safetensors, with their config, and one bucket of it
is built. Then fresh processes start in turn:

- eager: imports transformers, `from_pretrained(folder)`, first output;
- constructed: imports transformers, constructs the module on the device with parameters left uninitialised, loads the
  file into it, first output;
- module: the same as eager, then `aotc.load(ref, module)`, first output;
- aotc: `aotc.load(ref, weights=folder)`, first output. Neither transformers nor a compiler is imported.

All are timed from the start of the process, as its parent saw it, to the first output (on the host). Files are in the
page cache for all of them. The outputs are compared. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAYS = ("eager", "constructed", "module", "aotc")
BANNED = ("transformers", "torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler")
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}
"""How far an output may be from eager's, as a share of eager's largest."""

BERT = """
version: 1
models:
  model:
    factory: models.py:bert
    kwargs: {{layers: {layers}}}
    targets: [{target}]
    inputs:
      input_ids: {{shape: [1, 128], dtype: int64, init: {{randint: [0, 30000]}}}}
      attention_mask: {{shape: [1, 128], dtype: int64, init: ones}}
"""
LLM = """
version: 1
models:
  model:
    factory: models.py:llm
    kwargs: {{layers: {layers}, gigabytes: {gigabytes}}}
    targets: [{target}]
    inputs:
      input_ids: {{shape: [1, 128], dtype: int64, init: {{randint: [0, 30000]}}}}
      use_cache: false
"""


def bert(layers: int) -> Any:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(num_hidden_layers=layers)).eval()


def llm(layers: int, gigabytes: float) -> Any:
    """A Llama in bf16 of that many layers and bytes: 16 h² parameters a layer, and 2 × 32,000 h beside them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    parameters = gigabytes * 1e9 / 2
    hidden = next(h for h in range(128, 1 << 16, 128) if 16 * layers * h * h + 64_000 * h >= parameters * 0.97)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 128,
        vocab_size=32_000,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


# -- in the measured process ------------------------------------------------------------------------------------------


class Clock:
    """The seconds of each part, and of the whole since the process started."""

    def __init__(self, started: float) -> None:
        self.started, self.last = started, time.time()
        self.parts = {"interpreter": self.last - started}

    def part(self, name: str) -> None:
        now = time.time()
        self.parts[name] = now - self.last
        self.last = now


def child(way: str, work: Path, device: str, started: float) -> None:
    clock = Clock(started)
    import torch

    clock.part("import torch")
    torch.set_grad_enabled(False)
    checkpoint = work / "checkpoint"
    module = compiled = None
    if way != "aotc":
        import transformers

        name = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
        cls = getattr(transformers, name)
        clock.part("import transformers")
        module = loaded(cls, checkpoint, device) if way != "constructed" else constructed(cls, checkpoint, device)
        clock.part("module and weights")
    if way in ("module", "aotc"):
        import aotc

        clock.part("import aotc")
        given: dict[str, Any] = {} if module else {"weights": checkpoint, "device": device}
        compiled = aotc.load("model", module, store=work / "store", **given)
        clock.part("aotc.load")
    function = compiled or module
    generator = torch.Generator().manual_seed(1)
    inputs = {"input_ids": torch.randint(0, 30_000, (1, 128), generator=generator).to(device)}
    if device == "cpu":
        inputs["attention_mask"] = torch.ones(1, 128, dtype=torch.int64)
        output = function(**inputs)["last_hidden_state"]
    else:
        output = function(**inputs, use_cache=False)["logits"]
    output = output.float().cpu()
    clock.part("first call")
    total = time.time() - started
    imported = [name for name in BANNED if name in sys.modules]
    assert way != "aotc" or not imported, imported
    if device == "cpu":
        call = lambda: function(**inputs)["last_hidden_state"]  # noqa: E731
    else:
        call = lambda: function(**inputs, use_cache=False)["logits"].cpu()  # noqa: E731
    result = {"total": total, "parts": clock.parts, "resident": resident_megabytes()}
    result["latency"] = median_seconds(call)
    if way == "aotc":
        result |= swapped(compiled, checkpoint, call)
    torch.save(output, work / f"{way}.pt")
    print(json.dumps(result))


def loaded(cls: Any, checkpoint: Path, device: str) -> Any:
    if device == "cpu" or importlib.util.find_spec("accelerate") is None:
        return cls.from_pretrained(checkpoint, dtype="auto").to(device).eval()
    return cls.from_pretrained(checkpoint, dtype="auto", device_map=device).eval()


def constructed(cls: Any, checkpoint: Path, device: str) -> Any:
    """As fast as a service could write it: parameters are not initialised, and the file's tensors take their place."""
    import torch
    from safetensors.torch import load_file
    from torch import nn
    from transformers import AutoConfig

    for name in ("normal_", "uniform_", "kaiming_uniform_", "zeros_", "ones_", "trunc_normal_", "xavier_uniform_"):
        setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    config = AutoConfig.from_pretrained(checkpoint)
    if config.dtype is not None:
        torch.set_default_dtype(config.dtype)
    cls.init_weights = cls._init_weights = lambda self, *args, **kwargs: None
    with torch.device(device):
        module = cls(config).eval()
    torch.set_default_dtype(torch.float32)
    module.load_state_dict(load_file(checkpoint / "model.safetensors", device=device), assign=True)
    return module


def resident_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def median_seconds(call: Any, rounds: int = 15) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def swapped(compiled: Any, checkpoint: Path, call: Any) -> dict[str, float]:
    """An update from the file while a thread calls on: its seconds, and the longest call meanwhile."""
    from safetensors.torch import load_file

    longest, stop = 0.0, threading.Event()

    def serve() -> None:
        nonlocal longest
        while not stop.is_set():
            began = time.perf_counter()
            call()
            longest = max(longest, time.perf_counter() - began)

    thread = threading.Thread(target=serve)
    thread.start()
    times = {}
    for name, weights in (("file", checkpoint), ("mapping", load_file(checkpoint / "model.safetensors"))):
        began = time.perf_counter()
        compiled.update_weights(weights)
        times[f"swap from a {name}"] = time.perf_counter() - began
    stop.set()
    thread.join()
    return {**times, "longest call meanwhile": longest}


# -- the parent -------------------------------------------------------------------------------------------------------


def environment(work: Path) -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "AOTC_CACHE_DIR": str(work / "cache"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def prepare(work: Path, device: str, layers: int, gigabytes: float) -> None:
    """The checkpoint, and the store with one bucket; both are kept for a second run with the same --work."""
    if not (work / "checkpoint" / "model.safetensors").exists():
        import torch

        torch.manual_seed(1)
        module = bert(layers) if device == "cpu" else llm(layers, gigabytes)
        module.save_pretrained(work / "checkpoint", max_shard_size="100GB")
    shutil.copy(__file__, work / "models.py")
    target = "native" if device == "cpu" else "cuda"
    text = (BERT if device == "cpu" else LLM).format(layers=layers, gigabytes=gigabytes, target=target)
    (work / "manifest.yaml").write_text(text)
    command = [sys.executable, "-m", "aotc", "build", work / "manifest.yaml", "--store", work / "store"]
    began = time.monotonic()
    subprocess.run(command, env=environment(work), cwd=ROOT, check=True, stdout=sys.stderr)
    print(f"built in {time.monotonic() - began:.1f} s", file=sys.stderr)


def start(way: str, work: Path, device: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, "--work", work, "--device", device, "--started"]
    ran = subprocess.run(
        [*map(str, command), str(time.time())], env=environment(work), stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def check_outputs(work: Path, device: str, ways: list[str]) -> None:
    import torch

    eager = torch.load(work / "eager.pt")
    for way in ways:
        error = float((torch.load(work / f"{way}.pt") - eager).abs().max() / eager.abs().max())
        assert error <= TOLERANCE[device], (way, error)


def report(runs: dict[str, list[dict[str, Any]]]) -> None:
    def median(way: str, *path: str) -> float:
        def value(run: Any) -> float:
            for name in path:
                run = run[name]
            return float(run)

        return statistics.median(value(run) for run in runs[way])

    print("| start | first output since process start | of which | latency | resident |")
    print("|---|---:|---|---:|---:|")
    for way in runs:
        parts = ", ".join(f"{name} {median(way, 'parts', name):.3f}" for name in runs[way][0]["parts"])
        print(
            f"| {way} | {median(way, 'total'):.2f} s | {parts} | {1000 * median(way, 'latency'):.1f} ms "
            f"| {median(way, 'resident'):.0f} MB |"
        )
    if "aotc" in runs:
        swaps = [name for name in runs["aotc"][0] if "swap" in name or "longest" in name]
        print("; ".join(f"{name}: {1000 * median('aotc', name):.1f} ms" for name in swaps))
        for way in ("eager", "constructed"):
            if way in runs:
                print(f"aotc / {way}: {median('aotc', 'total') / median(way, 'total'):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--layers", type=int, default=0, help="default: 12 of BERT, 8 of the LLM")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the LLM's weights")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--work", type=Path, help="a folder to keep the checkpoint and the store in")
    parser.add_argument("--prepare-only", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.work, args.device, args.started)
        return
    # As pip does for an installed package: without it each process would compile aotc's own Python code anew.
    compileall.compile_dir(ROOT / "aotc", quiet=1)
    work = args.work or Path(tempfile.mkdtemp(prefix="aotc-weights-"))
    work.mkdir(parents=True, exist_ok=True)
    prepare(work, args.device, args.layers or (12 if args.device == "cpu" else 8), args.gigabytes)
    if args.prepare_only:
        return
    ways = args.ways.split(",")
    for way in ways:
        start(way, work, args.device)  # fills the page cache and Python's own caches
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(args.repeat):
        for way in ways:
            runs[way].append(start(way, work, args.device))
    check_outputs(work, args.device, ways)
    report(runs)


if __name__ == "__main__":
    main()
