"""Models of libraries, beside eager, torch.compile and its mega-cache. A script: timings fail nothing.

    python tests/benchmarks/models.py                                     # on a CPU: bert, llm, t5 and vit
    python tests/benchmarks/models.py --device cuda                       # on a GPU: llm-2gb, and two of timm's
    python tests/benchmarks/models.py --model bert --skip cold,mega       # one model, only what is cheap
    python tests/benchmarks/models.py --manifest tests/models/tiny.yaml   # a quick try

With `--work FOLDER` everything is kept there, and what is done is not done again: a run that was ended goes on. Results
are written after every step, and a run that is ended by SIGTERM prints the table of what it has. For a machine that is
lent for ten minutes:

    timeout 570 python tests/benchmarks/models.py --device cuda --together --jobs 12 --repeat 1 --budget 400 \\
        --json models.json

Every process is fresh, its caches empty and its own (as in `startup.py`); every way reads its weights from one
safetensors file. What is measured, of the first bucket of each model:

- first output: from the start of the process, by its parent's clock, to the first output. `torch.compile` uses
  max-autotune; "mega-cache" loads what the cold process saved; "no module" is `aotc.load(ref, weights=FILE)`, which
  constructs no module and imports no library.
- latency: one more process holds every way with a module and times them in turn, on a GPU by CUDA events.
- build and artifact: all buckets, by `aotc build`; verify: `aotc verify`, as passed of all sizes. With `--together` all
  models are built by one command, `--jobs` units side by side, and a row's seconds are the sum of its units' own; what
  is not timed is done side by side too.

`--regions MODEL=PATTERN` adds a row for the model with `regions: [PATTERN]`.
"""

from __future__ import annotations

import argparse
import compileall
import copy
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from startup import COMPILERS, MAX_AUTOTUNE, ROOT, Failed, environment, spawn, timed_calls

Task = dict[str, Any]

MANIFESTS = {
    "cpu": {"bert": ["bert"], "llm": ["llm"], "t5": ["t5"], "vit": ["vit"]},
    "cuda": {
        "bert": ["bert"],
        "llm": ["llm-2gb"],
        "t5": ["t5"],
        "vit": ["vit"],
        "timm": ["convnext", "timm-vit"],
    },
}
"""For each device the files of manifests/, and the models of them that are measured if none are named."""

WAYS = {
    "eager": "eager",
    "cold": "`torch.compile` cold",
    "mega": "mega-cache",
    "aotc": "aotc",
    "weights": "aotc, no module",
}
ONCE = ("cold", "mega")
"""Ways that take minutes: measured in one process each."""


# -- in the measured process ------------------------------------------------------------------------------------------


def made(value: Any) -> Any:
    """A value of a manifest's kwargs, its factories called."""
    if isinstance(value, Mapping):
        if "factory" in value and value.keys() <= {"factory", "kwargs"}:
            return call_factory(value["factory"], value.get("kwargs", {}))
        return {name: made(item) for name, item in value.items()}
    return [made(item) for item in value] if isinstance(value, list) else value


def call_factory(reference: str, kwargs: Mapping[str, Any]) -> Any:
    module, _, attributes = reference.partition(":")
    factory = importlib.import_module(module)
    for name in attributes.split("."):
        factory = getattr(factory, name)
    return factory(**{name: made(value) for name, value in kwargs.items()})


def make_module(task: Task) -> Any:
    """The module on its device, in eval mode, with the weights of the checkpoint if there is one by now."""
    import torch

    model = task["model"]
    torch.manual_seed(0)
    with torch.device(task["device"]):
        module = call_factory(model["factory"], model.get("kwargs", {})).eval()
    if model.get("dtype"):
        module = module.to(getattr(torch, model["dtype"]))
    if Path(task["checkpoint"]).exists():
        from safetensors.torch import load_model

        load_model(module, task["checkpoint"], device=task["device"])
    return module


