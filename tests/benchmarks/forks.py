"""What a start costs in a forked child: CPU and wall milliseconds, memory over many forks, weights that are shared.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/forks.py                      # starts; 1,000 forks; 8 children of a model of 2 GB
    python tests/benchmarks/forks.py --forks 100 --gigabytes 0.2 --rounds 5

Starts: a fresh process that imports torch and loads; a child of a process that has the imports; a child of one that has
prepared. Each loads from a checkpoint, without the module, and calls once, with one thread. CPU is that of the process
to its output, and to its end (by wait4); wall is from the fork, or the start of Python, to the output. Parents call
`gc.freeze()` before they fork.

Forks: children of one parent that call; every third replaces its weights, and each tenth time another one is killed in
a call. Each output is compared. PSS (/proc/self/smaps_rollup) of the parent after every tenth of the forks, and of a
child.

Shared weights: a feed-forward block of so many gigabytes is built (with `--dummy-weights`) and prepared. Children of
one parent, all alive at a time, call it. Their memory is the sum of PSS, beside the size of the weights.

With `--device cuda` starts alone, of such a block in bfloat16 on a GPU, each to its first output: a fresh process in
eager, with `torch.compile` from warm caches, with aotc, and with `aotc.early`; a child of a process with the imports,
and of one that has prepared, of which the parts of a start are shown, too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (4, 128, 256)

FRESH = """
import sys, time, torch, aotc
torch.set_num_threads(1)
x = torch.load(sys.argv[3])
with torch.no_grad():
    y = aotc.load(sys.argv[1], weights=sys.argv[2])(x)
print(float(y.sum()), 1000 * time.process_time(), flush=True)
"""

FRESH_ON_GPU = """
import sys
way, ref, weights, hidden = sys.argv[1:]
if way == "early":
    import aotc.early
    aotc.early.start(ref, weights=weights, cuda=True)
import torch, aotc
x = torch.ones(1, 1, int(hidden), dtype=torch.bfloat16)
with torch.no_grad():
    if way in ("eager", "compile"):
        from safetensors.torch import load_file
        from examples.models import tiny_block
        with torch.device("meta"):
            call = tiny_block(hidden=int(hidden), expansion=4)
        call.load_state_dict(load_file(weights, device="cuda"), assign=True)
        call = torch.compile(call) if way == "compile" else call
    else:
        call = aotc.load(ref, weights=weights)
    print(float(call(x.cuda()).float().sum()), 0, flush=True)
"""

MANIFEST = """
version: 1
defaults: {{mode: default{defaults}}}
models:
  large:
    factory: examples.models:tiny_block
    kwargs: {{hidden: {hidden}, expansion: 4}}
    inputs: {{x: {{shape: [1, 1, {hidden}]}}}}
"""


def pss() -> int:
    """KiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def child(action: Callable[[], Any]) -> tuple[Any, float, float]:
    """What `action` gives in a forked child; milliseconds to that, and of CPU until the child's end."""
    reading, writing = os.pipe()
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, json.dumps(action()).encode())
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    said = os.read(reading, 1 << 16)
    wall = time.perf_counter() - began
    os.close(reading)
    _, status, used = os.wait4(pid, 0)
    assert status == 0, status
    return json.loads(said), 1000 * wall, 1000 * (used.ru_utime + used.ru_stime)


def fresh(code: str, *arguments: object) -> tuple[list[float], float, float]:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    said = [float(each) for each in process.stdout.readline().split()]
    wall = time.perf_counter() - began
    _, status, used = os.wait4(process.pid, 0)
    assert status == 0, status
    process.stdout.close()
    process.returncode = 0
    return said, 1000 * wall, 1000 * (used.ru_utime + used.ru_stime)


