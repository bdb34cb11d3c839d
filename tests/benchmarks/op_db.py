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

With `--draw extreme`, operators are built without gradients, and called with extreme values in their tensors of floats
and bools (`aotc.models.extreme_inputs`, both draws); their results are judged by `aotc.models.decided_values`. An
operator that eager refuses with such values is not tried.

    python tests/benchmarks/op_db.py --device cuda --draw extreme --part 1/4 --jobs 16 --batch 8 --out extreme-1.json
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # and not this folder, whose cuda.py torch takes for a package

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import aotc  # noqa: E402
from aotc.models.decided_values import first_wrong_value  # noqa: E402
from aotc.models.extreme_calls import WatchedCall, one_thread  # noqa: E402
from aotc.models.extreme_inputs import Draw, extreme_leaves, freedoms_of_region  # noqa: E402
from aotc.models.tolerance import judge  # noqa: E402
from tests.benchmarks.op_db_models import Operators, operators, sample_of  # noqa: E402
from tests.benchmarks.outcomes import Said, build, in_processes, kind_of, parser, run, say  # noqa: E402

FACTORY = "tests.benchmarks.op_db_models:some_operators"
Chosen = tuple[str, int]


# -- building ---------------------------------------------------------------------------------------------------------


def model_of(batch: Sequence[Chosen], device: str, draw: str) -> dict[str, Any]:
    """A batch of operators as a model of a manifest."""
    return {
        "factory": FACTORY,
        "kwargs": {"chosen": [list(each) for each in batch]},
        "train": draw == "ordinary",
        "mode": "default",
        "targets": ["cuda" if device == "cuda" else "native"],
        "inputs": {},
        "buckets": [{}],
    }


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


def run_compare(store: Path, device: str, draw: str, models: Sequence[tuple[str, list[Chosen], str]]) -> None:
    for model, batch, only in models:
        if draw == "ordinary":
            say(compare(store, model, batch, device))
        else:
            say(compare_extremes(store, model, batch, device, only))


# -- with extreme values ----------------------------------------------------------------------------------------------

NOT_TRIED = "not tried: "


@torch.no_grad()
def compare_extremes(store: Path, model: str, batch: Sequence[Chosen], device: str, only: str) -> dict[str, str]:
    """What is wrong of each operator of a model, or of `only` one, one at a time: the others have their ordinary values
    meanwhile."""
    module = Operators(batch, 0).eval().to(device)
    compiled = aotc.load(f"{store}#{model}", module, on_miss="error")
    return {
        name: flaw_at_extremes(operator, lambda place=place: compiled()[place])
        for place, ((name, _), operator) in enumerate(zip(batch, module.operators, strict=True))
        if only in ("", name)
    }


def flaw_at_extremes(operator: nn.Module, compiled: Callable[[], Sequence[Tensor]]) -> str:
    tensors = {name: each.detach() for name, each in (*operator.named_parameters(), *operator.named_buffers())}
    ordinary = [each.clone() for each in tensors.values()]

    def call(values: Sequence[Any]) -> list[Tensor]:
        found = torch.func.functional_call(operator, dict(zip(tensors, values, strict=True)), ())
        return [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]

    def ours(values: Sequence[Any]) -> list[Tensor]:
        for tensor, value in zip(tensors.values(), values, strict=True):
            tensor.copy_(value)
        try:
            return [each.clone() for each in compiled()]
        finally:
            for tensor, value in zip(tensors.values(), ordinary, strict=True):
                tensor.copy_(value)

    draws: tuple[Draw, ...] = ("extreme", "edges")
    for draw in draws:
        leaves = extreme_leaves(ordinary, freedoms_of_region(ordinary), draw)
        try:
            with WatchedCall():
                eager = call(leaves)
                if any(each.is_cuda for each in ordinary):
                    torch.cuda.synchronize()  # an assert of the device is raised here
        except Exception as error:  # of the operator
            return f"{NOT_TRIED}with extreme values, eager raises {type(error).__name__}: {str(error)[:100]}"
        if (found := first_wrong_value(eager, ours(leaves), call, leaves)) is not None:
            with one_thread():
                found = first_wrong_value(call(leaves), ours(leaves), call, leaves)
        if found is not None:
            return f"result {found.position} ({draw}) {found.said}"
    return ""