def make_inputs(task: Task) -> dict[str, Any]:
    """Inputs of the measured bucket, by name; the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(1)
    inputs = {}
    for name, form in task["model"]["inputs"].items():
        shape = [task["dims"].get(entry, entry) for entry in form["shape"]]
        dtype = getattr(torch, form.get("dtype") or task["model"].get("dtype") or "float32")
        match form.get("init", "randn"):
            case {"randint": [low, high]}:
                value = torch.randint(low, high, shape, generator=generator)
            case "ones" | "zeros" as init:
                value = getattr(torch, init)(shape)
            case _:
                value = torch.randn(shape, generator=generator)
        inputs[name] = value.to(task["device"], dtype)
    return inputs


def compiled_by_torch(task: Task, module: Any) -> Any:
    import torch

    mode = "max-autotune" if task["device"] == "cuda" else MAX_AUTOTUNE
    return torch.compile(module, mode=mode, dynamic=False)


def attach(task: Task, moments: dict[str, float] | None = None) -> Callable[..., Any]:
    """From nothing to what answers requests; says when the module was made."""
    import torch

    way = task["way"]
    if way == "weights":
        import aotc

        return aotc.load(task["ref"], weights=task["checkpoint"], device=task["device"])
    module = make_module(task)
    if moments is not None:
        moments["module"] = time.time()
    if way == "aotc":
        import aotc

        return aotc.load(task["ref"], module)
    if way == "mega":
        torch.compiler.load_cache_artifacts(Path(task["mega"]).read_bytes())
    return module if way == "eager" else compiled_by_torch(task, module)  # type: ignore[no-any-return]


def first_output(task: Task) -> Task:
    """Start a service in one way, to its first output."""
    spawned = float(os.environ["BENCHMARK_SPAWNED"])
    import torch

    moments = {"torch": time.time()}
    with torch.no_grad():
        run = attach(task, moments)
        moments["attached"] = time.time()
        leaves = tensors(run(**make_inputs(task)))
        if task["device"] == "cuda":
            torch.cuda.synchronize()
        seconds = time.time() - spawned
    found = {"seconds": seconds, "compilers": [name for name in COMPILERS if name in sys.modules]}
    found["moments"] = {name: moment - spawned for name, moment in moments.items()}
    found["error"] = difference(Path(task["expected"]), leaves)
    if task["way"] == "cold" and (saved := torch.compiler.save_cache_artifacts()) is not None:
        Path(task["mega"]).write_bytes(saved[0])
    return found


def tensors(value: Any) -> list[Any]:
    """Every tensor of a result, in order; the classes of results need not be known to torch."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value.detach().cpu()]
    if isinstance(value, Mapping | list | tuple):
        return [leaf for item in (value.values() if isinstance(value, Mapping) else value) for leaf in tensors(item)]
    return []


