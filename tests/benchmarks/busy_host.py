"""What OpenMP's threads cost on a busy host: calls beside processes that burn as many CPUs. A script, not a test.

    aotc build manifests/quickstart.yaml
    python tests/benchmarks/busy_host.py [--store aotc-store] [--burning 2] [--rounds 3]

Each round is a fresh process with each setting, in turns: libgomp as it is by default (`GOMP_SPINCOUNT=300000`), as a
load of aotc leaves it, and `OMP_WAIT_POLICY=passive`. Milliseconds of a call, its wall time and the CPU time of all
threads: the medians of 60 calls, and of the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

SETTINGS = {"libgomp's default": {"GOMP_SPINCOUNT": "300000"}, "aotc": {}, "passive": {"OMP_WAIT_POLICY": "passive"}}
CHILD = """
import statistics, sys, time, torch, aotc
from examples.models import transformer_block
module, x = transformer_block(width=256, heads=4).eval(), torch.randn(4, 128, 256)
compiled, wall, cpu = aotc.load(sys.argv[1], module), [], []
with torch.no_grad():
    for _ in range(65):
        began, used = time.perf_counter(), time.process_time()
        compiled(x)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
print(1e3 * statistics.median(wall[5:]), 1e3 * statistics.median(cpu[5:]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("aotc-store"))
    parser.add_argument("--burning", type=int, default=len(os.sched_getaffinity(0)), help="processes; 0: a quiet host")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    ref = f"{options.store.absolute()}#quickstart"
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.burning)]
    found: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
    try:
        for _ in range(options.rounds):
            for name, setting in SETTINGS.items():
                command = [sys.executable, "-W", "ignore", "-c", CHILD, ref]
                ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=plain | setting)
                found[name].append([float(one) for one in ran.stdout.split()])
    finally:
        for process in burning:
            process.kill()
    print(f"{'':20}{'wall ms':>10}{'CPU ms':>10}   beside {options.burning} busy processes")
    for name, each in found.items():
        wall, cpu = (statistics.median(one[at] for one in each) for at in (0, 1))
        print(f"{name:20}{wall:10.1f}{cpu:10.1f}")


if __name__ == "__main__":
    main()
