"""Nothing that a forward reads may change in silence: python tests/fuzzing/changes.py [--count N] [--seed N]

Small modules (`subjects/`) are built once. Then changes of every kind (`change_kinds.py`) are made to them, each in a
process of its own, at a moment: before the next build, before the load, after it, or between two calls. What eager
computes with the changed module, in a process of its own and twice, is what is right. A verdict is one of

equal      compiled code computes what eager does
refused    an error of aotc; `miss` where it is a MissError
built      the next build does not take the unit for built
stuck      the next build takes it for built, and the load or the call refuses it
skipped    eager is not deterministic, or the change cannot be made
not seen   a silent difference of a kind that nothing can notice: the kind says why
silent     a result that is not eager's: a fault
untyped    another error than aotc's, where eager computes a result: a fault
crash      the process ended by a signal, or hung: a fault
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import importlib
import json
import logging
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from fuzzing.change_kinds import KINDS, MOMENTS, Change, Kind, guide_table  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import aotc  # noqa: E402
from aotc.manifest import Manifest, read_manifest  # noqa: E402
from aotc.models.factory import build_module  # noqa: E402

SUBJECTS = Path(__file__).parent / "subjects"
EVERY = (
    *("Slots", "Activations", "Numbers", "Containers", "Objects", "Configured", "Globals", "Imported", "FromFile"),
    *("Defaults", "Closures", "ClassAttributes", "Descriptors", "Callables", "Numpy", "PlainTensors", "Buffers"),
    *("Tied", "SharedModule", "Lists", "Chain", "Norms", "Convolution", "Attention", "Embedded", "GradMode"),
    *("InferenceMode", "RequiresGrad", "Environment", "ProcessModes", "Flags", "Hooked", "Parametrized", "Methods"),
    *("Asking", "Results", "Dtypes", "Builtins", "Nested", "More", "Special", "Late", "References", "Dispatching"),
    *("Contextual", "TorchFlags", "ReadsFile", "Asked"),
)
FORMS: dict[str, tuple[str, ...]] = {
    "live": EVERY,
    "frozen": (
        "Slots",
        "Activations",
        "Containers",
        "Imported",
        "Closures",
        "PlainTensors",
        "Buffers",
        "Tied",
        "Norms",
    ),
    "regions": ("Slots", "Activations", "Numbers", "Objects", "Imported", "Lists", "Hooked", "Methods"),
    "padded": ("Slots", "Configured", "Globals", "Defaults", "Chain", "Asking", "Results"),
    "training": ("Slots", "Numbers", "Globals", "Closures", "Tied", "Lists", "Norms", "Hooked", "Parametrized"),
}
"""The subjects that are built in each form."""

SAMPLED: dict[str, tuple[str, ...]] = {
    "live": ("Together", "Environment", "GradMode"),
    **dict.fromkeys(("frozen", "regions", "padded", "training"), ("Together",)),
}
"""Those of a sample that takes a minute: a few compiles."""

_OF_FORM: dict[str, dict[str, Any]] = {
    "live": {},
    "frozen": {"weights": "frozen"},
    "regions": {"regions": ["inner"]},
    "padded": {"outputs": {"crop": ["batch"]}},
    "training": {"train": True},
}
_OF_INPUT = {"padded": {"pad": {"batch": 0}}, "training": {"requires_grad": True}}

FAULTS = ("silent", "untyped", "crash")
SECONDS = 60
"""For one change; a process that takes longer hangs."""


Entered = Callable[[], AbstractContextManager[Any]]


class Case(NamedTuple):
    """One change, tried at one moment with one built model."""

    subject: str
    form: str
    moment: str
    kind: Kind
    change: Change


@dataclass(frozen=True)
class Tried:
    """A case's verdict. `kept` tells whether eager computes the same with the change as without."""

    subject: str
    form: str
    moment: str
    kind: str
    where: str
    verdict: str
    detail: str = ""
    kept: bool = False

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.kind} | {self.where} | {self.subject}, {self.form}, {self.moment} | {self.detail}"
        )