def difference(file: Path, leaves: Sequence[Any]) -> float:
    """The largest difference from eager's first output, as a share of its largest value; eager saves its own."""
    import torch

    if not file.exists():
        torch.save(list(leaves), file)
    expected = torch.load(file)
    pairs = [(a.double(), b.double()) for a, b in zip(leaves, expected, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def latency(task: Task) -> Task:
    """Milliseconds of a call of each way that has a module: medians over rounds in which they take turns."""
    import torch

    inputs = make_inputs(task)
    with torch.no_grad():
        calls = {way: attach({**task, "way": way}) for way in task["ways"]}
        runs = {way: (lambda run=run: run(**inputs)) for way, run in calls.items()}
        for run in runs.values():
            for _ in range(3):
                run()
        if task["device"] == "cuda":
            from cuda_processes import event_rounds

            rounds = event_rounds(runs, task["rounds"])
        else:
            rounds = {way: [] for way in runs}
            for number in range(task["rounds"]):
                for way in list(runs)[:: 1 if number % 2 == 0 else -1]:
                    seconds = timed_calls(lambda _, way=way: runs[way](), None, 5)
                    rounds[way].append(1000 * seconds)
    return {way: statistics.median(each) for way, each in rounds.items()}


def save(task: Task) -> Task:
    """Write the checkpoint that every way reads."""
    from safetensors.torch import save_model

    save_model(make_module(task), task["checkpoint"])
    return {}


ACTIONS = {"first output": first_output, "latency": latency, "save": save}


def child(request: str) -> None:
    """The measured process: does one task and writes its result as JSON."""
    task: Task = json.loads(request)
    Path(task["result"]).write_text(json.dumps(ACTIONS[task["action"]](task)))


# -- in the parent ----------------------------------------------------------------------------------------------------


class Model:
    """One row: a model of a manifest, over a folder for its files."""

    def __init__(self, name: str, own: Mapping[str, Any], options: argparse.Namespace, work: Path, log: Log) -> None:
        self.name, self.own, self.options, self.log = name, dict(own), options, log
        self.work, self.store = work / name, work / "store"  # of all models, as `--together` needs
        self.work.mkdir(parents=True, exist_ok=True)
        self.manifest = self.work / "manifest.yaml"
        self.manifest.write_text(manifest_of([self]))
        self.found: dict[str, Any] = {"firsts": {}, "latency": {}, "done": [], **log.kept.get(name, {})}
        self.failures: dict[str, str] = {}
        self.found["failures"] = self.failures

    def document(self) -> dict[str, Any]:
        """What stands in a manifest under the model's name."""
        return {**self.own, **({"targets": ["cuda"]} if self.options.device == "cuda" else {})}

    def dims(self) -> dict[str, int]:
        """The sizes of the first bucket: of a range the one that it is tuned at."""
        grid = {dim: sizes[0] for dim, sizes in self.own.get("grid", {}).items()}
        bucket = next(iter(self.own.get("buckets", [])), grid)
        return {dim: size if isinstance(size, int) else tuned(size) for dim, size in bucket.items()}

    def task(self, action: str, **more: Any) -> Task:
        files = {name: str(self.work / name) for name in ("checkpoint", "expected", "mega", "result")}
        model = {"model": self.own, "dims": self.dims(), "device": self.options.device}
        return {"action": action, **model, **files, "ref": f"{self.store}#{self.name}", **more}

    def perform(self, task: Task, caches: str = "") -> Task:
        """Do a task in a fresh process with empty caches, or those of a folder that is kept."""
        with tempfile.TemporaryDirectory(dir=self.work, ignore_cleanup_errors=True) as fresh:
            folder = self.work / caches if caches else Path(fresh)
            spawn([__file__, "--child", json.dumps(task)], environment(folder))
        result: Task = json.loads(Path(task["result"]).read_text())
        return result

    def attempt(self, label: str, action: Callable[[], Any]) -> None:
        """Do it, if it was not done before. A failure is reported, and the rest goes on."""
        if label in self.found["done"]:
            return
        began = time.time()
        try:
            action()
        except Failed as error:
            self.fail(label, str(error))
        else:
            self.found["done"].append(label)
        self.log.write(self, f"{label}: {time.time() - began:.1f} s")

    def fail(self, label: str, text: str) -> None:
        self.failures[label] = text
        self.log.write(self, f"{label} FAILED\n{text}")

    # -- the steps ----------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        self.attempt("checkpoint", lambda: self.perform(self.task("save")))
        self.attempt("eager, not counted", lambda: self.perform(self.task("first output", way="eager")))

    def build(self) -> None:
        def built() -> None:
            began = time.time()
            report = build([self], self.work, self.options.jobs)
            self.take(report, time.time() - began)

        self.attempt("build", built)

    def take(self, report: Mapping[str, Any], seconds: float) -> None:
        """What the report of a build says of this model. Raises Failed."""
        units = [unit for unit in report["units"] if unit["model"] == self.name]
        failed = [unit["error"] for unit in units if unit["error"]]
        if failed or self.name not in report["bundles"]:
            raise Failed("\n".join(failed) or "no bundle was published")
        self.found |= {"build": seconds, "bytes": sum(unit["size"] for unit in units)}
        self.found["buckets"] = [unit["bucket"] for unit in units]
        self.found["notes"] = [note for unit in units for note in unit["notes"]]

    @property
    def is_built(self) -> bool:
        return "build" in self.found

    def verify(self) -> None:
        def verified() -> None:
            command = ["verify", str(self.manifest), "--store", str(self.store), "--json"]
            self.found["verify"] = [report["status"] for report in printed(command, self.work)]

        if self.is_built:
            self.attempt("verify", verified)

    @property
    def ways(self) -> list[str]:
        """Those that are wanted, and can be started: around regions there is no running without the module."""
        ours = {"aotc", "weights"} if self.is_built else set()
        if "regions" in self.own:
            ours.discard("weights")
        return [way for way in WAYS if way not in self.options.skip and (way in ours or way not in ("aotc", "weights"))]

    def start_often(self) -> None:
        """The ways that take seconds."""
        for number in range(self.options.repeat):
            for way in self.ways if number % 2 == 0 else reversed(self.ways):
                if way not in ONCE:
                    self.attempt(f"{WAYS[way]} ({number + 1})", lambda way=way: self.start(way))

    def start_once(self) -> None:
        """The ways that take minutes."""
        for way in ONCE:
            if way in self.ways and (way == "cold" or (self.work / "mega").exists()):
                self.attempt(WAYS[way], lambda way=way: self.start(way))

    def start(self, way: str) -> None:
        found = self.perform(self.task("first output", way=way), "kept" if way == "cold" else "")
        self.found["firsts"].setdefault(way, []).append(found)

    def time_calls(self) -> None:
        held = [way for way in ("eager", "cold", "aotc") if way in self.found["firsts"]]
        task = self.task("latency", ways=held, rounds=self.options.rounds)

        def timed() -> None:
            self.found["latency"] = self.perform(task, "kept")

        if "latency" not in self.options.skip and held:
            self.attempt(f"latency of {', '.join(held)}", timed)

    # -- the table ----------------------------------------------------------------------------------------------------

    def row(self) -> list[str]:
        found = self.found
        firsts = {way: statistics.median(run["seconds"] for run in runs) for way, runs in found["firsts"].items()}
        statuses = found.get("verify", [])
        milliseconds = [f"{found['latency'][way]:.3g}" for way in ("eager", "cold", "aotc") if way in found["latency"]]
        return [
            self.name,
            "; ".join(found.get("buckets", [])) or "–",
            f"{found['build']:.0f}" if "build" in found else "–",
            f"{found['bytes'] / 1e6:.2f}" if "bytes" in found else "–",
            f"{statuses.count('ok')} of {len(statuses)}" if statuses else "–",
            *(f"{firsts[way]:.2f}" if way in firsts else "–" for way in WAYS),
            " / ".join(milliseconds) or "–",
        ]

    def error(self) -> float:
        """The largest difference of any way's output from eager's."""
        return max((run["error"] for runs in self.found["firsts"].values() for run in runs), default=0.0)


class Log:
    """Says what is done, and writes down what was found of a model after each step. Threads may share it."""

    def __init__(self, file: Path, go_on: bool) -> None:
        self.file, self.began = file, time.time()
        self.kept: dict[str, Any] = json.loads(file.read_text()) if go_on and file.exists() else {}
        self._lock = threading.Lock()

    def write(self, model: Model, text: str) -> None:
        with self._lock:
            print(f"[{time.time() - self.began:4.0f} s] {model.name}: {text}", file=sys.stderr, flush=True)
            self.kept[model.name] = copy.deepcopy(model.found)
            written = self.file.with_suffix(".new")
            written.write_text(json.dumps(self.kept, indent=1) + "\n")
            written.replace(self.file)


def manifest_of(models: Sequence[Model]) -> str:
    return json.dumps({"version": 1, "models": {model.name: model.document() for model in models}})  # JSON is YAML


def build(models: Sequence[Model], work: Path, jobs: int) -> Any:
    """The report of `aotc build`, in which units may have failed."""
    manifest = work / "manifest.yaml"
    manifest.write_text(manifest_of(models))
    return printed(["build", str(manifest), "--store", str(models[0].store), "--jobs", str(jobs), "--json"], work)


def printed(command: Sequence[str], work: Path) -> Any:
    """The JSON that a command of aotc prints to standard output. Raises Failed where it prints none."""
    code = "import runpy, sys; sys.stdout = open(sys.argv[1], 'w'); sys.argv = sys.argv[1:]; "
    code += "runpy.run_module('aotc', run_name='__main__', alter_sys=True)"
    output = work / "printed.json"
    output.unlink(missing_ok=True)
    try:
        spawn(["-c", code, str(output), *command], environment(work / "aotc"))
    except Failed:
        if not output.exists() or not output.read_text().startswith(("{", "[")):
            raise
    return json.loads(output.read_text())


def build_together(models: Sequence[Model], work: Path, options: argparse.Namespace) -> None:
    missing = [model for model in models if not model.is_built]
    if not missing:
        return
    began = time.time()
    try:
        report = build(missing, work, options.jobs)
    except Failed as error:
        report = {"units": [], "bundles": {}}
        missing[0].fail("build", str(error))
    missing[0].log.write(missing[0], f"and all others were built in {time.time() - began:.1f} s")
    for model in missing:
        seconds = sum(unit["seconds"] for unit in report["units"] if unit["model"] == model.name)
        model.attempt("build", lambda model=model, seconds=seconds: model.take(report, seconds))


def measure(models: Sequence[Model], work: Path, options: argparse.Namespace) -> None:
    """Every step of every model, the ways that take minutes late: no further one begins after the budget."""
    if options.together:
        each = functools.partial(side_by_side, models, options.jobs)
        each(Model.prepare)
        build_together(models, work, options)
        each(Model.verify)
    else:
        for model in models:
            for step in (model.prepare, model.build, model.verify):
                step()
    for model in models:
        model.start_often()
    for model in models:
        if not options.budget or time.time() - model.log.began < options.budget:
            model.start_once()
    for model in models:
        model.time_calls()


def side_by_side(models: Sequence[Model], jobs: int, step: Callable[[Model], None]) -> None:
    pool = ThreadPoolExecutor(jobs)
    try:
        list(pool.map(step, models))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def tuned(size: Any) -> int:
    form = size if isinstance(size, dict) else {"range": size}
    step = form.get("multiple_of", 1)
    return int(form.get("tune_at", form["range"][1] // step * step))


def chosen_models(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The models to measure, each with its manifest's defaults applied."""
    import yaml

    if options.manifest:
        files: dict[Path, list[str]] = {file: [] for file in options.manifest}
    else:
        files = {ROOT / "manifests" / f"{name}.yaml": models for name, models in MANIFESTS[options.device].items()}
        if importlib.util.find_spec("timm") is None:
            files.pop(ROOT / "manifests" / "timm.yaml", None)
    found: dict[str, dict[str, Any]] = {}
    for file, names in files.items():
        document = yaml.safe_load(file.read_text())
        for name, own in document["models"].items():
            rows = {name: {**document.get("defaults", {}), **own}}
            if pattern := options.regions.get(name):
                rows[f"{name}-by-regions"] = {**rows[name], "regions": [pattern]}
            if options.one_bucket:
                rows = {row: {**model, "buckets": model["buckets"][:1]} for row, model in rows.items()}
            wanted = name in options.model or (not options.model and (not names or name in names))
            found |= {row: model for row, model in rows.items() if wanted or row in options.model}
    return found


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--manifest", type=Path, action="append", default=[], help="instead of those of manifests/")
    parser.add_argument("--model", action="append", default=[], help="only this one (may be given several times)")
    parser.add_argument("--regions", action="append", default=[], metavar="MODEL=PATTERN")
    parser.add_argument("--skip", default="", metavar="WAYS", help=f"of {', '.join([*WAYS, 'latency'])}")
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes of each cheap way")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the latency measurement")
    parser.add_argument("--jobs", type=int, default=1, help="units that `aotc build` compiles side by side")
    parser.add_argument("--together", action="store_true", help="build all models by one command, --jobs side by side")
    parser.add_argument("--one-bucket", action="store_true", help="build only the first bucket, which is measured")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="then begin no more of torch.compile's starts")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keep everything there, and go on from there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args(arguments)
    options.skip = {way for way in options.skip.split(",") if way}
    if unknown := options.skip - {*WAYS, "latency"}:
        parser.error(f"--skip: {', '.join(sorted(unknown))} is none of {', '.join([*WAYS, 'latency'])}")
    options.regions = dict(text.partition("=")[::2] for text in options.regions or ["bert=encoder.layer.*"])
    return options


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    options = parse_options(sys.argv[1:])
    sys.path.insert(0, str(ROOT))
    compileall.compile_dir(ROOT / "aotc", quiet=1)  # as pip does for an installed package
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with tempfile.TemporaryDirectory(prefix="aotc-models-", ignore_cleanup_errors=True) as temporary:
        work = options.work.resolve() if options.work else Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        log = Log(options.json if options.json and not options.work else work / "results.json", bool(options.work))
        models = [Model(name, own, options, work, log) for name, own in chosen_models(options).items()]
        try:
            measure(models, work, options)
        finally:
            print_table(models, options)
            if options.json and options.work and log.file.exists():
                shutil.copy(log.file, options.json)


def print_table(models: Sequence[Model], options: argparse.Namespace) -> None:
    heads = ["model", "buckets", "build s", "MB", "verify", *WAYS.values(), "ms a call: eager / `torch.compile` / aotc"]
    print(f"\nFirst output since process start, seconds, on {options.device}:\n")
    for row in (heads, ["---"] * len(heads), *(model.row() for model in models)):
        print(f"| {' | '.join(row)} |")
    for model in models:
        runs = model.found["firsts"].get("weights", [])
        print(f"\n{model.name}: largest difference from eager's first output {model.error():.1e}", end="")
        print(f"; no module: compilers imported: {runs[0]['compilers'] or 'none'}" if runs else "")
        for note in model.found.get("notes", []):
            print(f"  {note}")
        for label, text in model.failures.items():
            print(f"FAILED {label}: {text.splitlines()[-1]}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
