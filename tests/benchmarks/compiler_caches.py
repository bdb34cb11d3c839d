"""A first call of torch.compile in a fresh process: from nothing, from the mega-cache, from a restored cache.

    python tests/benchmarks/compiler_caches.py                      # a GPT of 12 layers on the CPU
    python tests/benchmarks/compiler_caches.py --device cuda --mode max-autotune

Every process begins with empty folders. `ready` is the time until the caches are there: `load_cache_artifacts`, or
`aotc cache restore` without the start of its process. The rounds alternate; of each row the round with the least total
is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_caches import ROOT, Failed, environment, spawn

CALL = """
import json, sys, time
from pathlib import Path
import torch
sys.path.insert(0, ".")
from examples.models import gpt, gpt_call

mode, device, how, artifacts, result = sys.argv[1:]
torch.manual_seed(0)
model, arguments = gpt().eval().to(device), [one.to(device) for one in gpt_call()]
with torch.no_grad():
    model(*arguments)  # torch's own first call
began = time.perf_counter()
if how == "mega":
    torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
elif how == "restored":
    from aotc.tools.caches.folders import cache_folders
    from aotc.tools.caches.origin import this_origin
    from aotc.tools.caches.restore import restore
    from aotc.store.layout.bundle import read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import Reference
    store = Store.open(artifacts)
    restore(store, read_bundle(store, Reference(None, "gpt", tag="bench")), cache_folders(), this_origin())
ready = time.perf_counter() - began
began = time.perf_counter()
with torch.no_grad():
    torch.compile(model, mode=mode)(*arguments)
if device == "cuda":
    torch.cuda.synchronize()
call = time.perf_counter() - began
from torch._dynamo.utils import counters
if how == "cold":
    Path(artifacts).write_bytes(torch.compiler.save_cache_artifacts()[0])
found = {"ready": ready, "call": call, "hits": counters["inductor"]["fxgraph_cache_hit"]}
Path(result).write_text(json.dumps(found))
"""


def first_call(caches: Path, options: argparse.Namespace, how: str, artifacts: Path) -> dict[str, Any]:
    result = caches / "result.json"
    variables = environment(caches)
    began, used = time.time(), _cpu_seconds()
    spawn(["-c", CALL, options.mode, options.device, how, str(artifacts), str(result)], variables)
    return {**json.loads(result.read_text()), "process": time.time() - began, "cpu": _cpu_seconds() - used}


def _cpu_seconds() -> float:
    """Of all processes that have ended, which on a busy machine repeats better than a clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="max-autotune-no-cudagraphs")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aotc-bench-") as name:
        folder = Path(name)
        mega, store = folder / "mega", folder / "store"
        rows = {"cold": [first_call(folder / "cold", options, "cold", mega)]}
        saving = [sys.executable, "-m", "aotc", "cache", "save", "gpt:bench", "--store", str(store), "--json"]
        done = subprocess.run(saving, cwd=ROOT, env=environment(folder / "cold"), capture_output=True, check=False)
        if done.returncode:
            raise Failed(done.stderr.decode())
        saved = json.loads(done.stdout)
        for number in range(options.rounds):
            for how, artifacts in (("mega", mega), ("restored", store)):
                rows.setdefault(how, []).append(first_call(folder / f"{how}{number}", options, how, artifacts))
        print(
            f"mega-cache {mega.stat().st_size / 1e6:.2f} MB; saved {saved['stored'] / 1e6:.2f} MB of {saved['files']}"
        )
        for how, found in rows.items():
            best = min(found, key=lambda one: one["ready"] + one["call"])
            print(
                f"{how:9} ready {best['ready']:6.2f} s  first call {best['call']:6.2f} s  "
                f"process {best['process']:6.2f} s  of CPU time {best['cpu']:6.2f} s  hits {best['hits']}"
            )


if __name__ == "__main__":
    main()