# -- building ---------------------------------------------------------------------------------------------------------


def model_name(subject: str, form: str) -> str:
    return f"{subject.lower()}-{form}"


def write_subjects(folder: Path, forms: dict[str, Sequence[str]]) -> Path:
    """The subjects' files in a folder, with a manifest of all models, and one of each."""
    shutil.copytree(SUBJECTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    models = {
        model_name(subject, form): {
            "factory": "change_subjects:make",
            "kwargs": {"name": subject, "framed": form == "regions"},
            "mode": "default",
            "inputs": {"x": {"shape": ["batch", 8], **_OF_INPUT.get(form, {})}},
            "buckets": [{"batch": 4}],
            **_OF_FORM[form],
        }
        for form, subjects in forms.items()
        for subject in subjects
    }
    for name, model in models.items():  # a manifest of its own is read in a moment
        _write_manifest(folder / f"{name}.yaml", {name: model})
    return _write_manifest(folder / "manifest.yaml", models)


def _write_manifest(file: Path, models: dict[str, Any]) -> Path:
    file.write_text(json.dumps({"version": 1, "models": models}, indent=1))
    return file


# -- processes --------------------------------------------------------------------------------------------------------


def in_children(functions: Iterable[Callable[[], Any]], jobs: int = 1, seconds: int = 0) -> Iterator[tuple[int, Any]]:
    """What each function returns, with its number, in the order in which they end: each in a process forked for it.

    A process that ends by a signal gives `Ended`, one that raises its exception's text.
    """
    waiting, running = list(enumerate(functions)), dict[int, tuple[int, int, bytearray]]()
    waiting.reverse()
    while waiting or running:
        while waiting and len(running) < jobs:
            number, function = waiting.pop()
            read, write = os.pipe()
            if (process := os.fork()) == 0:
                os.close(read)
                _in_child(function, write, seconds)
            os.close(write)
            running[read] = number, process, bytearray()
        for ready in select.select(list(running), [], [])[0]:
            number, process, data = running[ready]
            if more := os.read(ready, 1 << 20):
                data += more
                continue
            os.close(ready)
            del running[ready]
            _, status = os.waitpid(process, 0)
            yield number, pickle.loads(bytes(data)) if status == 0 else Ended(os.waitstatus_to_exitcode(status))


class Ended(NamedTuple):
    """A process that gave no answer."""

    code: int


def _in_child(function: Callable[[], Any], write: int, seconds: int) -> None:
    try:
        signal.alarm(seconds)
        os.set_inheritable(write, False)
        data = pickle.dumps(function())
        while data:
            data = data[os.write(write, data) :]
        os._exit(0)
    except BaseException:
        if seconds == 0:
            import traceback

            traceback.print_exc()
    finally:
        os._exit(70)


def one_child(function: Callable[[], Any]) -> Any:
    ((_, answer),) = in_children([function], seconds=SECONDS)
    return answer


# -- running ----------------------------------------------------------------------------------------------------------


def example(form: str) -> Tensor:
    x = torch.randn(3 if form == "padded" else 4, 8, generator=torch.Generator().manual_seed(3))
    return x.requires_grad_(form == "training")


def outcome(call: Callable[..., Any], module: nn.Module, form: str, entered: Entered) -> Any:
    """What a call gives, as plain values; of training also the gradients."""
    with torch.device("cpu"):
        x = example(form)
    result: list[Any] = []
    if form != "training":
        with entered():
            result = list(leaves(call(x)))
    else:
        for parameter in module.parameters():
            parameter.grad = None
        with entered():
            result = list(leaves(call(x)))
            tensors = [one for one in result if isinstance(one, Tensor) and one.requires_grad]
            weights = [torch.linspace(0.5, 1.5, one.numel(), dtype=one.dtype).view(one.shape) for one in tensors]
            torch.autograd.backward(tensors, weights) if tensors else None
        result += ["x", x.grad]
        result += [one for name, parameter in module.named_parameters() for one in (name, parameter.grad)]
    return [plain(one) for one in result]


def leaves(value: Any, depth: int = 5) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from leaves(item, depth - 1)
    elif isinstance(value, list | tuple):
        yield type(value).__name__
        for item in value:
            yield from leaves(item, depth - 1)
    elif dataclasses.is_dataclass(value):
        yield from leaves(vars(value), depth - 1)
    else:
        yield value


def plain(value: Any) -> Any:
    """A tensor by its dtype, shape and elements."""
    if not isinstance(value, Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if value.device.type != "cpu":
            return str(value.device), tuple(value.shape), []
        return str(value.dtype), tuple(value.shape), value.detach().double().flatten().tolist()


def equal(first: Any, second: Any, tolerance: float = 1e-4) -> bool:
    if isinstance(first, list):
        return (
            isinstance(second, list)
            and len(first) == len(second)
            and all(equal(one, other, tolerance) for one, other in zip(first, second, strict=True))
        )
    if isinstance(first, tuple):
        if not isinstance(second, tuple) or first[:2] != second[:2]:
            return False
        if "float16" in first[0]:
            tolerance = max(tolerance, 3e-2)
        return all(
            one == other or abs(one - other) <= tolerance * (1 + abs(other)) or (one != one and other != other)
            for one, other in zip(first[2], second[2], strict=True)
        )
    return bool(first == second)


class Raised(NamedTuple):
    """What a call raised: `kind` is "refused", "miss" or "other"."""

    kind: str
    text: str


def tried(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except aotc.MissError as error:
        return Raised("miss", str(error))
    except aotc.AotcError as error:
        return Raised("refused", f"{type(error).__name__} {error}")
    except Exception as error:
        return Raised("other", f"{type(error).__name__} {str(error)[:200]}")


class CannotMake(NamedTuple):
    """The change cannot be made of this module."""

    text: str


@dataclass
class Model:
    """A subject as it was built in one form."""

    subject: str
    form: str
    folder: Path
    store: Path
    scratch: Path | None = None
    """Where changed files go."""

    @property
    def name(self) -> str:
        return model_name(self.subject, self.form)

    def manifest(self) -> Manifest:
        return read_manifest(self.folder / f"{self.name}.yaml")

    def make(self) -> nn.Module:
        manifest = self.manifest()
        return build_module(manifest.models[self.name], manifest.folder)

    def target(self, module: nn.Module) -> nn.Module:
        """Where changes are made: within the frame of a region."""
        return module.inner if self.form == "regions" else module  # type: ignore[return-value]

    def load(self, module: nn.Module) -> Any:
        return aotc.load(self.name, module, store=self.store)

    # Each of the following runs in a process of its own.

    def changed(self, change: Change, module: nn.Module) -> tuple[nn.Module, Entered]:
        """The module after the change, and what is entered around its load and calls."""
        if change.files is not None:
            folder = Path(tempfile.mkdtemp(dir=self.scratch)) / "subjects"
            shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
            for name, edit in change.files.items():
                (folder / name).write_text(edit((folder / name).read_text()))
            change.make(module)
            for name in [name for name in sys.modules if name.startswith("change_")]:
                del sys.modules[name]
            sys.path[:] = [str(folder), *(path for path in sys.path if path != str(self.folder))]
            importlib.invalidate_caches()
            self.folder = folder
            return self.make(), nullcontext
        change.make(self.target(module))
        return module, functools.partial(change.around, self.target(module)) if change.around else nullcontext

    def eager(self, change: Change | None, module: nn.Module) -> Any:
        """Two outcomes of eager, with the change if there is one."""
        entered: Entered = nullcontext
        if change is not None:
            try:
                module, entered = self.changed(change, module)
            except Exception as error:
                return CannotMake(f"{type(error).__name__} {error}")
        return [tried(lambda: outcome(module, module, self.form, entered)) for _ in range(2)]

    def at_load(self, change: Change, module: nn.Module) -> Any:
        module, entered = self.changed(change, module)
        return tried(lambda: self._loaded_outcome(module, entered))

    def _loaded_outcome(self, module: nn.Module, entered: Entered) -> Any:
        with entered():
            compiled = self.load(module)
        return outcome(compiled, module, self.form, entered)

    def in_call(self, change: Change, module: nn.Module, compiled: Any) -> Any:
        """The outcomes of two calls; the second must be as right as the first."""
        module, entered = self.changed(change, module)
        first = tried(lambda: outcome(compiled, module, self.form, entered))
        if isinstance(first, Raised):
            return first
        second = tried(lambda: outcome(compiled, module, self.form, entered))
        return second if isinstance(second, Raised) or not equal(first, second) else first

    def at_build(self, change: Change, module: nn.Module) -> Any:
        """None if the next build does not take the unit for built; else the outcome after a load."""
        from aotc.compiler.pipeline import plan_build, stored_in
        from aotc.compiler.planning.plan import InspectedModels, facts_of
        from aotc.compiler.publish.url_store import BuildStore
        from aotc.compiler.request import BuildRequest

        module, entered = self.changed(change, module)
        manifest = self.manifest()

        enabled = torch.is_grad_enabled()

        def plan() -> bool:  # not within `entered`: a build has modes of its own
            place, spec = BuildStore(self.store), manifest.models[self.name]
            facts = facts_of(spec, module, manifest.folder, stored_in(place))
            inspected = InspectedModels({self.name: facts}, {self.name: module})
            planned, _ = plan_build(BuildRequest(manifest, self.store), place, inspected)
            return all(unit.cached is not None for unit in planned)

        default = torch.get_default_device()
        torch.set_default_device(None)  # nor within what the change left on
        cached = tried(plan)
        if default.type == "meta":
            torch.set_default_device(default)
        if cached is not True:
            return cached if isinstance(cached, Raised) else None
        torch.set_grad_enabled(enabled)
        return Cached(tried(lambda: self._loaded_outcome(module, entered)))


class Cached(NamedTuple):
    """What a load and a call give after a build that took the unit for built."""

    outcome: Any


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdict(eager: Any, answer: Any, seen: bool = True) -> tuple[str, str]:
    """The verdict and its details of an answer, compared with two outcomes of eager. `seen`: it can be noticed."""
    if isinstance(eager, CannotMake):
        return "skipped", eager.text
    if isinstance(eager, Ended) or not (isinstance(eager[0], Raised) or equal(eager[0], eager[1], 0.0)):
        return "skipped", "eager is not deterministic" if not isinstance(eager, Ended) else f"eager ended {eager.code}"
    if answer is None:
        return "built", ""
    if isinstance(answer, Ended):
        return "crash", "hung" if answer.code == -signal.SIGALRM else f"ended with {answer.code}"
    if isinstance(answer, Cached):
        found, detail = verdict(eager, answer.outcome, seen)
        return ("stuck" if found in ("refused", "miss") else found), detail
    if isinstance(answer, Raised):
        if answer.kind in ("refused", "miss"):
            return answer.kind, answer.text
        return ("skipped" if isinstance(eager[0], Raised) else "untyped"), answer.text
    if not isinstance(eager[0], Raised) and equal(answer, eager[0]):
        return "equal", ""
    return ("silent" if seen else "not seen"), shown(eager[0], answer)


def shown(eager: Any, ours: Any) -> str:
    """The first part in which two outcomes differ."""
    if isinstance(eager, Raised):
        return f"eager raises {eager.text[:100]}"
    if len(eager) != len(ours):
        return f"eager gives {len(eager)} parts, aotc {len(ours)}"
    values = [(one, other) for one, other in zip(eager, ours, strict=True) if not equal(one, other)]
    name = f"{sum(equal(one, other) for one, other in zip(eager, ours, strict=True))} parts are equal; "
    one, other = values[0]
    return f"{name}eager {_shown_part(one)}, aotc {_shown_part(other)}"


def _shown_part(part: Any) -> str:
    return (
        f"{part[0].removeprefix('torch.')} {part[1]} sum {sum(part[2]):.4f}" if isinstance(part, tuple) else repr(part)
    )


def try_all(model: Model, cases: Sequence[Case], stages: Sequence[str]) -> list[Tried]:
    """Try the cases of one model: this process is forked for it, and forked again for each case."""
    with tempfile.TemporaryDirectory() as scratch:
        return _try_all(dataclasses.replace(model, scratch=Path(scratch)), cases, stages)


def _try_all(model: Model, cases: Sequence[Case], stages: Sequence[str]) -> list[Tried]:
    torch.set_grad_enabled(model.form == "training")
    module = model.make()
    before = one_child(lambda: model.eager(None, module))
    answers: dict[int, Any] = {}
    oracle = {
        id(change): one_child(lambda change=change: model.eager(change, module))
        for change in {id(case.change): case.change for case in cases}.values()
    }
    todo: dict[str, list[Case]] = collections.defaultdict(list)
    for case in cases:
        if not isinstance(oracle[id(case.change)], CannotMake):
            todo[case.moment].append(case)

    def run(moment: str, function: Callable[[Case], Any]) -> None:
        for case in todo[moment]:
            answers[id(case)] = one_child(lambda case=case: function(case))

    if "build" in stages:
        run("build", lambda case: model.at_build(case.change, module))
    run("load", lambda case: model.at_load(case.change, module))
    if todo["after"] or todo["between"]:
        compiled = tried(lambda: model.load(module))
        if isinstance(compiled, Raised):
            answers |= {id(case): compiled for case in (*todo["after"], *todo["between"])}
        else:
            run("after", lambda case: model.in_call(case.change, module, compiled))
            outcome(compiled, module, model.form, nullcontext)
            run("between", lambda case: model.in_call(case.change, module, compiled))
    found = []
    for case in cases:
        eager = oracle[id(case.change)]
        name, detail = verdict(eager, answers.get(id(case)), case.moment not in case.kind.blind)
        kept = isinstance(eager, list) and isinstance(before, list) and equal(eager[0], before[0])
        found.append(
            Tried(case.subject, case.form, case.moment, case.kind.title, case.change.where, name, detail, kept)
        )
    return found


# -- choosing ---------------------------------------------------------------------------------------------------------


def choose(
    forms: dict[str, Sequence[str]],
    folder: Path,
    count: int,
    seed: int,
    moments: Sequence[str] = MOMENTS,
    kinds: Sequence[str] = (),
) -> list[Case]:
    """`count` cases, or all, if there are fewer: each kind as often as another, as far as it has so many."""
    by_kind: dict[str, list[Case]] = {}
    for form, subjects in forms.items():
        for subject in subjects:
            model = Model(subject, form, folder, folder)
            module = model.target(model.make())
            for kind in KINDS:
                if (kind.forms and form not in kind.forms) or (kinds and not any(name in kind.title for name in kinds)):
                    continue
                drawn = Random(f"{seed} {subject} {kind.title}")
                for change in kind.changes(module, drawn):
                    for moment in moments if change.files is None else [one for one in moments if one in MOMENTS[:2]]:
                        by_kind.setdefault(kind.title, []).append(Case(subject, form, moment, kind, change))
    random = Random(seed)
    for found in by_kind.values():
        random.shuffle(found)
    chosen: list[Case] = []
    while by_kind and len(chosen) < count:
        for name in list(by_kind):
            chosen.append(by_kind[name].pop())
            if not by_kind[name]:
                del by_kind[name]
    return chosen[:count]


def run(cases: Sequence[Case], folder: Path, store: Path, jobs: int, told: Callable[[Tried], None]) -> list[Tried]:
    """Try the cases: loads and calls first, so that no compiler is imported in their processes."""
    results: list[Tried] = []
    for stages in (("load", "after", "between"), ("build",)):
        if "build" in stages and any(case.moment == "build" for case in cases):
            importlib.import_module("aotc.compiler.pipeline")
        grouped: dict[tuple[str, str], list[Case]] = {}
        for case in cases:
            if case.moment in stages:
                grouped.setdefault((case.subject, case.form), []).append(case)
        tasks = [
            functools.partial(try_all, Model(subject, form, folder, store), own, stages)
            for (subject, form), own in grouped.items()
        ]
        for number, found in in_children(tasks, jobs):
            if isinstance(found, Ended):
                subject, form = list(grouped)[number]
                found = [Tried(subject, form, "all", "all", "", "crash", f"the process of all ended with {found.code}")]
            for one in found:
                told(one)
            results += found
    return results


def table(results: Sequence[Tried], of: Callable[[Tried], str]) -> str:
    verdicts = ("equal", "refused", "miss", "built", "stuck", "skipped", "not seen", *FAULTS)
    counts: dict[str, Counter[str]] = {}
    for one in results:
        counts.setdefault(of(one), Counter())[one.verdict] += 1
    width = max(map(len, counts), default=0)
    lines = [f"{'':{width}} " + " ".join(f"{name:>8}" for name in verdicts)]
    for name, count in counts.items():
        lines.append(f"{name:{width}} " + " ".join(f"{count[one] or '':>8}" for one in verdicts))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--sampled", action="store_true", help="the few models of the sample that CI tries")
    parser.add_argument("--work", type=Path, help="a folder whose store is used, or made and kept")
    parser.add_argument("--subject", action="append", default=[], help="only these")
    parser.add_argument("--form", action="append", default=[], choices=list(FORMS))
    parser.add_argument("--moment", action="append", default=[], choices=MOMENTS)
    parser.add_argument("--kind", action="append", default=[], help="only kinds in whose titles one of these stands")
    parser.add_argument("--all", action="store_true", help="also print what is not a fault")
    parser.add_argument("--results", type=Path, help="write each change's verdict into this file, as JSON")
    parser.add_argument("--table", action="store_true", help="print the guide's table of what is noticed")
    given = parser.parse_args()
    if given.table:
        print(guide_table(), end="")
        return
    forms = {
        form: [name for name in subjects if not given.subject or name in given.subject]
        for form, subjects in (SAMPLED if given.sampled else FORMS).items()
        if not given.form or form in given.form
    }
    work = given.work or Path(tempfile.mkdtemp())
    folder, store = work / "subjects", work / "store"
    if not store.exists():
        write_subjects(folder, SAMPLED if given.sampled else FORMS if given.work else forms)
        command = [sys.executable, "-m", "aotc", "build", "manifest.yaml", "--store", store]
        subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            check=False,
        )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("aotc").setLevel(logging.ERROR)
    began = time.monotonic()
    sys.path.insert(0, str(folder))
    cases = choose(forms, folder, given.count, given.seed, given.moment or MOMENTS, given.kind)
    print(f"{len(cases)} changes chosen in {time.monotonic() - began:.0f} s", flush=True)

    def told(one: Tried) -> None:
        if given.all or one.verdict in FAULTS:
            print(one, flush=True)

    results = run(cases, folder, store, given.jobs, told)
    for of in (lambda one: one.kind, lambda one: f"{one.moment}, {one.form}"):
        print(table(results, of), end="\n\n")
    if given.results:
        given.results.write_text(json.dumps([dataclasses.asdict(one) for one in results]))
    count = Counter(one.verdict for one in results)
    print(f"{len(results)} changes in {time.monotonic() - began:.0f} s: {dict(count)}")
    needless = sum(one.kept and one.verdict in ("refused", "miss", "stuck") for one in results)
    print(f"refused though eager computes the same: {needless}")
    sys.exit(any(count[fault] for fault in FAULTS))


if __name__ == "__main__":
    main()
