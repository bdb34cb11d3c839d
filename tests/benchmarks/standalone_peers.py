"""Start and call of a model without torch beside aotc with torch, ONNX Runtime and OpenVINO, one thread, float32.

    pip install -e '.[peers]' transformers
    python tests/benchmarks/standalone_peers.py --model bert --model resnet --rounds 4

Models are those of peers.py: built for torch, for `runtime: standalone` with live and with frozen weights, and exported
by torch.onnx. ONNX Runtime starts from a file that it has optimised before, OpenVINO with its own cache. CPU seconds
from the start of a process to the first output, CPU milliseconds of a call, MiB of memory: the least of all rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import torch  # noqa: E402

from tests.benchmarks.peers import MODELS, given_for, made  # noqa: E402
from tests.benchmarks.standalone_start import measured  # noqa: E402

ARRAY = "import sys, numpy\nshape, dtype = eval(sys.argv[4])\nx = numpy.zeros(shape, dtype)\n"
WAYS = {
    "aotc with torch": """
import sys, torch, aotc
torch.set_num_threads(1), torch.set_grad_enabled(False)
shape, dtype = eval(sys.argv[4])
model, x = aotc.load("any", store=sys.argv[1], weights=sys.argv[2]), torch.zeros(shape, dtype=getattr(torch, dtype))
""",
    "without torch, live": f"""{ARRAY}
import aotc.standalone
model = aotc.standalone.load("live", store=sys.argv[1], weights=sys.argv[2])
""",
    "without torch, frozen": f"""{ARRAY}
import aotc.standalone
model = aotc.standalone.load("frozen", store=sys.argv[1])
""",
    "without torch and numpy, frozen": """
import sys, math, aotc.standalone
shape, dtype = eval(sys.argv[4])
code, size = {"int64": ("q", 8), "float32": ("f", 4)}[dtype]
x = memoryview(bytes(size * math.prod(shape))).cast(code, shape)
model = aotc.standalone.load("frozen", store=sys.argv[1])
""",
    "ONNX Runtime": f"""{ARRAY}
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimised
session = onnxruntime.InferenceSession(sys.argv[3] + "/optimised.onnx", options, providers=["CPUExecutionProvider"])
model = lambda x: session.run(None, {{"input0": x}})
""",
    "OpenVINO": f"""{ARRAY}
import openvino
core = openvino.Core()
settings = {{"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}}
compiled = core.compile_model(sys.argv[3] + "/model.onnx", "CPU", settings | {{"CACHE_DIR": sys.argv[3] + "/cache"}})
request = compiled.create_infer_request()
model = lambda x: request.infer({{"input0": x}})
""",
}


def prepared(name: str, folder: Path) -> tuple[str, ...]:
    """The arguments of a way: a store, a checkpoint, a folder with the ONNX files, the input's shape and dtype."""
    import onnxruntime
    from safetensors.torch import save_file

    from aotc.tools.bench.peers import export_onnx

    module, inputs = made(name), given_for(MODELS[name][1])
    described = {"factory": "tests/benchmarks/peers.py:made", "kwargs": {"name": name}, "inputs": MODELS[name][1]}
    alone = described | {"runtime": "standalone"}
    models: dict[str, Any] = {"any": described, "live": alone, "frozen": alone | {"weights": "frozen"}}
    (folder / "manifest.yaml").write_text(json.dumps({"version": 1, "models": models}))
    command = [sys.executable, "-m", "aotc", "build", folder / "manifest.yaml", "--store", folder / "store"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--jobs", "1"], cwd=ROOT, env=one_thread, check=True, stdout=sys.stderr)
    weights = {key: value.contiguous().clone() for key, value in module.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    with torch.no_grad():
        export_onnx(module, inputs, {}, folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    (x,) = inputs
    form = repr((list(x.shape), str(x.dtype).removeprefix("torch.")))
    return str(folder / "store"), str(folder / "model.safetensors"), str(folder), form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--calls", type=int, default=10)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in asked.model or ("block", "bert", "gpt2", "vit", "resnet"):
        with tempfile.TemporaryDirectory() as folder:
            given = prepared(name, Path(folder))
            rounds = [
                {way: measured(sys.executable, code, asked.calls, *given) for way, code in WAYS.items()}
                for _ in range(asked.rounds + 1)  # the first one writes bytecode and OpenVINO's cache
            ][1:]
        cells = []
        for way in WAYS:
            first, call, memory = (min(each[way][column] for each in rounds) for column in range(3))
            cells.append(f"{first:.2f} s, {1000 * call:.1f} ms, {memory:.0f}")
        print(f"| {name} | {' | '.join(cells)} | load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
