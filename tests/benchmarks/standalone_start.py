"""CPU seconds from the start of a process to the first output, and of one call: with torch, without, without numpy, and
of an exported folder.

    python tests/benchmarks/standalone_start.py STORE#quickstart WEIGHTS.safetensors [--rounds 5] [--python PYTHON]

All in one run, in turns; the least of the rounds. Modules have bytecode, as pip installs them: a round before the first
one writes it. `--python` is for the ways without torch: of an environment in which aotc is installed without extras
(and numpy), whose start has no more than it needs. The input is float32 [1, 128, 256], as of manifests/quickstart.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile

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
took = (time.process_time() - began) / CALLS
memory = next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
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
    "exported folder, buffers": f"""
import sys
sys.path.insert(0, sys.argv[3])
from aotc_exported import ExportedModel
model = ExportedModel()
x = memoryview(bytes(4 * 128 * 256)).cast("f", [{SHAPE}])
""",
}


def measured(python: str, code: str, calls: int, *arguments: str) -> list[float]:
    command = [python, "-c", code + TIMED.replace("CALLS", str(calls)), *arguments]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    found: list[float] = json.loads(ran.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ref")
    parser.add_argument("weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the ways without torch")
    given = parser.parse_args()
    pythons = {way: sys.executable if "import sys, torch" in code else given.python for way, code in WAYS.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/exported"
        arguments = given.ref, given.weights, folder
        exporting = ["export", given.ref, "--standalone", folder, "--weights", given.weights]
        subprocess.run([sys.executable, "-m", "aotc", *exporting], check=True, stdout=subprocess.DEVNULL)
        rounds = [
            {way: measured(pythons[way], code, given.calls, *arguments) for way, code in WAYS.items()}
            for _ in range(given.rounds + 1)
        ][1:]
    least = {way: [min(each[way][column] for each in rounds) for column in range(3)] for way in WAYS}
    base = least["aotc with torch"]
    print(f"{'':25}{'first output, CPU s':>22}{'ratio':>8}{'call, CPU ms':>14}{'ratio':>8}{'memory, MiB':>13}")
    for way, (first, call, memory) in least.items():
        print(f"{way:25}{first:22.3f}{first / base[0]:8.3f}{1000 * call:14.2f}{call / base[1]:8.2f}{memory:13.0f}")


if __name__ == "__main__":
    main()
