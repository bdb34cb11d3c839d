"""How a service starts: eager, torch.compile in four ways, and aotc. A script, not a test: timings fail nothing.

    python tests/benchmarks/startup.py                                      # float32, live weights
    python tests/benchmarks/startup.py --dtype bfloat16 --weights frozen
    python tests/benchmarks/startup.py --layers 1 --repeat 1 --skip aot     # a quick try

Each way starts in a fresh process with empty caches: Inductor's, Triton's, the home folder and the temporary folder
(where Inductor keeps precompiled headers) are its own. The model is the GPT of `examples/models.py`, width 256, on
1 × 128 tokens. What is measured, in seconds:

- import torch, and then what the way itself imports: aotc, or torch's compiler;
- model: constructing the module;
- reattach: from the constructed module to the first output, less eager's first call in a process of its own;
- first output: from the start of the process, as its parent saw it, to the first output.

The latency in steady state comes from one more process that holds eager, torch.compile and aotc, and times them in
turn, round after round. Two ways are compared by the median of the rounds' ratios, with the 95 % interval of that
median. All of it takes about five minutes on two cores. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from own_caches import ROOT, environment

BATCH, SEQ, VOCABULARY = 1, 128, 1000
MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy", "aotc.compiler")
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
"""How far an output may be from eager's, as a share of eager's largest."""


class Way(NamedTuple):
    """One way to start, as the table names it."""

    label: str
    repeated: bool = False  # cheap enough to be measured --repeat times


WAYS = {
    "eager": Way("eager", repeated=True),
    "max-autotune": Way("`torch.compile` max-autotune, cold"),
    "default": Way("`torch.compile` default, cold"),
    "mega": Way("max-autotune after `load_cache_artifacts`"),
    "aot": Way("`aot_compile`, saved and loaded"),
    "aotc": Way("aotc", repeated=True),
}
SKIPPABLE = ("max-autotune", "default", "mega", "aot", "aotc", "steady")


# -- in the measured process ------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What a child process is to do, and where the files lie that pass between processes."""

    way: str
    layers: int
    dtype: str
    work: str
    ref: str
    rounds: int
    seconds_per_round: float
    steady: tuple[str, ...] = ()

    def file(self, name: str) -> Path:
        return Path(self.work) / name


def make_model(task: Task) -> tuple[Any, Any]:
    """The module and its input. The weights are those that `aotc build` freezes: its seed is 0 as well."""
    import torch

    from examples.models import gpt

    torch.manual_seed(0)
    module = gpt(layers=task.layers, vocabulary=VOCABULARY).to(getattr(torch, task.dtype)).eval()
    return module, torch.randint(0, VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))


def compiled_by_torch(module: Any, mode: str) -> Any:
    import torch

    return torch.compile(module, mode=mode, fullgraph=True, dynamic=False)


def reattach(task: Task, module: Any) -> Callable[[Any], Any]:
    """From a module to what answers requests."""
    import torch

    if task.way == "eager":
        return module
    if task.way == "aotc":
        import aotc

        return aotc.load(task.ref, module)
    if task.way == "aot":
        with task.file("aot.bin").open("rb") as file:
            function = torch.compiler.load_compiled_function(file, external_data={"module": module})
        return lambda x: function(module, x)
    if task.way == "mega":
        torch.compiler.load_cache_artifacts(task.file("mega.bin").read_bytes())
    return compiled_by_torch(module, "default" if task.way == "default" else MAX_AUTOTUNE)


def measure_start(task: Task) -> dict[str, Any]:
    """Start the service in one way. Runs in a fresh process, with nothing of note imported before."""
    spawned = float(os.environ["BENCHMARK_SPAWNED"])
    marks = [time.time()]
    import torch

    marks.append(time.time())
    if task.way == "aotc":
        from aotc import load  # noqa: F401
    elif task.way != "eager":
        import torch._dynamo
        import torch._inductor.compile_fx
    marks.append(time.time())
    module, x = make_model(task)
    marks.append(time.time())
    with torch.no_grad():
        run = reattach(task, module)
        output = run(x)
        marks.append(time.time())
        loaded = [name for name in COMPILERS if name in sys.modules]
        error = difference(task, output)
    if task.way == "max-autotune":
        artifacts = torch.compiler.save_cache_artifacts()
        assert artifacts is not None
        task.file("mega.bin").write_bytes(artifacts[0])
    durations = [end - start for start, end in pairwise(marks)]
    return {
        **dict(zip(("import_torch", "import_own", "model", "to_first_output"), durations, strict=True)),
        "first_output": marks[-1] - spawned,
        "compilers_loaded": loaded,
        "error": error,
    }


