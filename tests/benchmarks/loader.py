"""How small the loader is: modules, lines and milliseconds of CPU of a plain load. A script; a test counts its lines.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/loader.py [--store aotc-store] [--ref quickstart] [--rounds 15] [--modules]
    python tests/benchmarks/loader.py --against ../other-checkout      # rounds of both take turns

A plain load: a live artifact in a local store, a module, and a first call. Each round is a fresh process that imports
torch, makes the module and calls it before the clock starts. A round of each checkout that is not counted reads the
files and writes Python's bytecode; `PYTHONDONTWRITEBYTECODE` is cleared for it. What is shown is the time that all
threads of the process spend on a CPU: the median and the least of the rounds. `packages` are msgspec and zstandard,
imported first. `executed` are the lines of aotc that run from `import aotc` to the end of a second call, each counted
once: `sys.settrace` tells them, in a round of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("packages", "import of aotc", "load", "first call")

CHILD = """
import gc, json, sys, time
import torch
torch.set_num_threads(1)  # what OpenMP's threads spend on waiting is not the loader's
from examples.models import transformer_block
module = transformer_block(width=256, heads=4).eval()
x = torch.randn(1, 128, 256)
with torch.no_grad():
    module(x)  # what torch does in its first call is eager's, too
    gc.disable()  # as aotc does while its modules are imported
    times = [time.process_time()]
    import msgspec, zstandard
    times.append(time.process_time())
    gc.enable()
    before = set(sys.modules)
    import aotc
    load = aotc.load
    times.append(time.process_time())
    compiled = load(sys.argv[1], module)
    times.append(time.process_time())
    compiled(x)
    times.append(time.process_time())
new = set(sys.modules) - before
print(json.dumps({
    "parts": [1000 * (after - before) for before, after in zip(times, times[1:])],
    "ours": {name: sys.modules[name].__file__ for name in new if name.partition(".")[0] == "aotc"},
    "others": sorted(name for name in new if name.partition(".")[0] != "aotc"),
}))
"""

COUNTED = """
import json, sys
import torch
from examples.models import transformer_block
module = transformer_block(width=256, heads=4).eval()
x = torch.randn(1, 128, 256)
import msgspec, zstandard
executed = set()

def of_frame(frame, event, argument):
    if frame.f_globals.get("__name__", "").partition(".")[0] != "aotc":
        return None
    if event == "line":
        executed.add((frame.f_globals["__name__"], frame.f_lineno))
    return of_frame

with torch.no_grad():
    module(x)
    sys.settrace(of_frame)
    import aotc
    compiled = aotc.load(sys.argv[1], module)
    compiled(x)
    compiled(x)
    sys.settrace(None)
ours = [name for name in sys.modules if name.partition(".")[0] == "aotc"]
print(json.dumps({"modules": sorted(ours), "executed": sorted(executed)}))
"""


def count_executed(checkout: Path, ref: str) -> dict[str, Any]:
    """Of a load and two calls in a fresh process: the modules of aotc, and the lines that ran, by module and number."""
    return run_round(checkout, ref, COUNTED)


def run_round(checkout: Path, ref: str, child: str = CHILD) -> dict[str, Any]:
    """Load and call in a fresh process of the aotc in that folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "ignore", "-c", child, ref]  # with -c, the working folder is where aotc lies
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment, cwd=checkout)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def print_table(checkout: Path, rounds: list[dict[str, Any]], executed: int, modules: bool) -> None:
    lines = {
        name: len(Path(path).read_text().splitlines())
        for name, path in rounds[0]["ours"].items()
        if path.endswith(".py")
    }
    others = " ".join(rounds[0]["others"]) or "none"
    size = f"{len(lines)} modules of aotc, {sum(lines.values())} lines, {executed} executed"
    print(f"{checkout}: {size}; others beside the packages: {others}")
    print(f"  {'CPU milliseconds':20}{'median':>8}{'least':>8}")
    columns = [*zip(*(one["parts"] for one in rounds), strict=True), [sum(one["parts"]) for one in rounds]]
    for part, taken in zip((*PARTS, "all"), columns, strict=True):
        print(f"  {part:20}{statistics.median(taken):8.1f}{min(taken):8.1f}")
    if modules:
        for name, count in sorted(lines.items(), key=lambda item: -item[1]):
            print(f"  {count:6} {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("aotc-store"), help="a folder; relative to each checkout")
    parser.add_argument("--ref", default="quickstart")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modules", action="store_true", help="list them")
    parser.add_argument("--against", type=Path, help="another checkout of aotc, measured in turn with this one")
    options = parser.parse_args()
    ref = f"{options.store}#{options.ref}"
    rounds: dict[Path, list[dict[str, Any]]] = {ROOT: []}
    if options.against is not None:
        rounds[options.against.resolve()] = []
    for number in range(options.rounds + 1):
        for checkout, found in rounds.items():
            one = run_round(checkout, ref)
            if number:  # the first one reads the files and writes Python's bytecode
                found.append(one)
    for checkout, found in rounds.items():
        print_table(checkout, found, len(count_executed(checkout, ref)["executed"]), options.modules)


if __name__ == "__main__":
    main()
