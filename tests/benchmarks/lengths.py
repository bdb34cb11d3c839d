"""The first call of each length that a service has not seen: eager and aotc. A script: timings fail nothing.

    python tests/benchmarks/lengths.py --device cuda --model llm-2gb            # a prompt of a Llama, on a GPU
    python tests/benchmarks/lengths.py --manifest manifests/t5.yaml --model t5 --dim written

The model has a range of lengths, of which `--count` are drawn. Each way is a fresh process with empty caches, CUDA's
too, in which one length has been called before. Then each of the others is called twice; what the first call takes over
the second is what a length costs that is new.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment, spawn

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

WAYS = ("eager", "aotc")


def measure(task: dict[str, Any]) -> list[tuple[int, float, float]]:
    """For each length the seconds of its first and of its second call."""
    import torch

    import aotc
    from aotc.manifest import read_manifest
    from aotc.models.example_inputs import example_leaves
    from aotc.models.factory import build_module

    manifest = read_manifest(Path(task["manifest"]), [task["model"]])
    spec, device = manifest.models[task["model"]], task["device"]
    module = build_module(spec, manifest.folder).to(device)
    run: Any = aotc.load(task["ref"], module) if task["way"] == "aotc" else module

    def timed(length: int) -> float:
        leaves = example_leaves(spec, {**task["fixed"], task["dim"]: length}, device, 0, folder=manifest.folder)
        inputs = dict(zip(sorted(spec.inputs), leaves, strict=True))
        synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
        synchronise()
        began = time.perf_counter()
        run(**inputs)
        synchronise()
        return time.perf_counter() - began

    with torch.no_grad():
        first, *others = task["lengths"]
        timed(first)
        timed(first)
        return [(length, timed(length), timed(length)) for length in others]


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--child":
        task = json.loads(sys.argv[2])
        Path(task["result"]).write_text(json.dumps(measure(task)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=ROOT / "manifests" / "llm.yaml")
    parser.add_argument("--model", default="llm")
    parser.add_argument("--dim", default="seq", help="the dim that a range varies")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=24, help="lengths")
    parser.add_argument("--store", type=Path, help="where the model is built; else it is built first")
    options = parser.parse_args()

    from aotc.manifest import read_manifest
    from aotc.records import SizeRange

    buckets = read_manifest(options.manifest, [options.model]).models[options.model].buckets
    (bucket,) = [bucket for bucket in buckets if isinstance(bucket[options.dim], SizeRange)]
    sizes: Any = bucket[options.dim]
    lengths = random.Random(0).sample(range(sizes.min, sizes.max + 1), options.count + 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        store = options.store or work / "store"
        if not options.store:
            command = ["build", str(options.manifest), "--model", options.model, "--store", str(store)]
            command += ["--target", "cuda"] if options.device == "cuda" else []
            spawn(["-m", "aotc", *command], environment(work / "build"))
        print("| way | a length's first call, ms: median, worst | again: median, worst |\n|---|---:|---:|")
        for way in WAYS:
            task = {"way": way, "lengths": lengths, "ref": f"{store.resolve()}#{options.model}", "dim": options.dim}
            task |= {"manifest": str(options.manifest), "model": options.model, "device": options.device}
            task |= {"fixed": {dim: size for dim, size in bucket.items() if dim != options.dim}}
            task |= {"result": str(work / "result.json")}
            spawn([__file__, "--child", json.dumps(task)], environment(work / way))
            found = json.loads((work / "result.json").read_text())
            shown = []
            for times in ([first for _, first, _ in found], [second for _, _, second in found]):
                shown.append(f"{1e3 * statistics.median(times):.1f}, {1e3 * max(times):.1f}")
            print(f"| {way} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
