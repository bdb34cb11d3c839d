"""Uses of trained models that nobody has listed: what eager gives in float64, or an error of aotc that says what to do.

    python tests/fuzzing/uses.py --count 2000 --seed 1              # builds the models first; --store keeps them
    python tests/fuzzing/uses.py --count 1 --seed 1 --first 217 --store S --no-build   # one case, with its traceback

A case is a model of `tests/training` or `uses.yaml`, a step that is trained (`steps.py`), and up to two things that are
done around it (`setups.py`), drawn from the seed and the number of the case. It runs in a forked child, first with the
module in eager in float64, then with compiled code, and both note what a user can see: results, gradients, None in the
place of one, parameters and buffers after it. Outcomes:

    equal      what was noted is the same, but for rounding
    refused    an AotcError with a hint, or, of a write to what is saved for the backward, torch's own error
    as eager   both raise; or eager refuses a write that ours does not see, and the gradients are those without it
    WRONG      anything else: another value, an error without a type or a hint, a dead child, one that does not end
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fuzzing.setups import SETUPS  # noqa: E402
from fuzzing.steps import STEPS, write_before_backward, write_to_a_result  # noqa: E402
from fuzzing.used import MANIFESTS, Model, Run, models_of  # noqa: E402

import aotc  # noqa: E402

HANGS = 200.0
"""Seconds after which a child counts as one that does not end; a case takes less than one."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.bfloat16: 6e-2}
"""Of the largest element of a tensor, by the dtype in which compiled code computes; a twentieth of it, of the largest
of all that a case notes."""


# -- a case -----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A model, a step and its setups; `name` is what everything else is drawn from."""

    name: str
    model: str
    step: Callable[[Run], None]
    setups: tuple[Callable[[Run], None], ...]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(each.__name__.strip("_") for each in (self.step, *self.setups))


class Outcome(NamedTuple):
    said: str
    detail: str = ""


def case_of(seed: int, number: int, models: Collection[str]) -> Case:
    """Each step in turn, so that a small number of cases has all of them."""
    random = Random(f"{seed} {number}")
    model = random.choice(sorted(models))
    setups = random.sample(SETUPS, random.choice((0, 1, 1, 2)))
    return Case(f"{seed} {number}", model, STEPS[number % len(STEPS)], tuple(setups))


def carry_out(case: Case, model: Model, store: Path | None, *, writes: bool = True) -> tuple[Run, Exception | None]:
    """In eager, or with the code in `store`."""
    run = Run(model, case.name, wide=store is None, writes=writes)
    try:
        for setup in case.setups:
            setup(run)
        if store is not None:
            run.load(store)
        for act in run.later:
            act()
        case.step(run)
        run.close()
    except Exception as error:
        return run, error
    finally:
        torch.autograd.set_detect_anomaly(False)
    return run, None


_WRITTEN = "modified by an inplace operation"


def try_case(case: Case, model: Model, store: Path) -> Outcome:
    """Both sides, in this process."""
    eager, eagers = carry_out(case, model, None)
    ours, error = carry_out(case, model, store)
    if eagers is not None and error is not None:
        return Outcome("as eager", f"{type(eagers).__name__}: {eagers}")
    if isinstance(error, aotc.AotcError):
        return Outcome("refused") if "hint: " in str(error) else Outcome("WRONG", f"no hint: {error}")
    if error is not None:
        if _WRITTEN in str(error) and (case.step in (write_before_backward, write_to_a_result) or model.writes):
            return Outcome("refused")
        return Outcome("WRONG", f"{type(error).__name__}: {error}")
    if eagers is not None:
        eager, again = carry_out(case, model, None, writes=False)
        if again is not None:
            return Outcome("WRONG", f"eager refuses it ({type(eagers).__name__}: {eagers}), and ours does not")
        flaw = difference(eager.notes, ours.notes, model.dtype)
        return Outcome("as eager") if not flaw else Outcome("WRONG", f"where eager refuses the write: {flaw}")
    flaw = difference(eager.notes, ours.notes, model.dtype)
    return Outcome("WRONG", flaw) if flaw else Outcome("equal")


def difference(eager: Sequence[tuple[str, Any]], ours: Sequence[tuple[str, Any]], dtype: torch.dtype) -> str:
    """The first thing that was noted otherwise; "" where there is none. Hooks of several results have no order."""
    eager, ours = (sorted(notes, key=lambda note: note[0]) for notes in (eager, ours))
    if (names := [name for name, _ in eager]) != (own := [name for name, _ in ours]):
        return f"eager notes {names}, compiled code {own}"
    sizes = [_largest(leaf) for _, value in eager for leaf in pytree.tree_leaves(value)]
    least = max((1.0, *sizes)) * TOLERANCE[dtype] / 20
    for (name, one), (_, other) in zip(eager, ours, strict=True):
        (left, tree), (right, own_tree) = pytree.tree_flatten_with_path(one), pytree.tree_flatten_with_path(other)
        if tree != own_tree:
            return f"{name}: another structure"
        for (path, mine), (_, theirs) in zip(left, right, strict=True):
            if flaw := _differs(mine, theirs, TOLERANCE[dtype], least):
                return f"{name}{pytree.keystr(path)}: {flaw}"
    return ""