def starts(ref: str, weights: Path, folder: Path, rounds: int) -> Any:
    """Prints the table, and returns what was prepared."""
    import torch

    import aotc
    import aotc.runtime.checkpoints.without_module

    x = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(0))
    torch.save(x, folder / "x.pt")
    load = aotc.load
    gc.collect()
    gc.freeze()

    def output(compiled: Any) -> list[float]:
        return [float(compiled(x).sum()), 1000 * time.process_time()]

    ways: dict[str, list[tuple[float, ...]]] = {"fresh": [], "forked, imports": [], "forked, prepared": []}
    outputs = []
    for way, times in ways.items():
        prepared = aotc.prepare(ref, weights=weights) if way == "forked, prepared" else None
        for _ in range(rounds):
            if way == "fresh":
                said, *taken = fresh(FRESH, ref, weights, folder / "x.pt")
            elif prepared is not None:
                said, *taken = child(lambda prepared=prepared: output(prepared.load()))
            else:
                said, *taken = child(lambda: output(load(ref, weights=weights)))
            outputs.append(said[0])
            times.append((said[1], *taken))
    assert max(outputs) - min(outputs) < 1e-2, outputs
    print(f"{'milliseconds':20}{'CPU to the output':>20}{'CPU to the end':>20}{'wall':>20}   median (least)")
    for way, times in ways.items():
        cpu, wall, whole = zip(*times, strict=True)
        figures = [f"{statistics.median(each):.1f} ({min(each):.1f})" for each in (cpu, whole, wall)]
        print(f"{way:20}" + "".join(f"{each:>20}" for each in figures))
    return prepared


