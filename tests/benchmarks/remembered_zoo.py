"""Models of tests/zoo through `aotc.compile` alone, each in two processes: is the second one compiled, and right?

    python tests/benchmarks/remembered_zoo.py --part 1/3 --out zoo-1.json

A process makes the model, gives it to `aotc.compile` with `build="exit"`, and calls it with the example inputs of its
manifest. `factory=` is given only where `aotc.compile` asks for it. The second process calls it again, beside the
module itself. A model is `compiled` if its code ran and gave eager's results, `eager` with the reason if not, `drawn`
if it draws numbers, which are others than eager's, and `wrong` if results differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from own_caches import ROOT, environment

ZOO = ROOT / "tests" / "zoo"
TIMEOUT = 600

SCRIPT = """
import copy, importlib, json, sys
from pathlib import Path
import torch, aotc
from torch.utils import _pytree as pytree
from aotc.manifest import read_manifest
from aotc.models.auto_inputs import with_inputs
from aotc.models.calls import arguments_of, modes_of, signature_leaves
from aotc.models.factory import build_module
from aotc.models.signature import make_signature
from aotc.records import tuned_dims
from aotc.tensors.rounding import difference
from aotc.tools.recording.module_factories import factory_of


def made(spec):
    file, _, name = spec.factory.partition(":")
    if not file.endswith(".py"):
        return build_module(spec, Path(sys.argv[1]).parent)
    make = importlib.import_module(file.removesuffix(".py"))
    for part in name.split("."):
        make = getattr(make, part)
    torch.manual_seed(0)
    module = make(**spec.kwargs).train(spec.train)
    return module.to(getattr(torch, spec.dtype)) if spec.dtype else module


def results(call, args, kwargs, seed=1):
    torch.manual_seed(seed)
    return pytree.tree_leaves(call(*copy.deepcopy(args), **copy.deepcopy(kwargs)))


def equal(ours, theirs):
    "But for rounding: of half precision as aotc itself compares, which allows more."

    def same(a, b):
        if not isinstance(a, torch.Tensor):
            return a == b
        if a.dtype in (torch.bfloat16, torch.float16):
            return difference(a, b) <= 1
        return torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)

    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def main():
    manifest = read_manifest(Path(sys.argv[1]))
    module = made(manifest.models[sys.argv[2]])
    spec = with_inputs(manifest, manifest.models[sys.argv[2]], module)
    plain = copy.deepcopy(module)
    signature = make_signature(spec, module)
    leaves = signature_leaves(spec, signature, tuned_dims(spec.buckets[0]), "cpu", 0, Path(sys.argv[1]).parent)
    args, kwargs = arguments_of(signature, leaves)
    tried = copy.deepcopy(module)
    with modes_of(spec, "cpu"):
        results(tried, args, kwargs)
    known = factory_of(tried, Path("/")) is not None  # after a call, as aotc.compile looks at it
    given = {} if known else {"factory": spec.factory.replace(".py:", ":"), "kwargs": spec.kwargs}
    model = aotc.compile(module, build="exit", train=spec.train, **given)
    with modes_of(spec, "cpu"), torch.set_grad_enabled(spec.train):
        first = results(model, args, kwargs)
        theirs = results(plain, args, kwargs)
        drawn = not equal(*(results(copy.deepcopy(tried), args, kwargs, seed) for seed in (1, 2)))
    state = model.explain()
    remembering = model._remembering
    calls = sum(code.stats().calls for code in getattr(remembering, "training", remembering).known.compiled)
    compilers = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
    print(json.dumps({
        "right": equal(first, theirs), "drawn": drawn, "calls": calls, "factory": not known,
        "reasons": [*state.failed.values(), *state.notes], "models": state.models, "compilers": compilers,
    }))


if __name__ == "__main__":
    main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="the models of one part of so many: 1/3")
    parser.add_argument("--model", action="append", default=[], help="only this model (may be given several times)")
    parser.add_argument("--manifests", nargs="*", default=["manifest.yaml", "regions.yaml"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from aotc.manifest import read_manifest

    part, parts = map(int, given.part.split("/"))
    manifests = [(ZOO / file, read_manifest(ZOO / file, given.model)) for file in given.manifests]
    names = [(path, name) for path, manifest in manifests for name in manifest.models]
    rows = []
    print("| model | second run | factory given | first run and build, s | second run, s | why |")
    print("|---|---|---|---:|---:|---|")
    for manifest, name in names[part - 1 :: parts]:
        row = _tried(manifest, name)
        rows.append(row)
        print(
            f"| {' | '.join(str(row[key]) for key in ('model', 'second', 'factory', 'build_s', 'run_s', 'why'))} |",
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1))
    counts = {kind: sum(row["second"] == kind for row in rows) for kind in dict.fromkeys(row["second"] for row in rows)}
    print(f"\n{len(rows)} models: {counts}")


def _tried(manifest: Path, name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "second": "failed", "factory": "", "build_s": "", "run_s": "", "why": ""}
    with tempfile.TemporaryDirectory(prefix="aotc-remembered-zoo-") as folder:
        for column in ("build_s", "run_s"):
            began = time.monotonic()
            ran = _run(Path(folder), manifest, name)
            row[column] = round(time.monotonic() - began, 1)
            if ran.returncode:
                return row | {"why": (ran.stderr.strip().splitlines() or ["killed"])[-1][:200]}
    told = json.loads(ran.stdout.splitlines()[-1])
    second = "compiled" if told["calls"] else "eager"
    if not told["right"]:
        second = "drawn" if told["drawn"] else "wrong"
    why = "; ".join(reason.splitlines()[0] for reason in told["reasons"])[:200]
    compilers = f"imports {', '.join(told['compilers'])}" if told["compilers"] else ""
    return row | {
        "second": second,
        "factory": "yes" if told["factory"] else "",
        "why": "; ".join(filter(None, (why, compilers))),
    }


def _run(folder: Path, manifest: Path, name: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script" / "script.py"
    script.parent.mkdir(exist_ok=True)
    script.write_text(SCRIPT)
    variables = environment(folder)
    variables["PYTHONPATH"] = f"{ZOO}:{variables['PYTHONPATH']}"
    command = [sys.executable, str(script), str(manifest), name]
    try:
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 1, "", f"more than {error.timeout:g} s")


if __name__ == "__main__":
    main()
