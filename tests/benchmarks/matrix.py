"""Which environments run what was built in which: torch × Python × CPU level, each cell of a table in a process.

    python tests/benchmarks/matrix.py --folder FOLDER \\
        --on py3.11-torch2.11=…/bin/python --on py3.12-torch2.14=…/bin/python \\
        --load haswell="qemu-x86_64 -cpu Haswell …/bin/python" --load old-glibc="chroot … python3"

`--on` is an environment that builds and loads, `--load` one that only loads: a name and a command that starts Python,
with torch and what `aotc[build]` needs (`msgspec`, `safetensors` and `zstandard` to load). The stores are
built in FOLDER, which every environment must see under its path; units that are there already are not built again.

On each builder, every patch of its torch version is applied, also those for GPUs (`--patches` does nothing else), a
manifest is built, and `aotc verify` compares all models with eager: a CNN, a GPT, a training step, a model of two
ranks, and one with frozen weights. Its picks are exported, a build that may measure nothing is pinned to them, and
exports the same. With torch's CUDA build, where no GPU is, three models are built for an absent one, and their code is
looked at.

Of two others, each environment loads what every builder built: `block` for `cpu:x86-64-v3` and for the builder's own
CPU, `operators` for `cpu:x86-64-v3`. A cell says which targets `aotc.load` took, and that all outputs are eager's;
where torch differs, by `compat="abi"`, after it was refused without. Or it holds the refusal. The exit status is 1
where a patch does not fit, a build, pins or `aotc verify` fail, a process crashed, an output differs, a compiler was
imported, or anything was raised that is not an error of aotc.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy")
LEVELS = {"cpu:x86-64-v3": "v3", "cpu:x86-64-v4": "v4", "cpu:amx": "amx"}
PINNED = ("packed",)
FOR_A_GPU, GPU = ("block", "cnn", "training"), "cuda:sm_90"
SECONDS = 3600

MANIFEST = """
version: 1
models:
  block:
    factory: examples.models:transformer_block
    kwargs: {width: 64, heads: 4}
    targets: [cpu:x86-64-v3, native]
    inputs:
      x: {shape: [batch, seq, 64]}
    buckets:
      - {batch: 1, seq: [1, 64]}
  operators:
    factory: tests.benchmarks.matrix_models:operators
    targets: [cpu:x86-64-v3]
    inputs:
      image: {shape: [batch, 3, 16, 16]}
      tokens: {shape: [batch, 12], dtype: int64, init: {randint: [0, 32]}}
    buckets:
      - {batch: 2}
  cnn:
    factory: tests.benchmarks.matrix_models:cnn
    targets: [cpu:x86-64-v3]
    inputs:
      input: {shape: [batch, 3, 16, 16]}
    buckets:
      - {batch: [1, 8]}
  gpt:
    factory: examples.models:gpt
    kwargs: {layers: 2, width: 64, heads: 4, vocabulary: 96, positions: 64}
    targets: [cpu:x86-64-v3]
    mode: default
    inputs:
      input_ids: {shape: [batch, seq], dtype: int64, init: {randint: [0, 96]}}
    buckets:
      - {batch: 1, seq: [1, 64]}
  packed:
    factory: tests.benchmarks.matrix_models:packed
    weights: frozen
    inputs:
      input: {shape: [batch, 96]}
    buckets:
      - {batch: 64}
  training:
    factory: examples/training/model.py:classifier
    targets: [cpu:x86-64-v3]
    train: true
    mode: default
    options: {fallback_random: true} # dropout draws what eager draws
    inputs:
      x: {shape: [batch, 16, 32]}
      labels: {shape: [batch], dtype: int64, init: {randint: [0, 4]}}
    buckets:
      - {batch: [2, 64]}
  ranks:
    factory: examples/tensor_parallel/model.py:llama
    targets: [cpu:x86-64-v3]
    parallel: {tensor: 2}
    mode: default
    inputs:
      tokens: {shape: [1, seq], dtype: int64, init: {randint: [0, 512]}}
      start: {shape: [], dtype: int64, init: zeros}
    buckets:
      - {seq: {range: [2, 32], tune_at: 16}}
