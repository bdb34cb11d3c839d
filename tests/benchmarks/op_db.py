"""torch's own list of operators, `op_db`, through `train: true`: which are right, refused by name, or wrong.

    python tests/benchmarks/op_db.py --device cpu --part 1/1 --jobs 2 --out op_db.json
    python tests/benchmarks/op_db.py --device cuda --part 1/2 --jobs 12 --out op_db-1.json
    python tests/benchmarks/op_db.py --table op_db-1.json op_db-2.json

Every operator with a gradient in float32 is tried with the first sample of torch's that eager can differentiate and
that draws no random numbers: `--batch` operators a model, one result each. What a build refuses is built again, in
halves, down to a single operator. Each operator is compared in a process of its own: results and gradients of compiled
code against eager in float64, by the rule of `aotc verify`, with the build's sample and with one of another seed.

    right      the results and all gradients of both samples
    refused    the build ended with an error of aotc that names the operator, the model's line, or what it asks for
    nameless   it ended with another error
    wrong      a result or a gradient differs, or the process died; the exit status is then 1
    unknown    the run ended before the operator was built apart from one that is refused
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import aotc  # noqa: E402
from aotc.models.tolerance import judge  # noqa: E402
from tests.benchmarks.op_db_models import Operators, operators, sample_of  # noqa: E402

FACTORY = "tests.benchmarks.op_db_models:some_operators"
Chosen = tuple[str, int]


# -- building ---------------------------------------------------------------------------------------------------------


def build(batches: Mapping[str, Sequence[Chosen]], folder: Path, device: str, jobs: int) -> dict[str, str]:
    """Builds a model of each batch. Returns the errors of those that were not built."""
    models = {
        name: {
            "factory": FACTORY,
            "kwargs": {"chosen": [list(each) for each in batch]},
            "train": True,
            "mode": "default",
            "targets": ["cuda" if device == "cuda" else "native"],
            "inputs": {},
            "buckets": [{}],
        }
        for name, batch in batches.items()
    }
    manifest = folder / "op_db.yaml"
    manifest.write_text(yaml.safe_dump({"version": 1, "models": models}))
    command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", str(folder / "store")]
    ran = subprocess.run(
        [*command, "--jobs", str(jobs), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))},
    )
    units = json.loads(ran.stdout)["units"]
    return {unit["model"]: unit["error"] for unit in units if unit["status"] == "failed"}


# -- comparing --------------------------------------------------------------------------------------------------------


def compare(store: Path, model: str, batch: Sequence[Chosen], device: str) -> dict[str, str]:
    """What is wrong of each operator of a model; "" where nothing is."""
    said = dict.fromkeys((name for name, _ in batch), "")
    for seed in (0, 1):
        try:
            module = Operators(batch, seed).train().to(device)
            compiled = aotc.load(f"{store}#{model}", module, on_miss="error")
        except aotc.BindError:  # another sample of another form
            if seed == 0:
                raise
            continue
        ours = _derived(compiled, module)
        eager = _derived(module, module)
        wide = _derived_in_float64(batch, seed, device)
        for (name, _), *found in zip(batch, ours, eager, wide, strict=True):
            said[name] = said[name] or _flaw(*found)
    return said


Derived = list[tuple[str, Any]]
"""The results of an operator and the gradients of its parameters, each with a name."""


def _derived(call: Any, module: nn.Module) -> list[Derived]:
    found = []
    for operator, results in zip(module.operators, call(), strict=True):
        of = dict(operator.named_parameters())
        trained = [each for each in results if each.requires_grad]
        weights = [_weights(each, place) for place, each in enumerate(trained)]
        gradients = torch.autograd.grad(trained, [*of.values()], weights, allow_unused=True, retain_graph=True)
        named = [(f"result {place}", each.detach()) for place, each in enumerate(results)]
        found.append([*named, *((f"the gradient of {n}", each) for n, each in zip(of, gradients, strict=True))])
    return found


def _derived_in_float64(batch: Sequence[Chosen], seed: int, device: str) -> list[Derived]:
    """In float32 of those that know no other dtype."""
    found = []
    for each in batch:
        try:
            module = Operators([each], seed).to(device).double()
            found += _derived(module, module)
        except Exception:  # of the operator
            module = Operators([each], seed).to(device)
            found += _derived(module, module)
    return found


def _weights(of: Tensor, place: int) -> Tensor:
    """For a result, by its place; the same for each dtype."""
    drawn = torch.randn(of.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
    return drawn.to(of.device, of.dtype)


def _flaw(ours: Derived, eager: Derived, wide: Derived) -> str:
    for (name, mine), (_, theirs), (_, exact) in zip(ours, eager, wide, strict=True):
        if mine is None or theirs is None:
            if mine is not theirs:
                return f"{name}: {'None' if mine is None else 'a tensor'}, and in eager it is the other"
            continue
        judged = judge(mine, theirs, exact, 1e-5)
        if not judged.ok:
            return f"{name}: {judged.detail}"
    return ""


def compare_all(
    batches: Mapping[str, Sequence[Chosen]], folder: Path, device: str, jobs: int
) -> Iterator[tuple[str, str]]:
    """Each model in a process of its own; a process that dies is what is wrong of all its operators."""
    command = [sys.executable, __file__, "--device", device, "--compare"]
    waiting, running = collections.deque(batches), []
    while waiting or running:
        while waiting and len(running) < jobs:
            model = waiting.popleft()
            given = json.dumps([str(folder / "store"), model, batches[model]])
            process = subprocess.Popen([*command, given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            running.append((model, process))
        model, process = running.pop(0)
        out, err = process.communicate()
        if process.returncode == 0:
            yield from json.loads(out.splitlines()[-1]).items()
        else:
            last = (err.strip().splitlines() or [f"status {process.returncode}"])[-1]
            yield from ((name, f"the process failed: {last}") for name, _ in batches[model])


# -- the table --------------------------------------------------------------------------------------------------------


def run(
    part: str, device: str, jobs: int, size: int, folder: Path, known: Mapping[str, list[str]]
) -> Iterator[dict[str, list[str]]]:
    """By operator, what came of it and why: as far as it is known, after each build."""
    index, count = map(int, part.split("/"))
    said = dict(known)
    mine = [name for place, name in enumerate(operators()) if place % count == index - 1 and name not in known]
    places = {name: sample_of(name) for name in mine}
    said |= {name: ["not tried", "random, or eager cannot differentiate it"] for name in mine if places[name] is None}
    tried = [(name, place) for name, place in places.items() if place is not None]
    batches = {f"batch{at // size}": tried[at : at + size] for at in range(0, len(tried), size)}
    while batches:
        errors = build(batches, folder, device, jobs)
        refused = {name: batches.pop(name) for name in errors}
        said |= {name: ["unknown", errors[model]] for model, batch in refused.items() for name, _ in batch}
        said |= {
            batch[0][0]: [_kind_of(errors[model]), errors[model]] for model, batch in refused.items() if len(batch) == 1
        }
        said |= _compared(batches, folder, device, jobs)
        yield said
        halves = [(model, batch, len(batch) // 2) for model, batch in refused.items() if len(batch) > 1]
        batches = {f"{model}a": batch[:middle] for model, batch, middle in halves}
        batches |= {f"{model}b": batch[middle:] for model, batch, middle in halves}


def _kind_of(error: str) -> str:
    return "refused" if "hint: " in error else "nameless"


def _compared(batches: Mapping[str, Sequence[Chosen]], folder: Path, device: str, jobs: int) -> dict[str, list[str]]:
    found = compare_all(batches, folder, device, jobs)
    return {name: ["wrong", flaw] if flaw else ["right", ""] for name, flaw in found}


def shown_table(said: Mapping[str, Sequence[str]]) -> str:
    counts = collections.Counter(outcome for outcome, _ in said.values())
    tried = len(said) - counts["not tried"]
    columns = ("right", "refused", "nameless", "wrong", "unknown")
    lines = [f"| tried | {' | '.join(columns)} | not tried |", f"|{'---:|' * (len(columns) + 2)}"]
    lines.append(f"| {tried} | {' | '.join(str(counts[each]) for each in columns)} | {counts['not tried']} |")
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, (outcome, why) in sorted(said.items()):
        if outcome in columns[1:]:
            first = why.strip().splitlines()[0][:200] if why else ""
            reasons.setdefault((outcome, first), []).append(name)
    return "\n".join(
        [*lines, "", *(f"{outcome}: {', '.join(names)}: {why}" for (outcome, why), names in reasons.items())]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th operator, from the I-th on")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16, help="operators a model")
    parser.add_argument("--folder", type=Path, help="where the models are built; by default it is removed")
    parser.add_argument("--out", type=Path, help="where the outcomes are written")
    parser.add_argument("--resume", type=Path, help="outcomes of another run, to which those that it lacks are added")
    parser.add_argument("--table", type=Path, nargs="*", help="show the outcomes of other runs")
    parser.add_argument("--compare", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    os.environ["PYTHONHASHSEED"] = "0"  # in the processes below: some samples come from sets of names
    if asked.compare:
        warnings.simplefilter("ignore")
        store, model, batch = json.loads(asked.compare)
        print(json.dumps(compare(Path(store), model, [tuple(each) for each in batch], asked.device)))
        return 0
    if asked.table:
        said = {name: each for path in asked.table for name, each in json.loads(path.read_text()).items()}
    else:
        with contextlib.ExitStack() as during:
            folder = asked.folder or Path(during.enter_context(tempfile.TemporaryDirectory()))
            folder.mkdir(exist_ok=True)
            known = json.loads(asked.resume.read_text()) if asked.resume else {}
            known = {name: each for name, each in known.items() if each[0] not in ("unknown", "wrong")}
            for said in run(asked.part, asked.device, asked.jobs, asked.batch, folder.absolute(), known):
                if asked.out:
                    asked.out.write_text(json.dumps(said, indent=1))
    print(shown_table(said))
    return int(any(outcome == "wrong" for outcome, _ in said.values()))


if __name__ == "__main__":
    sys.exit(main())
