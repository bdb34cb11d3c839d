"""Models of libraries, beside eager, torch.compile and its mega-cache. A script: timings fail nothing.

    python tests/benchmarks/models.py                                     # on a CPU: bert, llm, t5 and vit
    python tests/benchmarks/models.py --device cuda                       # on a GPU: also llm-2gb, and timm's
    python tests/benchmarks/models.py --model bert --skip cold,mega       # one model, only what is cheap
    python tests/benchmarks/models.py --manifest tests/models/tiny.yaml   # a quick try

Every process is fresh, its caches empty and its own (as in `startup.py`); every way reads its weights from one
safetensors file. What is measured, of the first bucket of each model:

- first output: from the start of the process, by its parent's clock, to the first output. `torch.compile` uses
  max-autotune; "mega-cache" loads what the cold process saved; aotc has its hot copies (`--cold-hot`: has none);
  "no module" is `aotc.load(ref, weights=FILE)`, which constructs no module and imports no library.
- latency: one more process holds every way with a module and times them in turn, on a GPU by CUDA events.
- build and artifact: all buckets, by `aotc build`; verify: `aotc verify`, as passed of all sizes.

`--regions MODEL=PATTERN` adds a row for the model with `regions: [PATTERN]`.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from startup import COMPILERS, MAX_AUTOTUNE, ROOT, Failed, environment, spawn, timed_calls

Task = dict[str, Any]

MANIFESTS = {
    "cpu": {"bert": ["bert"], "llm": ["llm"], "t5": ["t5"], "vit": ["vit"]},
    "cuda": {
        "bert": ["bert"],
        "llm": ["llm", "llm-2gb"],
        "t5": ["t5"],
        "vit": ["vit"],
        "timm": ["resnet50", "convnext", "timm-vit"],
    },
}
"""For each device the files of manifests/ and their models."""

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


def attach(task: Task) -> Callable[..., Any]:
    """From nothing to what answers requests."""
    import torch

    way = task["way"]
    if way == "weights":
        import aotc

        return aotc.load(task["ref"], weights=task["checkpoint"], device=task["device"])
    module = make_module(task)
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

    with torch.no_grad():
        run = attach(task)
        leaves = tensors(run(**make_inputs(task)))
        if task["device"] == "cuda":
            torch.cuda.synchronize()
        seconds = time.time() - spawned
    found = {"seconds": seconds, "compilers": [name for name in COMPILERS if name in sys.modules]}
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

    def __init__(self, name: str, own: Mapping[str, Any], options: argparse.Namespace, work: Path) -> None:
        self.name, self.own, self.options = name, dict(own), options
        self.work = work / name
        self.work.mkdir(parents=True)
        self.store = self.work / "store"
        self.manifest = self.work / "manifest.yaml"
        targets = {"targets": ["cuda"]} if options.device == "cuda" else {}
        self.manifest.write_text(json.dumps({"version": 1, "models": {name: {**self.own, **targets}}}))  # JSON is YAML
        self.found: dict[str, Any] = {"firsts": {}, "latency": {}}
        self.failures: dict[str, str] = {}

    def dims(self) -> dict[str, int]:
        """The sizes of the first bucket: of a range the one that it is tuned at."""
        grid = {dim: sizes[0] for dim, sizes in self.own.get("grid", {}).items()}
        bucket = next(iter(self.own.get("buckets", [])), grid)
        return {dim: size if isinstance(size, int) else tuned(size) for dim, size in bucket.items()}

    def task(self, action: str, **more: Any) -> Task:
        files = {name: str(self.work / name) for name in ("checkpoint", "expected", "mega", "result")}
        model = {"model": self.own, "dims": self.dims(), "device": self.options.device}
        return {"action": action, **model, **files, "ref": f"{self.store}#{self.name}", **more}

    def perform(self, task: Task, caches: str = "", hot: Path | None = None) -> Task:
        """Do a task in a fresh process with empty caches, or those of a folder that is kept."""
        with tempfile.TemporaryDirectory(dir=self.work, ignore_cleanup_errors=True) as fresh:
            folder = self.work / caches if caches else Path(fresh)
            spawn([__file__, "--child", json.dumps(task)], environment(folder, hot))
        result: Task = json.loads(Path(task["result"]).read_text())
        return result

    def attempt(self, label: str, action: Callable[[], Any]) -> Any:
        """A failure is reported, and the rest goes on."""
        began = time.time()
        try:
            return action()
        except Failed as error:
            self.failures[label] = str(error)
            print(f"{self.name}: {label} FAILED\n{error}", file=sys.stderr)
            return None
        finally:
            print(f"{self.name}: {label}: {time.time() - began:.1f} s", file=sys.stderr, flush=True)

    def run(self) -> None:
        self.attempt("checkpoint", lambda: self.perform(self.task("save")))
        self.attempt("eager, not counted", lambda: self.perform(self.task("first output", way="eager")))
        built = self.attempt("build", self.build)
        if built:
            self.attempt("verify", self.verify)
        ways = [way for way in WAYS if way not in self.options.skip and (built or way not in ("aotc", "weights"))]
        for number in range(self.options.repeat):
            for way in ways if number % 2 == 0 else reversed(ways):
                if way not in ONCE:
                    self.attempt(WAYS[way], lambda way=way: self.start(way))
        for way in ONCE:
            if way in ways and (way == "cold" or (self.work / "mega").exists()):
                self.attempt(WAYS[way], lambda way=way: self.start(way))
        held = [way for way in ("eager", "cold", "aotc") if way in self.found["firsts"]]
        if "latency" not in self.options.skip and held:
            task = self.task("latency", ways=held, rounds=self.options.rounds)
            found = self.attempt("latency", lambda: self.perform(task, "kept", self.work / "hot"))
            self.found["latency"] = found or {}

    def build(self) -> bool:
        began = time.time()
        command = ["-m", "aotc", "build", str(self.manifest), "--store", str(self.store), "--json"]
        report = json.loads(self.printed([*command, "--jobs", str(self.options.jobs)]))
        self.found["build"] = time.time() - began
        self.found["bytes"] = sum(unit["size"] for unit in report["units"])
        self.found["buckets"] = [unit["bucket"] for unit in report["units"]]
        return True

    def verify(self) -> None:
        command = ["-m", "aotc", "verify", str(self.manifest), "--store", str(self.store), "--json"]
        reports = json.loads(self.printed(command))
        self.found["verify"] = [report["status"] for report in reports]

    def printed(self, command: Sequence[str]) -> str:
        """What a command of aotc prints to standard output, with the caches of this row."""
        code = "import runpy, sys; sys.stdout = open(sys.argv[1], 'w'); sys.argv = sys.argv[2:]; "
        code += "runpy.run_module('aotc', run_name='__main__', alter_sys=True)"
        output = self.work / "printed.json"
        spawn(["-c", code, str(output), *command[1:]], environment(self.work / "aotc", self.work / "hot"))
        return output.read_text()

    def start(self, way: str) -> None:
        """One process of a way. The first one that has no hot copies yet makes them, and is not counted."""
        task = self.task("first output", way=way)
        hot = None if self.options.cold_hot else self.work / "hot"
        if way in ("aotc", "weights") and hot and way not in self.found["firsts"]:
            self.perform(task, hot=hot)
        found = self.perform(task, "kept" if way == "cold" else "", hot)
        self.found["firsts"].setdefault(way, []).append(found)

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
            if (not names or name in names) and (not options.model or name in options.model):
                found[name] = {**document.get("defaults", {}), **own}
    for name, pattern in options.regions.items():
        if name in found:
            found[f"{name}-by-regions"] = {**found[name], "regions": [pattern]}
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
    parser.add_argument("--cold-hot", action="store_true", help="aotc starts without hot copies")
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
    heads = ["model", "buckets", "build s", "MB", "verify", *WAYS.values(), "ms a call: eager / `torch.compile` / aotc"]
    models = []
    with tempfile.TemporaryDirectory(prefix="aotc-models-", ignore_cleanup_errors=True) as work:
        for name, own in chosen_models(options).items():
            model = Model(name, own, options, Path(work))
            model.run()
            models.append(model)
    print(f"\nFirst output since process start, seconds, on {options.device}:\n")
    for row in (heads, ["---"] * len(heads), *(model.row() for model in models)):
        print(f"| {' | '.join(row)} |")
    for model in models:
        runs = model.found["firsts"].get("weights", [])
        print(f"\n{model.name}: largest difference from eager's first output {model.error():.1e}", end="")
        print(f"; no module: compilers imported: {runs[0]['compilers'] or 'none'}" if runs else "")
        for label, text in model.failures.items():
            print(f"FAILED {label}: {text.splitlines()[-1]}")
    if options.json:
        report = {model.name: {**model.found, "failures": model.failures} for model in models}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