def difference(task: Task, output: Any) -> float:
    """The largest difference from eager's output, as a share of its largest value. Eager saves its own for the rest."""
    import torch

    file = task.file("eager.pt")
    if task.way == "eager" and not file.exists():
        torch.save(output, file)
    expected = torch.load(file).float()
    return float((output.float() - expected).abs().max() / expected.abs().max())


def save_aot(task: Task) -> dict[str, Any]:
    """Write what the way "aot" loads."""
    import torch

    module, x = make_model(task)
    with torch.no_grad():
        function = compiled_by_torch(module.forward, MAX_AUTOTUNE).aot_compile(((x,), {}))
    function.save_compiled_function(str(task.file("aot.bin")), external_data={"module": module})
    return {}


def measure_steady(task: Task) -> dict[str, Any]:
    """Milliseconds of a call, for each way one median per round, the ways taking turns within a round."""
    import torch

    module, x = make_model(task)
    runs = {way: reattach(task._replace(way=way), module) for way in task.steady}
    with torch.no_grad():
        errors = {way: difference(task, run(x)) for way, run in runs.items()}
        calls = {way: max(3, round(task.seconds_per_round / timed_calls(run, x, 5))) for way, run in runs.items()}
        rounds: dict[str, list[float]] = {way: [] for way in runs}
        for index in range(task.rounds):
            order = list(runs)[index % len(runs) :] + list(runs)[: index % len(runs)]
            for way in order:
                timed_calls(runs[way], x, 2)  # the caches are the other way's
                rounds[way].append(1000 * timed_calls(runs[way], x, calls[way]))
    return {"rounds": rounds, "errors": errors}


def timed_calls(run: Callable[[Any], Any], x: Any, count: int) -> float:
    """The median of the seconds of `count` calls."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        run(x)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def child(request: str) -> None:
    """The measured process: does one task and writes its result as JSON."""
    task = Task(**json.loads(request))
    action = {"steady": measure_steady, "save-aot": save_aot}.get(task.way, measure_start)
    task.file("result.json").write_text(json.dumps(action(task)))


# -- in the parent ----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A process of the benchmark ended with an error; the text is the end of what it wrote."""


