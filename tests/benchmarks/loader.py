"""How small the loader is: modules, lines and milliseconds of a plain load. A script, not a test.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/loader.py [--store aotc-store] [--ref quickstart] [--rounds 15] [--modules]

A plain load: a live artifact in a local store, a module, and a first call. Each round is a fresh process that imports
torch and makes the module before the clock starts; every file was read before. The median and the least of the rounds
are shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

CHILD = """
import json, sys, time
import torch
from examples.models import transformer_block
module = transformer_block(width=256, heads=4).eval()
x = torch.randn(1, 128, 256)
with torch.no_grad():
    module(x)  # what torch does in its first call is eager's, too
    before = set(sys.modules)
    began = time.perf_counter()
    import aotc
    load = aotc.load
    imported = time.perf_counter()
    compiled = load(sys.argv[1], module)
    loaded = time.perf_counter()
    compiled(x)
    called = time.perf_counter()
new = set(sys.modules) - before
print(json.dumps({
    "import": imported - began, "load": loaded - imported, "first call": called - loaded, "all": loaded - began,
    "ours": {name: sys.modules[name].__file__ for name in new if name.partition(".")[0] == "aotc"},
    "others": sorted(name for name in new if name.partition(".")[0] != "aotc"),
}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="aotc-store")
    parser.add_argument("--ref", default="quickstart")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--modules", action="store_true", help="list them")
    options = parser.parse_args()
    command = [sys.executable, "-W", "ignore", "-c", CHILD, f"{options.store}#{options.ref}"]
    rounds = []
    for number in range(options.rounds + 1):
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=None, cwd=ROOT)
        if number:  # the first one reads the files and writes Python's caches
            rounds.append(json.loads(ran.stdout))
    lines = {name: len(Path(path).read_text().splitlines()) for name, path in rounds[0]["ours"].items()}
    print(f"{len(lines)} modules of aotc, {sum(lines.values())} lines, and {len(rounds[0]['others'])} others")
    for part in ("import", "load", "all", "first call"):
        taken = [1000 * one[part] for one in rounds]
        print(f"  {part:12}{statistics.median(taken):8.1f} ms median{min(taken):8.1f} ms least")
    if options.modules:
        for name, count in sorted(lines.items(), key=lambda item: -item[1]):
            print(f"  {count:6} {name}")
        print("  others:", *rounds[0]["others"])


if __name__ == "__main__":
    main()