def _differs(eager: Any, ours: Any, relative: float, least: float) -> str:
    if not isinstance(eager, Tensor) or not isinstance(ours, Tensor):
        if type(eager) is type(ours) is float:
            return "" if eager == ours or abs(eager - ours) <= relative * abs(eager) else f"eager {eager}, ours {ours}"
        if isinstance(eager, Tensor) or isinstance(ours, Tensor):
            return f"eager {_shown(eager)}, ours {_shown(ours)}"
        return "" if eager == ours else f"eager {eager!r}, ours {ours!r}"
    if (eager.shape, eager.layout) != (ours.shape, ours.layout):
        return f"eager {_shown(eager)}, ours {_shown(ours)}"
    if eager.is_floating_point() != ours.is_floating_point():
        return f"eager is of {eager.dtype}, ours of {ours.dtype}"
    if not eager.numel():
        return ""
    one, other = (
        each.to_dense().to(torch.complex128 if each.is_complex() else torch.float64) for each in (eager, ours)
    )
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return "eager is finite where ours is not, or the reverse"
    error = (one - other)[finite].abs()
    allowed = relative * _largest(eager) + least if eager.is_floating_point() else 0.0
    if error.numel() and float(error.max()) > allowed:
        return f"they differ by {float(error.max()):.3g} of {_largest(eager):.3g}"
    return ""


def _largest(value: Any) -> float:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    dense = value.to_dense()
    return float(torch.where(dense.isfinite(), dense.abs(), 0).max())


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    zeros = " of zeros" if value.is_floating_point() and not value.to_dense().any() else ""
    return f"a {str(value.layout).removeprefix('torch.')} tensor {list(value.shape)}{zeros}"


# -- children ---------------------------------------------------------------------------------------------------------


def try_all(
    cases: Sequence[Case], models: Mapping[str, Model], store: Path, jobs: int
) -> Iterator[tuple[Case, Outcome]]:
    """Each case in a forked child, `jobs` at a time."""
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    waiting, running = collections.deque(cases), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                case = waiting.popleft()
                said = Path(folder) / case.name.replace(" ", "-")
                running[_start(case, models[case.model], store, said)] = case, said, time.monotonic()
            done, status = os.waitpid(-1, os.WNOHANG) if running else (0, 0)
            if done in running:
                case, said, _ = running.pop(done)
                yield case, _outcome(said, status)
                continue
            time.sleep(0.005)
            for child, (_, said, began) in running.items():
                if time.monotonic() - began > HANGS and not said.exists():
                    said.write_text(json.dumps(Outcome("WRONG", "does not end")))
                    os.killpg(child, signal.SIGKILL)


def _start(case: Case, model: Model, store: Path, said: Path) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        quiet = os.open(f"{said}.log", os.O_CREAT | os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(quiet, stream)
        warnings.simplefilter("ignore")
        said.write_text(json.dumps(try_case(case, model, store)))
    except BaseException as error:
        said.write_text(json.dumps(Outcome("WRONG", f"the case itself: {type(error).__name__}: {error}")))
    finally:
        os._exit(0)


def _outcome(said: Path, status: int) -> Outcome:
    if said.exists():
        return Outcome(*json.loads(said.read_text()))
    return Outcome("WRONG", f"the process died: {os.waitstatus_to_exitcode(status)}")


# -- the table --------------------------------------------------------------------------------------------------------


def build(store: Path) -> dict[str, str]:
    """Builds the manifests. Returns why each model that was not built was refused."""
    refused = {}
    for manifest in MANIFESTS:
        command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", str(store), "--json"]
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        )
        for unit in json.loads(ran.stdout)["units"]:
            if unit["status"] == "failed":
                refused[unit["model"]] = unit["error"]
    return refused


def shown_table(tried: Sequence[tuple[Case, Outcome]]) -> str:
    columns = ("equal", "refused", "as eager", "WRONG")
    counts: dict[str, collections.Counter[str]] = {each.__name__: collections.Counter() for each in (*STEPS, *SETUPS)}
    for case, outcome in tried:
        for kind in case.kinds:
            counts[kind][outcome.said] += 1
    counts["all cases"] = collections.Counter(outcome.said for _, outcome in tried)
    lines = [f"| use | tried | {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) + 1)}"]
    for kind, said in counts.items():
        numbers = " | ".join(str(said[column]) for column in columns)
        lines.append(f"| {kind.replace('_', ' ')} | {said.total()} | {numbers} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--store", type=Path, help="where the models are built, or were")
    parser.add_argument("--models", default=",".join(models_of()), help="of which cases are drawn")
    parser.add_argument("--only", default="", help="of these cases, those of some kinds of use or models")
    parser.add_argument("--verbose", action="store_true", help="also what eager refuses")
    parser.add_argument("--no-build", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = (asked.store or Path(folder) / "store").absolute()
        os.environ["AOTC_CACHE_DIR"] = str(Path(folder) / "cache")
        refused = {} if asked.no_build else build(store)
        models, built = models_of(), (store / "index.json").read_text()
        for name, why in refused.items():
            print(f"{name}: not built: {why}")
        cases = [case_of(asked.seed, asked.first + number, asked.models.split(",")) for number in range(asked.count)]
        if asked.only:
            wanted = set(asked.only.split(","))
            cases = [case for case in cases if wanted & {case.model, *case.kinds}]
        cases = [case for case in cases if f'"{case.model}:latest"' in built]
        if asked.count == 1:
            (case,) = cases
            print(case.model, *case.kinds)
            for side in (None, store):
                run, error = carry_out(case, models[case.model], side)
                print("eager" if side is None else "ours", *(name for name, _ in run.notes))
                if error is not None:
                    traceback.print_exception(error)
        tried = []
        for case, outcome in try_all(cases, models, store, asked.jobs):
            tried.append((case, outcome))
            if outcome.said == "WRONG" or (asked.verbose and outcome.detail):
                print(f"{case.name}: {case.model}: {', '.join(case.kinds)}: {outcome.detail[:400]}", flush=True)
    print(shown_table(tried))
    return int(any(outcome.said == "WRONG" for _, outcome in tried))


if __name__ == "__main__":
    sys.exit(main())