def spawn(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a process to its end. Raises Failed."""
    variables = {**variables, "BENCHMARK_SPAWNED": repr(time.time())}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Failed("\n".join((done.stdout + done.stderr).strip().splitlines()[-15:]) or f"exit {done.returncode}")


class Benchmark:
    """All the processes of one benchmark, over a folder for their files."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.store = work / "store"
        self.results: dict[str, list[dict[str, Any]]] = {}
        self.failures: dict[str, str] = {}
        self.steady: dict[str, Any] = {}
        self.build_seconds: float | None = None

    def task(self, way: str, **changes: Any) -> Task:
        options = self.options
        ref = f"{self.store}#gpt"
        task = Task(way, options.layers, options.dtype, str(self.work), ref, options.rounds, options.seconds_per_round)
        return task._replace(**changes)

    def wanted(self, way: str) -> bool:
        return way not in self.options.skip

    def perform(self, task: Task, caches: Path | None = None) -> dict[str, Any]:
        """Do a task in a fresh process, with empty caches unless `caches` names a folder, which then is kept."""
        folder = caches or Path(tempfile.mkdtemp(dir=self.work))
        try:
            spawn([__file__, "--child", json.dumps(task._asdict())], environment(folder))
            result: dict[str, Any] = json.loads(task.file("result.json").read_text())
            return result
        finally:
            if caches is None:
                shutil.rmtree(folder)

    def build(self) -> None:
        """Build the artifact, as a user would."""
        options = self.options
        model = {
            "factory": "examples.models:gpt",
            "kwargs": {"layers": options.layers, "vocabulary": VOCABULARY},
            "dtype": options.dtype,
            "weights": options.weights,
            "mode": MAX_AUTOTUNE,
            "inputs": {
                "input_ids": {"shape": ["batch", "seq"], "dtype": "int64", "init": {"randint": [0, VOCABULARY]}}
            },
            "buckets": [{"batch": BATCH, "seq": SEQ}],
        }
        manifest = self.work / "manifest.yaml"
        manifest.write_text(json.dumps({"version": 1, "models": {"gpt": model}}))  # JSON is YAML
        start = time.time()
        command = ["-m", "aotc", "build", str(manifest), "--store", str(self.store)]
        spawn(command, environment(self.work / "build"))
        self.build_seconds = time.time() - start

    def attempt(self, way: str, action: Callable[[], Any]) -> Any:
        """Do something for a way; a failure is reported, and the other ways go on."""
        print(f"{way} …", file=sys.stderr, flush=True)
        start = time.time()
        try:
            return action()
        except Failed as error:
            self.failures[way] = str(error)
            print(f"{way} failed:\n{error}", file=sys.stderr)
        finally:
            print(f"{way}: {time.time() - start:.1f} s in all", file=sys.stderr, flush=True)

    def run(self) -> None:
        """All measurements. The cheap ways take turns, so that what drifts on the machine touches them all alike."""
        self.perform(self.task("eager"))  # brings the files of torch into memory; not counted
        if self.wanted("aotc"):
            self.attempt("build", self.build)
        cheap = [way for way, (_, repeated) in WAYS.items() if repeated and (way == "eager" or self.build_seconds)]
        for number in range(self.options.repeat):
            for way in cheap if number % 2 == 0 else reversed(cheap):
                self.attempt(way, lambda way=way: self.start_once(way))
        for way, (_, repeated) in WAYS.items():
            if not repeated and self.wanted(way):
                self.attempt(way, lambda way=way: self.start_once(way))
        if self.wanted("steady"):
            measured = ("eager", "max-autotune", "default", "aotc")
            ways = tuple(way for way in measured if way in self.results)
            task = self.task("steady", steady=ways)
            self.steady = self.attempt("steady", lambda: self.perform(task, self.kept)) or {}

    @property
    def kept(self) -> Path:
        """The caches that the cold max-autotune process leaves, for the steady one."""
        return self.work / "kept"

    def start_once(self, way: str) -> None:
        if way == "aot":
            self.perform(self.task("save-aot"))
        caches = self.kept if way == "max-autotune" else None
        self.results.setdefault(way, []).append(self.perform(self.task(way), caches))

    # -- the report ---------------------------------------------------------------------------------------------------

    def median(self, way: str, field: str) -> float:
        return statistics.median(result[field] for result in self.results[way])

    def reattach(self, way: str) -> float:
        return self.median(way, "to_first_output") - self.median("eager", "to_first_output")

    def ratio(self, way: str, other: str) -> tuple[float, float, float]:
        """The median over the rounds of the steady latencies' ratio, and the 95 % interval of that median."""
        rounds = self.steady["rounds"]
        ratios = sorted(a / b for a, b in zip(rounds[way], rounds[other], strict=True))
        # Order statistics: the count of rounds below the true median is binomial, with deviation √n / 2.
        low = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
        return statistics.median(ratios), ratios[low], ratios[-1 - low]

    def table(self) -> str:
        header = ("start", "import torch", "own imports", "model", "reattach", "first output", "latency", "compilers")
        rows = [header, ("---", *["---:"] * 6, "---")]
        for way, (label, _) in WAYS.items():
            if way in self.results:
                seconds = [f"{self.median(way, field):.3f} s" for field in ("import_torch", "import_own", "model")]
                reattach = "–" if way == "eager" else f"{self.reattach(way):.3f} s"
                first = f"{self.median(way, 'first_output'):.2f} s"
                loaded = ", ".join(name.rpartition(".")[2].strip("_") for name in self.loaded(way))
                rows.append((label, *seconds, reattach, first, self.latency(way), loaded or "none"))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def loaded(self, way: str) -> list[str]:
        return sorted({name for result in self.results[way] for name in result["compilers_loaded"]})

    def latency(self, way: str) -> str:
        values = self.steady.get("rounds", {}).get(way)
        if not values:
            return "–"
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        return f"{middle:.2f} ms ({low:.2f}–{high:.2f})"

    def requirements(self) -> list[tuple[str, bool]]:
        """Each requirement with what was found, as far as its ways were measured."""
        found: list[tuple[str, bool]] = []
        if "aotc" in self.results:
            loaded = self.loaded("aotc")
            found.append((f"aotc imports no compiler: {', '.join(loaded) or 'none'}", not loaded))
            if "mega" in self.results:
                ours, mega = max(self.reattach("aotc"), 0.0), self.reattach("mega")
                text = f"aotc's reattach ≤ 1/200 of the mega-cache's: {ours:.4f} s, {mega:.2f} s"
                found.append((f"{text}, 1/{mega / ours:.0f}" if ours else text, ours <= mega / 200))
            ratio = self.median("aotc", "first_output") / self.median("eager", "first_output")
            found.append((f"aotc's first output ≤ 1.05 × eager's: {ratio:.3f}", ratio <= 1.05))
        found += self.latency_requirements()
        limit = TOLERANCE[self.options.dtype]
        errors = {way: max(result["error"] for result in results) for way, results in self.results.items()}
        for way, error in self.steady.get("errors", {}).items():
            errors[way] = max(error, errors[way])
        worst = max(errors, key=lambda way: errors[way])
        all_close = all(error <= limit for error in errors.values())  # False for NaN
        found.append((f"outputs within {limit:g} of eager's: worst {errors[worst]:.1e}, {worst}", all_close))
        return found

    def latency_requirements(self) -> list[tuple[str, bool]]:
        rounds = self.steady.get("rounds", {})
        if "aotc" not in rounds:
            return []
        found = []
        packed = self.options.dtype == "bfloat16" and self.options.weights == "frozen"
        for other in ("max-autotune", "default"):
            if other in rounds:
                ratio, low, high = self.ratio("aotc", other)
                text = f"`torch.compile` {other}'s: {ratio:.3f} ({low:.3f}–{high:.3f})"
                found.append((f"latency ≤ 1.0 × {text}, within the noise", low <= 1.0))
                if packed:
                    found.append((f"latency ≤ 0.75 × {text}", ratio <= 0.75))
        return found

    def report(self) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "options": {name: value for name, value in vars(self.options).items() if name != "json"},
            "machine": {"cpus": len(os.sched_getaffinity(0)), "processor": platform.machine()},
            "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "aotc")}},
            "build_seconds": self.build_seconds,
            "starts": self.results,
            "reattach": {way: self.reattach(way) for way in self.results},
            "steady": self.steady,
            "requirements": [{"text": text, "holds": holds} for text, holds in self.requirements()],
            "failures": self.failures,
        }


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--weights", choices=("live", "frozen"), default="live", help="of the aotc artifact")
    parser.add_argument("--repeat", type=int, default=5, help="fresh processes of each cheap way: eager and aotc")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the latency measurement")
    parser.add_argument("--seconds-per-round", type=float, default=0.25, help="of one way in one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--skip", default="", metavar="WAYS", help=f"comma-separated, of {', '.join(SKIPPABLE)}")
    options = parser.parse_args()
    options.skip = [way for way in options.skip.split(",") if way]
    if unknown := set(options.skip) - set(SKIPPABLE):
        parser.error(f"--skip: {', '.join(sorted(unknown))} is none of {', '.join(SKIPPABLE)}")
    if "max-autotune" in options.skip and "mega" not in options.skip:
        parser.error("mega needs max-autotune, whose process saves the mega-cache")

    # As pip does for an installed package: without it each process would compile aotc's own Python code anew.
    compileall.compile_dir(Path(__file__).parents[2] / "aotc", quiet=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the running process and removes the folder
    with tempfile.TemporaryDirectory(prefix="aotc-startup-") as work:
        benchmark = Benchmark(options, Path(work))
        benchmark.run()
        report = benchmark.report()
        table = benchmark.table()
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    versions, machine = report["versions"], report["machine"]
    print(
        f"GPT of {options.layers} layers, {options.dtype}, {options.weights} weights, {BATCH} × {SEQ} tokens; "
        f"torch {versions['torch']}, {machine['cpus']} CPUs ({machine['processor']})"
    )
    if benchmark.build_seconds:
        print(f"`aotc build` took {benchmark.build_seconds:.0f} s.")
    print(f"\n{table}\n")
    for way in benchmark.failures:
        print(f"- FAIL: {way}: its process ended with the error that stands above")
    for requirement in report["requirements"]:
        print(f"- {'pass' if requirement['holds'] else 'FAIL'}: {requirement['text']}")


if __name__ == "__main__":
    main()
