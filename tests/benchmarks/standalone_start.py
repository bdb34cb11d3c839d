"""CPU seconds from the start of a process to the first output, and of one call: with torch, without, and without numpy.

    python tests/benchmarks/standalone_start.py STORE#quickstart WEIGHTS.safetensors [--rounds 5]

All in one run, in turns; the least of the rounds. The input is float32 [1, 128, 256], as of manifests/quickstart.yaml.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

SHAPE = "1, 128, 256"
TIMED = """
import resource, time
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
model(x)
first, began = cpu(), time.process_time()
for _ in range(CALLS): model(x)
import json
took, memory = (time.process_time() - began) / CALLS, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([first, took, memory]))
"""
WAYS = {
    "aotc with torch": f"""
import sys, torch, aotc
torch.set_grad_enabled(False)
model, x = aotc.load(sys.argv[1], weights=sys.argv[2]), torch.zeros({SHAPE})
""",
    "standalone, numpy": f"""
import sys, numpy, aotc.standalone
model = aotc.standalone.load(sys.argv[1], weights=sys.argv[2])
x = numpy.zeros(({SHAPE}), numpy.float32)
""",
    "standalone, buffers": f"""
import sys, aotc.standalone
model = aotc.standalone.load(sys.argv[1], weights=sys.argv[2])
x = memoryview(bytes(4 * 128 * 256)).cast("f", [{SHAPE}])
""",
}


def measured(code: str, calls: int, *arguments: str) -> list[float]:
    command = [sys.executable, "-c", code + TIMED.replace("CALLS", str(calls)), *arguments]
    found: list[float] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref")
    parser.add_argument("weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=50)
    given = parser.parse_args()
    rounds = [
        {way: measured(code, given.calls, given.ref, given.weights) for way, code in WAYS.items()}
        for _ in range(given.rounds)
    ]
    least = {way: [min(each[way][column] for each in rounds) for column in range(3)] for way in WAYS}
    base = least["aotc with torch"]
    print(f"{'':22}{'first output, CPU s':>22}{'ratio':>8}{'call, CPU ms':>14}{'ratio':>8}{'memory, MiB':>13}")
    for way, (first, call, memory) in least.items():
        print(f"{way:22}{first:22.3f}{first / base[0]:8.3f}{1000 * call:14.2f}{call / base[1]:8.2f}{memory:13.0f}")


if __name__ == "__main__":
    main()
