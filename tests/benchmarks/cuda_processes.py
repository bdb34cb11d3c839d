"""The measured processes of `cuda.py`: each does one task, given as JSON, and writes what it found as JSON.

Started with `python -P`, so that `cuda.py` beside this file does not hide a package of that name.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

STARTED = time.time()

Task = dict[str, Any]
Call = Callable[[], Any]

COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler")
MODE = "max-autotune"
ROUND_MS = 30.0
"""Device milliseconds of one way in one round of the latency measurement, about."""


# -- models -----------------------------------------------------------------------------------------------------------


def make_module(model: dict[str, Any]) -> Any:
    """The module of a manifest's model, on the GPU, in eval mode."""
    import torch

    name, _, factory = model["factory"].partition(":")
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = getattr(importlib.import_module(name), factory)(**model.get("kwargs", {}))
    return module.to(getattr(torch, model["dtype"])).eval()


def make_inputs(model: dict[str, Any], dims: dict[str, int]) -> tuple[Any, ...]:
    """Random inputs on the GPU at these sizes."""
    import torch

    values = []
    for spec in model["inputs"].values():
        shape = [dims[entry] if isinstance(entry, str) else entry for entry in spec["shape"]]
        dtype = getattr(torch, spec.get("dtype", model["dtype"]))
        init = spec.get("init", "randn")
        if isinstance(init, dict):
            low, high = init["randint"]
            values.append(torch.randint(low, high, shape, device="cuda").to(dtype))
        else:
            values.append(torch.randn(shape, device="cuda").to(dtype))
    return tuple(values)


def start_device(model: dict[str, Any]) -> None:
    import torch

    torch.set_float32_matmul_precision(model["precision"])
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def difference(output: Any, expected: Any) -> float:
    """The largest difference, as a share of the largest value."""
    return float((output.double() - expected.double()).abs().max() / expected.double().abs().max())


def compiled_by_torch(module: Any) -> Any:
    import torch

    return torch.compile(module, mode=MODE, fullgraph=True, dynamic=False)


# -- starting ---------------------------------------------------------------------------------------------------------


def start(task: Task) -> dict[str, Any]:
    """Start a service in one way: `eager`, `cold`, `mega` or `aotc`. Marks are seconds since the parent's spawn."""
    spawned = float(os.environ["BENCHMARK_SPAWNED"])
    marks = {"python": STARTED - spawned}

    def mark(name: str) -> None:
        marks[name] = time.time() - spawned

    import torch

    mark("import torch")
    way, model = task["way"], task["model"]
    if way == "aotc":
        from aotc import load

        assert load
    elif way != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx
    mark("own imports")
    start_device(model)
    mark("context")
    module = make_module(model)
    inputs = make_inputs(model, model["dims"])
    torch.cuda.synchronize()
    mark("module")
    with torch.no_grad():
        run = reattach(task, module)
        mark("attached")
        output = run(*inputs)
        torch.cuda.synchronize()
        mark("first output")
        loaded = [name for name in COMPILERS if name in sys.modules]
        output = output.clone()
        more = []
        for _ in range(3):
            before = time.perf_counter()
            run(*inputs)
            torch.cuda.synchronize()
            more.append(time.perf_counter() - before)
        result: dict[str, Any] = {
            "marks": marks,
            "compilers": loaded,
            "next calls": more,
            "error": difference(output, module(*inputs)),
        }
        if way == "eager" and task.get("ref"):
            result["after eager"] = reattach_after_eager(task, module, inputs)
    if way == "cold":
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(task["mega"]).write_bytes(saved[0])
        result["mega bytes"] = len(saved[0])
    return result


def reattach(task: Task, module: Any) -> Callable[..., Any]:
    """From a module on the GPU to what answers requests."""
    import torch

    if task["way"] == "eager":
        return module  # type: ignore[no-any-return]
    if task["way"] == "aotc":
        import aotc

        return aotc.load(task["ref"], module)
    if task["way"] == "mega":
        torch.compiler.load_cache_artifacts(Path(task["mega"]).read_bytes())
    return compiled_by_torch(module)  # type: ignore[no-any-return]


def reattach_after_eager(task: Task, module: Any, inputs: tuple[Any, ...]) -> dict[str, float]:
    """The same in a process where eager has run already, so that CUDA's own libraries are loaded: seconds."""
    import torch

    from aotc import load

    times = [time.perf_counter()]
    compiled = load(task["ref"], module)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    compiled(*inputs)
    torch.cuda.synchronize()
    times.append(time.perf_counter())
    return {"load": times[1] - times[0], "first call": times[2] - times[1], "reattach": times[2] - times[0]}


# -- steady state -----------------------------------------------------------------------------------------------------