"""


# -- within an environment --------------------------------------------------------------------------------------------


def here() -> dict[str, str]:
    import torch

    from aotc.machine.environment import this_environment
    from aotc.machine.native_target import native_target

    environment = this_environment()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    return {
        "python": platform.python_version() + ("" if gil else ", without the GIL"),
        "torch": str(torch.__version__),
        "level": LEVELS[native_target()],
        "glibc": environment.libc,
        "libstdc++": environment.libstdcxx[-1].rpartition("_")[2],
    }


def unfit_patches() -> list[str]:
    """Apply each patch of this torch version, on its own; what is wrong with those that do not fit."""
    from torch.fx import Graph

    from aotc.compiler.patches.machinery.patch import flaw_of
    from aotc.compiler.patches.machinery.registry import HOOKS, PATCHES

    found = [f"{place}: {flaw}" for place, targets in HOOKS.items() for flaw in map(flaw_of, targets) if flaw]
    for patch in PATCHES:
        if not (patch.is_for("cpu") or patch.is_for("cuda")):
            continue
        flaws = patch.flaws()
        if not flaws:
            try:
                with patch.apply(Graph()):
                    pass
            except Exception as error:
                flaws = [f"{type(error).__name__}: {error}"]
        found += [f"{patch.name} ({patch.torch}): {flaw}" for flaw in flaws]
    return found


def build(folder: Path) -> dict[str, str]:
    """Build the manifest into a store, and verify it; how this environment is, and "" or what failed."""
    manifest, store = folder / "matrix.yaml", folder / "store"
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write_text(MANIFEST.replace("factory: examples/", f"factory: {os.path.relpath(ROOT, folder)}/examples/"))
    failed = [f"patches that do not fit: {'; '.join(unfit)}"] if (unfit := unfit_patches()) else []
    gpu = ""
    try:
        run_aotc("build", manifest, "--store", store, "--jobs", "1")
        run_aotc("verify", manifest, "--store", store, "--seeds", "1")
        pin(manifest, store, folder)
        gpu = build_for_absent_gpu(manifest, folder)
    except FailedError as error:
        failed.append(str(error))
    return {**here(), "gpu": gpu, "failed": "; ".join(failed)}


class FailedError(Exception):
    pass


def run_aotc(*arguments: object) -> None:
    command = [sys.executable, "-m", "aotc", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        said = done.stdout.strip()[-1500:]
        raise FailedError(f"`aotc {' '.join(command[3:])}` ended with status {done.returncode}: {said}")


def pin(manifest: Path, store: Path, folder: Path) -> None:
    """Export the picks, build from nothing but these, and export them again."""
    for model in PINNED:
        files = [folder / f"{model}-{place}.json" for place in ("measured", "pinned")]
        run_aotc("picks", model, "--store", store, "--export", files[0])
        run_aotc("build", manifest, "--model", model, "--store", folder / "pinned", "--picks", files[0], "--locked")
        run_aotc("picks", model, "--store", folder / "pinned", "--export", files[1])
        measured, again = (json.loads(file.read_text())["units"] for file in files)
        if not any(unit["picks"] for unit in measured):
            raise FailedError(f"`{model}` has no picks, though it is autotuned")
        if measured != again:
            raise FailedError(f"the picks of `{model}` are others when they are pinned: {measured} {again}")


def build_for_absent_gpu(manifest: Path, folder: Path) -> str:
    """Build some models for a GPU that is not here; "" where torch has no CUDA, or a GPU is here."""
    import torch

    from aotc.store.layout.built import read_built
    from aotc.store.layout.bundle import read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference
    from tests.cubins import cubins_of, is_for

    if torch.version.cuda is None or torch.cuda.is_available():
        return ""
    anywhere = folder / "matrix-gpu.yaml"
    anywhere.write_text(re.sub(r"(?m)^    targets: .*$", f"    targets: [{GPU}]", manifest.read_text()))
    chosen = [f"--model={model}" for model in FOR_A_GPU]
    run_aotc("build", anywhere, "--store", folder / "gpu", *chosen, "--untuned", "--jobs", "1")
    store, kernels = Store.open(folder / "gpu"), 0
    for model in FOR_A_GPU:
        (entry,) = read_bundle(store, parse_reference(model)).artifacts
        files = (file for variant in read_built(store, entry).variants for file in variant.files)
        libraries = (store.blobs.load(file, 1 << 30) for file in files if file.name.endswith(".so"))
        cubins = [cubin for library in libraries for cubin in cubins_of(library)]
        kernels += len(cubins)
        if not cubins or not all(is_for(cubin, int(GPU[-2:])) for cubin in cubins):
            raise FailedError(f"the libraries of `{model}` have not only code for {GPU}")
    return f"{kernels} kernels"


def load(folders: Sequence[Path]) -> dict[str, Any]:
    """What came of each store. Each is loaded in a child of its own, so that a crash is a cell as any other."""
    import torch

    from aotc.machine.environment import cpu_features

    cpu_features()
    cells = {}
    for folder in folders:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(writing, json.dumps(_load_one(folder / "store")).encode())
                os._exit(0)
            except BaseException:
                os.write(writing, json.dumps({"crash": traceback.format_exc().strip()[-1500:]}).encode())
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as stream:
            said = stream.read()
        _, status = os.waitpid(child, 0)
        cells[folder.name] = json.loads(said) if said else {"crash": f"wait status {status}"}
    assert not torch.cuda.is_initialized()
    return {**here(), "cells": cells}


def _load_one(store: Path) -> dict[str, str]:
    import torch

    import aotc
    from examples.models import transformer_block
    from tests.benchmarks.matrix_models import operators

    torch.manual_seed(0)
    block = transformer_block(width=64, heads=4).eval()
    models: dict[str, tuple[Any, list[tuple[torch.Tensor, ...]]]] = {
        "block": (block, [(torch.randn(1, seq, 64),) for seq in (1, 7, 64)]),
        "operators": (operators().eval(), [(torch.randn(2, 3, 16, 16), torch.randint(0, 32, (2, 12)))]),
    }
    taken, refusals, outputs = set(), {}, {}
    for model, (module, calls) in models.items():
        try:
            compiled, way = aotc.load(f"{store}#{model}", module), ""
        except aotc.EnvironmentMismatchError as error:
            if not any("built with torch" in issue.message for issue in error.issues):
                refusals[model] = "; ".join(dict.fromkeys(issue.message for issue in error.issues))
                continue
            try:
                compiled, way = aotc.load(f"{store}#{model}", module, compat="abi"), " by abi"
            except aotc.AotcError as by_abi:
                refusals[model] = "; ".join(dict.fromkeys(issue.message for issue in by_abi.issues)) or by_abi.message
                continue
        except aotc.AotcError as error:
            refusals[model] = f"{type(error).__name__}: {error}"
            continue
        with torch.no_grad():
            outputs[model] = [compiled(*call) for call in calls]
        taken.add(LEVELS[compiled.artifact.target] + way)
    if imported := [name for name in COMPILERS if name in sys.modules]:
        return {"crash": f"imported {', '.join(imported)}"}
    for model, got in outputs.items():
        module, calls = models[model]
        with torch.no_grad():
            expected = [module(*call) for call in calls]
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)
    return {"runs": ", ".join(sorted(taken)), **{f"refused {model}": said for model, said in refusals.items()}}


# -- over the environments --------------------------------------------------------------------------------------------


def run_in(command: str, *arguments: str) -> dict[str, Any]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    script = str(Path(__file__).resolve())
    try:
        done = subprocess.run(
            [*shlex.split(command), script, *arguments],
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"crash": f"not done after {SECONDS} s"}
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        return dict(json.loads(last))
    except ValueError:
        return {"crash": f"exit status {done.returncode}: {(done.stderr + done.stdout).strip()[-1500:]}"}


def shown(cell: Mapping[str, str], notes: list[str]) -> str:
    """A cell of the table; long texts become footnotes."""
    if "crash" in cell:
        return f"CRASH [{_note(cell['crash'], notes)}]"
    refused = {name.partition(" ")[2]: said for name, said in cell.items() if name.startswith("refused ")}
    parts = [cell["runs"]] if cell.get("runs") else []
    for said in dict.fromkeys(refused.values()):
        which = [model for model, other in refused.items() if other == said]
        about = "refused" if not parts and len(set(refused.values())) == 1 else f"{' and '.join(which)} refused"
        parts.append(f"{about} [{_note(said, notes)}]")
    return ", ".join(parts)


def _note(text: str, notes: list[str]) -> int:
    if text not in notes:
        notes.append(text)
    return notes.index(text) + 1


def _failure(built: Mapping[str, str]) -> str:
    return built.get("crash") or built.get("failed", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the stores")
    parser.add_argument("--patches", action="store_true", help="with --on: only apply every patch of torch")
    parser.add_argument("--on", action="append", default=[], metavar="NAME=COMMAND", help="builds and loads")
    parser.add_argument("--load", action="append", default=[], metavar="NAME=COMMAND", help="only loads")
    parser.add_argument("--build-here", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--load-here", type=Path, nargs="+", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--patches-here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.patches_here:
        print(json.dumps({**here(), "failed": "; ".join(unfit_patches())}))
        return
    if options.build_here or options.load_here:
        print(json.dumps(build(options.build_here) if options.build_here else load(options.load_here)))
        return
    builders = dict(one.split("=", 1) for one in options.on)
    if options.patches:
        found = {name: run_in(command, "--patches-here") for name, command in builders.items()}
        for name, one in found.items():
            print(f"{name}: {_failure(one) or 'every patch fits torch ' + one['torch']}")
        sys.exit(any(map(_failure, found.values())))
    loaders = {**builders, **dict(one.split("=", 1) for one in options.load)}
    folder: Path = options.folder.resolve()
    built, notes = {}, []
    for name, command in builders.items():
        built[name] = run_in(command, "--build-here", str(folder / name))
        print(f"built on {name}: {built[name]}", file=sys.stderr, flush=True)
    good = [name for name in built if (folder / name / "store").exists()]
    loaded = {}
    for name, command in loaders.items():
        loaded[name] = run_in(command, "--load-here", *(str(folder / built_on) for built_on in good))
        print(f"loaded on {name}: {loaded[name]}", file=sys.stderr, flush=True)
    columns = ("Python", "torch", "CPU level", "glibc", "GLIBCXX", "patches, build, verify, pins", f"absent {GPU}")
    print(f"| environment | {' | '.join(columns)} |\n{'|---' * 8}|")
    for name, found in loaded.items():
        known = [found.get(part, "") for part in ("python", "torch", "level", "glibc", "libstdc++")]
        wrong = _failure(built.get(name, {}))
        known.append(f"FAILED [{_note(wrong, notes)}]" if wrong else "ok" if name in built else "–")
        known.append(built.get(name, {}).get("gpu") or "–")
        print(f"| {name} | {' | '.join(known)} |")
    print(f"\n| built on ↓, loaded on → | {' | '.join(loaders)} |\n|---|{'---|' * len(loaders)}")
    crashed = False
    for name, found in built.items():
        if name not in good:
            cells = ["not built"] * len(loaders)
        else:
            cells = [shown(loaded[other].get("cells", {}).get(name, loaded[other]), notes) for other in loaders]
        crashed |= bool(_failure(found)) or any("CRASH" in cell for cell in cells)
        print(f"| {name} | {' | '.join(cells)} |")
    print()
    for number, note in enumerate(notes, 1):
        print(textwrap.fill(f"{number}. {note}", 130, subsequent_indent="   ", break_long_words=False))
    sys.exit(crashed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