# -- the table --------------------------------------------------------------------------------------------------------


def outcomes(part: str, device: str, draw: str, jobs: int, size: int, folder: Path, known: Said) -> Iterator[Said]:
    """By operator, what came of it and why: as far as it is known, after each build."""
    index, count = map(int, part.split("/"))
    said = dict(known)
    mine = [name for place, name in enumerate(operators()) if place % count == index - 1 and name not in known]
    places = {name: sample_of(name) for name in mine}
    said |= {name: ["not tried", "random, or eager cannot differentiate it"] for name in mine if places[name] is None}
    tried = [(name, place) for name, place in places.items() if place is not None]
    batches = {f"batch{at // size}": tried[at : at + size] for at in range(0, len(tried), size)}
    while batches:
        errors = build({name: model_of(batch, device, draw) for name, batch in batches.items()}, folder, jobs)
        refused = {name: batches.pop(name) for name in errors}
        said |= {name: ["unknown", errors[model]] for model, batch in refused.items() for name, _ in batch}
        said |= {
            batch[0][0]: [kind_of(errors[model]), errors[model]] for model, batch in refused.items() if len(batch) == 1
        }
        said |= _compared(batches, folder, device, draw, jobs)
        yield said
        halves = [(model, batch, len(batch) // 2) for model, batch in refused.items() if len(batch) > 1]
        batches = {f"{model}a": batch[:middle] for model, batch, middle in halves}
        batches |= {f"{model}b": batch[middle:] for model, batch, middle in halves}


def _compared(batches: Mapping[str, Sequence[Chosen]], folder: Path, device: str, draw: str, jobs: int) -> Said:
    """Where a process dies with extreme values, which may be eager's fault, each operator has a process of its own."""
    said: Said = {}
    again: list[tuple[str, Sequence[Chosen], str]] = []

    def compared(models: Sequence[tuple[str, Sequence[Chosen], str]]) -> Iterator[tuple[Any, Any]]:
        return in_processes(__file__, "compare", models, jobs, str(folder / "store"), device, draw)

    for (model, batch, _), found in compared([(model, batch, "") for model, batch in batches.items()]):
        if isinstance(found, str) and draw == "extreme":
            again += [(model, batch, name) for name, _ in batch]
            continue
        flaws = dict.fromkeys((name for name, _ in batch), found) if isinstance(found, str) else found
        said |= {name: _outcome(flaw) for name, flaw in flaws.items()}
    for (_, _, name), found in compared(again):
        said[name] = _outcome(found if isinstance(found, str) else found[name])
    return said


def _outcome(flaw: str) -> list[str]:
    if flaw.startswith(NOT_TRIED):
        return ["not tried", flaw.removeprefix(NOT_TRIED)]
    return ["wrong", flaw] if flaw else ["right", ""]


def main() -> int:
    os.environ["PYTHONHASHSEED"] = "0"  # in the processes below: some samples come from sets of names
    if sys.argv[1:3] == ["--child", "compare"]:
        store, device, draw, models = sys.argv[3:]
        given = [(model, [tuple(each) for each in batch], only) for model, batch, only in json.loads(models)]
        run_compare(Path(store), device, draw, given)
        return 0
    options = parser(__doc__)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--draw", choices=("ordinary", "extreme"), default="ordinary")
    options.add_argument("--part", default="1/1", help="I/N: every N-th operator, from the I-th on")
    options.add_argument("--batch", type=int, default=16, help="operators a model")
    asked = options.parse_args()
    return run(asked, functools.partial(outcomes, asked.part, asked.device, asked.draw, asked.jobs, asked.batch))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
