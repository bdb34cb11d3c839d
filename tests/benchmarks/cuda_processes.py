"""The measured processes of `cuda.py`: each does one task, given as JSON, and writes what it found as JSON.

Started with `python -P`, so that `cuda.py` beside this file does not hide a package of that name.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

Task = dict[str, Any]


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


# -- many buckets -----------------------------------------------------------------------------------------------------


def buckets(task: Task) -> dict[str, Any]:
    """Open, and as graphs capture, the first `count` buckets of an artifact, each `copies` times; then call each.

    Each time the files are read from the store again, so that they are mapped as another library's would be.
    """
    import msgspec
    import torch

    from aotc.runtime.libraries.files import FilesInMemory
    from aotc.runtime.load import bind_artifact
    from aotc.runtime.options import Graphs
    from aotc.runtime.select import Chosen
    from aotc.store.layout.bundle import read_artifact, read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference

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
        chosen = Chosen(
            msgspec.structs.replace(artifact, variants=tuple(variants * copies)),
            torch.device("cuda", torch.cuda.current_device()),
            files_of=lambda one: FilesInMemory(one, store.blobs),
            read_file=lambda file: store.blobs.load(file, 1 << 26),
            graphs=Graphs(use=task["graphs"]),
        )
        compiled = bind_artifact(chosen, module)
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
    from aotc.compiler.messages import Settings
    from aotc.compiler.pipeline import build as run_build
    from aotc.compiler.request import BuildRequest
    from aotc.compiler.workers.unit_servers import ForkServers
    from aotc.manifest import read_manifest

    manifest = read_manifest(Path(task["manifest"]), ())
    with closing(ForkServers()) as servers:
        report = run_build(BuildRequest(manifest, Path(task["store"]), settings=Settings(jobs=task["jobs"])), servers)
    if report.failed:
        raise SystemExit("\n".join(f"{outcome.model} {outcome.bucket}: {outcome.error}" for outcome in report.failed))
    return {"seconds": {f"{one.model} {one.bucket}": one.seconds for one in report.outcomes}}


ACTIONS = {"buckets": buckets, "build": build}


def main() -> None:
    task: Task = json.loads(sys.argv[1])
    Path(task["result"]).write_text(json.dumps(ACTIONS[task["action"]](task)))


if __name__ == "__main__":
    main()