def latency(task: Task) -> dict[str, Any]:
    """Every way in one process, in turn: device milliseconds by CUDA events, and host microseconds without sync."""
    import torch

    import aotc

    model = task["model"]
    start_device(model)
    module = make_module(model)
    inputs = make_inputs(model, model["dims"])
    with torch.no_grad():
        expected = module(*inputs)
        began = time.perf_counter()
        calls: dict[str, Callable[..., Any]] = {"eager": module}
        if task["torch"]:
            jit = calls["torch.compile"] = compiled_by_torch(module)
            calls["torch.compile kept"] = lambda *args: jit(*args).clone()
        calls["aotc direct"] = aotc.load(task["ref"], module, cuda_graphs="never")
        calls["aotc graph"] = aotc.load(task["ref"], module, cuda_graphs="always")
        calls["aotc view"] = aotc.load(task["ref"], module, cuda_graphs="always", outputs="view")
        picked = aotc.load(task["ref"], module)
        calls["aotc"] = picked
        errors = {way: difference(run(*inputs), expected) for way, run in calls.items()}
        runs: dict[str, Call] = {way: (lambda run=run: run(*inputs)) for way, run in calls.items()}
        for run in runs.values():
            for _ in range(20):
                run()
        torch.cuda.synchronize()
        ready = time.perf_counter() - began
        gc.collect()
        gc.disable()
        milliseconds = event_rounds(runs, task["rounds"])
        microseconds = host_samples(runs, task["samples"])
        gc.enable()
    launch = picked.artifact.variants[0].launch
    return {
        "ms": milliseconds,
        "host us": microseconds,
        "errors": errors,
        "ready": ready,
        "graph picked": bool(launch and launch.graph),
        "build": launch and {"direct ms": launch.direct_ms, "graph ms": launch.graph_ms, "reason": launch.reason},
        "gpu": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
    }


def event_rounds(runs: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Milliseconds a call of each way in each round; the ways take turns, in another order each time.

    A way that always followed the same other one would find that one's clock rate and caches each time.
    """
    order = random.Random(0)
    counts = {way: max(20, min(500, int(ROUND_MS / max(timed_by_events(run, 10), 1e-4)))) for way, run in runs.items()}
    found: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(rounds):
        for way in order.sample(list(runs), len(runs)):
            timed_by_events(runs[way], 3)  # the caches are the other way's
            found[way].append(timed_by_events(runs[way], counts[way]))
    return found


def timed_by_events(run: Call, count: int) -> float:
    import torch

    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(count):
        run()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / count


def host_samples(runs: dict[str, Call], samples: int) -> dict[str, list[float]]:
    """Microseconds that a call keeps the host, with nothing queued before it; in blocks that take turns."""
    import torch

    blocks = 10
    found: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(blocks):
        for way, run in runs.items():
            run()
            run()
            for _ in range(max(1, samples // blocks)):
                torch.cuda.synchronize()
                before = time.perf_counter()
                run()
                found[way].append((time.perf_counter() - before) * 1e6)
    torch.cuda.synchronize()
    return found


# -- many buckets -----------------------------------------------------------------------------------------------------


def buckets(task: Task) -> dict[str, Any]:
    """Open, and as graphs capture, the first `count` buckets of an artifact, each `copies` times; then call each.

    Each time the files are read from the store again, so that they are mapped as another library's would be.
    """
    import msgspec
    import torch

    from aotc.runtime.cuda.options import GraphOptions
    from aotc.runtime.libraries.files import FilesInMemory
    from aotc.runtime.load import bind_artifact
    from aotc.store import Store, parse_reference, read_artifact, read_bundle

    model = task["model"]
    start_device(model)
    module = make_module(model)
    reference = parse_reference(task["ref"])
    store = Store.open(Path(str(reference.store)))
    (entry,) = read_bundle(store, reference).artifacts
    artifact = read_artifact(store, entry.digest)
    variants = list(artifact.variants[: task["count"]])
    if task.get("library only"):
        variants = [
            msgspec.structs.replace(one, files=tuple(f for f in one.files if not f.name.endswith(".cubin")))
            for one in variants
        ]
    copies = task["copies"]
    inputs = [make_inputs(model, dict(one.bucket)) for one in variants]
    with torch.no_grad():
        module(*inputs[-1])
        before = memory()
        times = [time.perf_counter()]
        compiled = bind_artifact(
            msgspec.structs.replace(artifact, variants=tuple(variants * copies)),
            lambda one: FilesInMemory(one, store.blobs),
            module,
            torch.device("cuda", torch.cuda.current_device()),
            read_file=lambda file: store.blobs.load(file, 1 << 26),
            graphs=GraphOptions(use=task["graphs"]),
        )
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        for each in inputs:
            compiled(*each)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        after = memory()
    return {
        "buckets": len(variants) * copies,
        "load": times[1] - times[0],
        "first calls": times[2] - times[1],
        "reserved": after["reserved"] - before["reserved"],
        "device": before["free"] - after["free"],
    }


def memory() -> dict[str, int]:
    """Bytes: what torch's allocator holds, and what the device has free, after everything unused was given back."""
    import torch

    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return {"reserved": torch.cuda.memory_reserved(), "free": torch.cuda.mem_get_info()[0]}


# -- building past the manifest's checks ------------------------------------------------------------------------------


def build(task: Task) -> dict[str, Any]:
    """Build a manifest whose `options` say how kernels are stored, which `aotc build` keeps to itself."""
    from aotc.compiler.pipeline import build as run_build
    from aotc.compiler.request import BuildRequest
    from aotc.compiler.workers.forks import ForkServers
    from aotc.manifest import read_manifest

    manifest = read_manifest(Path(task["manifest"]), ())
    with closing(ForkServers()) as servers:
        report = run_build(BuildRequest(manifest, Path(task["store"]), jobs=task["jobs"]), servers)
    if report.failed:
        raise SystemExit("\n".join(f"{outcome.model} {outcome.bucket}: {outcome.error}" for outcome in report.failed))
    return {"seconds": {f"{one.model} {one.bucket}": one.seconds for one in report.outcomes}}


ACTIONS = {"start": start, "latency": latency, "buckets": buckets, "build": build}


def main() -> None:
    task: Task = json.loads(sys.argv[1])
    Path(task["result"]).write_text(json.dumps(ACTIONS[task["action"]](task)))


if __name__ == "__main__":
    main()