def many(prepared: Any, count: int) -> None:
    import torch

    x = torch.randn(*SHAPE, generator=torch.Generator().manual_seed(0))
    expected = float(prepared.load()(x).sum())

    def serve(number: int) -> list[float]:
        compiled = prepared.load()
        said = float(compiled(x).sum())
        if number % 3 == 0:
            names = {spec.name: spec for spec in compiled.artifact.state}
            compiled.update_weights({name: torch.zeros(spec.shape) for name, spec in names.items()})
            compiled(x)
        return [said, pss()]

    wrong, memory, of_child = 0, [], 0.0
    began = time.perf_counter()
    for number in range(1, count + 1):
        if number % 10 == 0:
            pid = os.fork()
            if pid == 0:
                compiled = prepared.load()
                while True:
                    compiled(x)
            time.sleep(0.03)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        (said, of_child), _, _ = child(lambda number=number: serve(number))
        wrong += abs(said - expected) > 1e-2
        if number % max(1, count // 10) == 0:
            memory.append(pss() / 1024)
    print(f"{count} forks in {time.perf_counter() - began:.0f} s: {wrong} wrong; PSS of the parent, MiB:")
    print(" ", " ".join(f"{each:.1f}" for each in memory), f"; of the last child {of_child / 1024:.1f}")


def large(gigabytes: float, bytes_each: int, defaults: str, folder: Path) -> tuple[str, Path, int]:
    """Builds a block; gives its reference, its weights and its width."""
    import torch
    from safetensors.torch import save_file

    from examples.models import tiny_block

    hidden = next(h for h in range(128, 1 << 16, 128) if 8 * h * h * bytes_each >= gigabytes * 1e9 * 0.98)
    (folder / "manifest.yaml").write_text(MANIFEST.format(hidden=hidden, defaults=defaults))
    command = [sys.executable, "-m", "aotc", "build", folder / "manifest.yaml", "--store", folder / "store"]
    subprocess.run([*command, "--dummy-weights", "--quiet"], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    dtype = torch.bfloat16 if bytes_each == 2 else torch.float32
    weights = folder / "large.safetensors"
    save_file(tiny_block(hidden=hidden, expansion=4).to(dtype).state_dict(), weights)
    return f"{folder}/store#large", weights, hidden


def starts_on_gpu(gigabytes: float, rounds: int, folder: Path) -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else to ask for a GPU is to touch it
    ref, weights, hidden = large(gigabytes, 2, ", targets: [cuda], dtype: bfloat16", folder)
    import torch

    import aotc
    import aotc.runtime.checkpoints.without_module

    load = aotc.load
    gc.collect()
    gc.freeze()

    def output(start: Callable[[], Any]) -> list[float]:
        """Seconds until the context, the load and the first output have ended."""
        began = time.perf_counter()
        x = torch.ones(1, 1, hidden, dtype=torch.bfloat16, device="cuda")
        torch.cuda.synchronize()
        context = time.perf_counter()
        compiled = start()
        loaded = time.perf_counter()
        float(compiled(x).float().sum())
        return [context - began, loaded - context, time.perf_counter() - loaded]

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    fresh(FRESH_ON_GPU, "compile", ref, weights, hidden)  # fills its caches
    print(f"{weights.stat().st_size / 1e9:.2f} GB, seconds to the first output: median (least) of {rounds}")
    for way in ("eager", "compile", "aotc", "early", "forked, imports", "forked, prepared"):
        prepared = aotc.prepare(ref, weights=weights) if way == "forked, prepared" else None
        times, parts = [], []
        for _ in range(rounds):
            if prepared is not None:
                said, wall, _ = child(lambda prepared=prepared: output(prepared.load))
            elif way == "forked, imports":
                said, wall, _ = child(lambda: output(lambda: load(ref, weights=weights)))
            else:
                said, wall, _ = fresh(FRESH_ON_GPU, way, ref, weights, hidden)
            times.append(wall / 1000)
            parts.append(said)
        line = f"{way:20}{statistics.median(times):8.2f} ({min(times):.2f})"
        if way.startswith("forked"):
            of = zip(("context", "load", "first call"), zip(*parts, strict=True), strict=True)
            line += "".join(f"  {name} {statistics.median(each):.2f} ({min(each):.2f})" for name, each in of)
        print(line, flush=True)


def shared(gigabytes: float, children: int, folder: Path) -> None:
    import torch

    import aotc

    ref, weights, hidden = large(gigabytes, 4, "", folder)
    x = torch.randn(1, 1, hidden)
    prepared = aotc.prepare(ref, weights=weights)
    expected, alone = float(prepared.load()(x).sum()), pss()
    workers = []
    for _ in range(children):
        reading, writing = os.pipe()
        going, go = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(go)
            compiled = prepared.load()
            said = float(compiled(x).sum())
            os.write(writing, b"called")
            os.read(going, 1)  # until all have called
            os.write(writing, json.dumps([said, pss()]).encode())
            os._exit(0)
        os.read(reading, 100)
        workers.append((pid, reading, go))
    for _, _, go in workers:
        os.write(go, b".")
    answers = [json.loads(os.read(reading, 100)) for _, reading, _ in workers]
    for pid, _, _ in workers:
        os.waitpid(pid, 0)
    right = all(abs(said - expected) < 1e-2 for said, _ in answers)
    size = weights.stat().st_size
    print(
        f"{children} children of a model of {size / 1e9:.2f} GB: right {right}; PSS of the parent alone "
        f"{alone * 1024 / 1e9:.2f} GB, of all children together {sum(each for _, each in answers) * 1024 / 1e9:.2f} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="aotc-store")
    parser.add_argument("--ref", default="quickstart")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--forks", type=int, default=1000)
    parser.add_argument("--children", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import torch
    from safetensors.torch import save_file

    from examples.models import transformer_block

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.device == "cuda":
            starts_on_gpu(options.gigabytes, options.rounds, folder)
            return
        save_file(transformer_block(width=256, heads=4).state_dict(), folder / "weights.safetensors")
        ref = f"{Path(options.store).resolve()}#{options.ref}"
        prepared = starts(ref, folder / "weights.safetensors", folder, options.rounds)
        many(prepared, options.forks)
        if options.gigabytes:
            shared(options.gigabytes, options.children, folder)


if __name__ == "__main__":
    main()
