"""A model on a CPU in bfloat16 and in int8: eager, aotc, ONNX Runtime and OpenVINO, one thread.

    pip install -e '.[peers]' transformers torchao
    taskset -c 0 python tests/benchmarks/narrow_peers.py --model vit

Models are those of peers.py. Each contender narrows the model as its own guide says: torch by `.bfloat16()`, by
torchao's int8 weights with activations that are quantised in the call, and for convolutions by PT2E; ONNX Runtime,
which has no bfloat16 on x86-64, by `quantize_dynamic`, and for convolutions by `quantize_static`; OpenVINO by its own
bfloat16, and with the files of ONNX Runtime's static quantisation. Cells are medians (least) of CPU milliseconds in
turns, and how far the result is from eager's in float32, relative to its norm.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from tests.benchmarks.peers import MODELS, ROUNDS, Times, given_for, made  # noqa: E402

CONVOLUTIONS = {"resnet"}
"""Models that are quantised statically."""


def narrowed(name: str, dtype: str) -> nn.Module:
    model = made(name)
    if dtype == "bfloat16":
        return model.bfloat16()
    if name in CONVOLUTIONS:
        return statically(model, given_for(MODELS[name][1]))
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def statically(model: nn.Module, inputs: tuple[Tensor, ...]) -> nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(torch.export.export(model, inputs).module(), quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared)  # type: ignore[no-any-return]


def as_given(inputs: tuple[Tensor, ...], dtype: str) -> tuple[Tensor, ...]:
    return tuple(x.bfloat16() if dtype == "bfloat16" and x.is_floating_point() else x for x in inputs)


def built(name: str, dtype: str, folder: Path) -> Path:
    described = {
        key: form | ({"dtype": "bfloat16"} if dtype == "bfloat16" and "init" not in form else {})
        for key, form in MODELS[name][1].items()
    }
    factory = {"factory": "tests/benchmarks/narrow_peers.py:narrowed", "kwargs": {"name": name, "dtype": dtype}}
    model = factory | {"weights": "frozen", "targets": ["native"], "inputs": described}
    (folder / "manifest.yaml").write_text(json.dumps({"version": 1, "models": {dtype: model}}))
    command = [sys.executable, "-m", "aotc", "build", folder / "manifest.yaml", "--store", folder / "store"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--jobs", "1"], cwd=ROOT, env=one_thread, check=True, stdout=sys.stderr)
    return folder / "store"


def quantised_file(name: str, path: Path, given: dict[str, Any]) -> Path:
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static

    target = path.with_suffix(".int8.onnx")
    if name not in CONVOLUTIONS:
        quantize_dynamic(path, target, weight_type=QuantType.QInt8)
        return target

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.rest = [given]

        def get_next(self) -> dict[str, Any] | None:
            return self.rest.pop() if self.rest else None

    quantize_static(path, target, Once(), per_channel=True)
    return target


def measure(name: str, dtype: str, folder: Path) -> dict[str, tuple[Times, float]]:
    import aotc
    from aotc.tools.bench.peers import export_onnx, onnxruntime_session, openvino_session

    module, inputs = made(name), given_for(MODELS[name][1])
    expected, narrow_inputs = module(*inputs), as_given(inputs, dtype)
    path = folder / "model.onnx"
    export_onnx(module, inputs, {}, path)
    given = {f"input{number}": each.numpy() for number, each in enumerate(inputs)}
    narrow, served = narrowed(name, dtype), aotc.load(dtype, store=built(name, dtype, folder))
    calls: dict[str, Callable[[], Any]] = {
        "eager, float32": lambda: module(*inputs),
        "eager": lambda: narrow(*narrow_inputs),
        "aotc": lambda: served(*narrow_inputs),
    }
    sessions = {"ONNX Runtime, float32": onnxruntime_session(str(path), 1)}
    if dtype == "bfloat16":
        sessions["OpenVINO"] = openvino_session(str(path), 1, "bf16")
    else:
        small = str(quantised_file(name, path, given))
        sessions["ONNX Runtime"] = onnxruntime_session(small, 1)
        if name in CONVOLUTIONS:
            sessions["OpenVINO"] = openvino_session(small, 1)
    for contender, session in sessions.items():
        calls[contender] = lambda session=session: torch.from_numpy(session(given)[0])  # type: ignore[misc]
    far = {each: float((call().float() - expected).norm() / expected.norm()) for each, call in calls.items()}
    times = {contender: Times() for contender in calls}
    for _ in range(ROUNDS):
        for contender, call in calls.items():
            times[contender].add(call)
    return {contender: (times[contender], far[contender]) for contender in calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=["resnet", "bert", "vit"])
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "int8"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.model or ("resnet", "bert", "vit"):
        for dtype in options.dtype or ("bfloat16", "int8"):
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                found = measure(name, dtype, Path(folder))
            cells = [
                f"{each} {statistics.median(times.cpu):.1f} ({min(times.cpu):.1f}), {far:.4f}"
                for each, (times, far) in found.items()
            ]
            print(f"| {name} | {dtype} | {' | '.join(cells)} | load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    main()
