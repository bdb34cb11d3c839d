"""aotc on a GPU beside eager, torch.compile(mode="max-autotune") and its mega-cache. A script: timings fail nothing.

    python tests/benchmarks/cuda.py --model gpt-bf16                    # one model of manifests/cuda.yaml (repeatable)
    python tests/benchmarks/cuda.py --jobs 4 --json figures.json        # all of them
    python tests/benchmarks/cuda.py --many-buckets 64 --replicate       # 64 buckets of one model
    python tests/benchmarks/cuda.py --storage                           # kernels beside the library, or embedded in it
    python tests/benchmarks/cuda.py --work DIR --resume …               # go on where an earlier command stopped

Each way starts in fresh processes with empty caches: Inductor's, Triton's, CUDA's, the home and the temporary folder
are its own. All ways use `torch.set_float32_matmul_precision` as the manifest says.

- reattach: from the module on the GPU to the first output (load, weights, capture, first call; or compile), less
  eager's first call in a process of its own. Eager's first call loads CUDA's libraries and kernels, so this can be
  negative for aotc, which needs fewer of them; "after eager" is the same in a process where eager has run, with
  nothing taken off.
- first output: from the start of the process, by its parent's clock, to the first output. Most of it is `import torch`,
  which is the same in eager and aotc and differs from process to process by more than all the rest: where the two are
  compared, the median over the processes of both is counted for each.
- latency: one more process holds every way and times them in turn by CUDA events; medians over rounds. aotc's outputs
  are the caller's to keep, but for "aotc view"; torch.compile's are overwritten by its next call, but for
  "torch.compile kept", which is the same with the output cloned.
- host: microseconds until a call returns, with nothing queued before it.

With `--jobs`, builds and cold compiles of different models run side by side: their seconds then mean little, and
autotuning on a shared GPU may choose worse kernels, for torch.compile and aotc alike.
"""

from __future__ import annotations

import argparse
import compileall
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from own_caches import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import yaml  # noqa: E402

TIMEOUT = 900
"""Seconds that any process may take."""
LATENCY_LIMITS = {"pointwise": 0.6, "tinyblock": 0.85}
"""Of `torch.compile`'s, by the first word of the model's name; 1.0 for all others."""
TOLERANCE = {"float32": 1e-2, "float16": 2e-2, "bfloat16": 5e-2}
"""How far an output may be from eager's, as a share of eager's largest; in float32 that is TF32's."""
REAL_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
WAYS = {"eager": "eager", "cold": "`torch.compile` cold", "mega": "mega-cache, fresh host", "aotc": "aotc"}
CHEAP_WAYS = ("eager", "aotc")
STEADY = ("eager", "torch.compile", "torch.compile kept", "aotc direct", "aotc graph", "aotc view", "aotc")

Row = Sequence[str]


class Failed(Exception):
    """A process of the benchmark ended with an error; the text is the end of what it wrote."""


def spawn(command: Sequence[str], variables: Mapping[str, str], *, may_fail: bool = False) -> str:
    """Run Python to its end; what it printed. Raises Failed; with `may_fail` only where nothing was printed."""
    variables = {**variables, "BENCHMARK_SPAWNED": repr(time.time())}
    try:
        done = subprocess.run(
            [sys.executable, "-P", *command],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Failed(f"took more than {TIMEOUT} s") from error
    if done.returncode and not (may_fail and done.stdout.strip()):
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise Failed("\n".join(lines[-25:]) or f"ended with status {done.returncode}")
    return done.stdout


def read_models(path: Path) -> dict[str, dict[str, Any]]:
    """The manifest's models as the measured processes need them: dtype, precision and the sizes of the one bucket."""
    document = yaml.safe_load(path.read_text())
    models = {}
    for name, own in document["models"].items():
        model = {**document.get("defaults", {}), **own}
        (bucket,) = model["buckets"]
        precision = model.get("float32_matmul_precision", "highest")
        models[name] = {
            "factory": model["factory"],
            "kwargs": model.get("kwargs", {}),
            "dtype": model.get("dtype", "float32"),
            "inputs": model["inputs"],
            "dims": bucket,
            "precision": precision,
        }
    return models


class Benchmark:
    """The processes of one run, over a folder for their files; finished results are kept in `results/`."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options = options
        self.work = work
        self.store = (options.store or work / "store").resolve()
        self.models = read_models(options.manifest)
        self.began = time.time()
        self.failures: dict[str, str] = {}
        self.results: dict[str, dict[str, Any]] = {}
        (work / "results").mkdir(parents=True, exist_ok=True)

    # -- running ------------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        print(f"[{time.time() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def attempt(self, name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of an action, or the kept one with --resume. A failure is reported, and the rest goes on."""
        kept = self.work / "results" / f"{name}.json"
        if self.options.resume and kept.exists():
            self.results[name] = json.loads(kept.read_text())
            return self.results[name]
        began = time.time()
        try:
            found = action()
        except Failed as error:
            self.failures[name] = str(error)
            self.say(f"{name} FAILED:\n{error}")
            return None
        self.say(f"{name}: {time.time() - began:.1f} s")
        kept.write_text(json.dumps(found))
        self.results[name] = found
        return found

    def perform(self, task: dict[str, Any], caches: Path | None = None) -> dict[str, Any]:
        """Do a task in a fresh process, with empty caches unless `caches` names a folder, which then is kept."""
        with tempfile.TemporaryDirectory(dir=self.work, prefix="fresh-", ignore_cleanup_errors=True) as fresh:
            result = Path(fresh) / "result.json"
            command = [str(HERE / "cuda_processes.py"), json.dumps({**task, "result": str(result)})]
            spawn(command, environment(caches or Path(fresh)))
            found: dict[str, Any] = json.loads(result.read_text())
            return found

    def side_by_side(self, actions: Sequence[Callable[[], Any]]) -> None:
        with ThreadPoolExecutor(max_workers=self.options.jobs or 1) as pool:
            for future in [pool.submit(action) for action in actions]:
                future.result()

    def find(self, name: str) -> dict[str, Any]:
        return self.results.get(name, {})

    # -- the models ---------------------------------------------------------------------------------------------------

    def run_models(self, names: Sequence[str]) -> None:
        self.attempt(f"build-{'+'.join(names)}", lambda: self.build(names))
        if self.options.verify:
            self.attempt("verify", lambda: self.verify(names))
        if "cold" not in self.options.skip:
            self.side_by_side([lambda name=name: self.start(name, "cold") for name in names])
        for name in names:
            if {"cold", "mega"}.isdisjoint(self.options.skip) and self.find(f"{name}-cold"):
                self.start(name, "mega")
            if "starts" not in self.options.skip:
                self.start_often(name)
            self.attempt(f"{name}-latency", lambda name=name: self.latency(name))

    def build(self, names: Sequence[str]) -> dict[str, Any]:
        """`aotc build`, for what the store does not hold yet."""
        began = time.time()
        chosen = [part for name in names for part in ("--model", name)]
        command = ["-m", "aotc", "build", str(self.options.manifest), *chosen, "--store", str(self.store), "--json"]
        printed = spawn([*command, "--jobs", str(self.options.jobs or 1)], environment(self.work / "build"))
        units = {unit["model"]: [unit["status"], unit["seconds"]] for unit in json.loads(printed)["units"]}
        return {"seconds": time.time() - began, "units": units}

    def verify(self, names: Sequence[str]) -> dict[str, Any]:
        """`aotc verify`: the statuses and the worst error of each model, as a share of what is allowed."""
        chosen = [part for name in names for part in ("--model", name)]
        command = ["-m", "aotc", "verify", str(self.options.manifest), *chosen, "--store", str(self.store), "--json"]
        reports = json.loads(spawn(command, environment(self.work / "verify"), may_fail=True))
        found: dict[str, Any] = {}
        for report in reports:
            model = found.setdefault(report["model"], {"statuses": [], "worst": 0.0})
            model["statuses"].append(report["status"])
            if report["allowed"]:
                model["worst"] = max(model["worst"], report["error"] / report["allowed"])
        return found

    def task(self, name: str, **more: Any) -> dict[str, Any]:
        mega = self.work / f"{name}.mega"
        return {"model": self.models[name], "ref": f"{self.store}#{name}", "mega": str(mega), **more}

    def start(self, name: str, way: str) -> None:
        """The two compiling ways, once each. The cold one's caches are kept for the latency process."""
        caches = self.work / "kept" / name if way == "cold" else None
        task = self.task(name, action="start", way=way)

        def once() -> dict[str, Any]:
            if caches:
                shutil.rmtree(caches, ignore_errors=True)  # an earlier command's
            return {"runs": [self.perform(task, caches)]}

        self.attempt(f"{name}-{way}", once)

    def start_often(self, name: str) -> None:
        """The cheap ways, in turn, so that what drifts on the machine touches them all alike."""
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in CHEAP_WAYS}

        def once(way: str) -> dict[str, Any]:
            return self.perform(self.task(name, action="start", way=way))

        def all_runs() -> dict[str, Any]:
            once("aotc")  # brings files into the page cache; not counted
            for number in range(self.options.repeat):
                for way in CHEAP_WAYS[:: 1 if number % 2 == 0 else -1]:
                    runs[way].append(once(way))
            return runs

        if found := self.attempt(f"{name}-starts", all_runs):
            del self.results[f"{name}-starts"]
            for way in CHEAP_WAYS:
                self.results[f"{name}-{way}"] = {"runs": found[way]}

    def latency(self, name: str) -> dict[str, Any]:
        with_torch = bool(self.find(f"{name}-cold")) and (self.work / "kept" / name).exists()
        quick = self.options.quick
        more = {"rounds": 7 if quick else self.options.rounds, "samples": 100 if quick else 200, "torch": with_torch}
        task = self.task(name, action="latency", **more)
        return self.perform(task, self.work / "kept" / name)

    # -- figures ------------------------------------------------------------------------------------------------------

    def median(self, name: str, way: str, figure: Callable[[dict[str, Any]], float]) -> float | None:
        runs = self.find(f"{name}-{way}").get("runs")
        return statistics.median(figure(run) for run in runs) if runs else None

    def first_call(self, name: str, way: str) -> float | None:
        """Seconds from the module on the GPU to the first output."""
        return self.median(name, way, lambda run: run["marks"]["first output"] - run["marks"]["module"])

    def reattach(self, name: str, way: str) -> float | None:
        whole, eager = self.first_call(name, way), self.first_call(name, "eager")
        return None if whole is None or eager is None else whole - eager

    def first_output(self, name: str, way: str) -> float | None:
        return self.median(name, way, lambda run: run["marks"]["first output"])

    def first_output_alike(self, name: str, way: str) -> float | None:
        """Seconds, with the same for `import torch` in every way."""
        runs = [run for each in CHEAP_WAYS for run in self.find(f"{name}-{each}").get("runs", ())]
        own = self.median(name, way, lambda run: run["marks"]["first output"] - run["marks"]["import torch"])
        return None if own is None else statistics.median(run["marks"]["import torch"] for run in runs) + own

    def after_eager(self, name: str) -> float | None:
        return self.median(name, "eager", lambda run: run["after eager"]["reattach"])

    def steady(self, name: str, figure: str) -> dict[str, float]:
        """The median of each way: `ms` or `host us`."""
        return {way: statistics.median(each) for way, each in self.find(f"{name}-latency").get(figure, {}).items()}

    def start_table(self, names: Sequence[str]) -> list[Row]:
        rows: list[Row] = [
            (
                "model",
                "start",
                "import torch",
                "own imports",
                "context",
                "module",
                "reattach",
                "first output",
                "import torch alike",
                "compilers",
            )
        ]
        for name in names:
            for way, label in WAYS.items():
                runs = self.find(f"{name}-{way}").get("runs")
                if not runs:
                    continue
                steps = []
                for before, after in (
                    ("python", "import torch"),
                    ("import torch", "own imports"),
                    ("own imports", "context"),
                    ("context", "module"),
                ):
                    value = self.median(name, way, lambda run, a=after, b=before: run["marks"][a] - run["marks"][b])
                    steps.append(seconds(value))
                compilers = sorted({found for run in runs for found in run["compilers"]})
                shown = "–" if way == "eager" else milliseconds(self.reattach(name, way))
                alike = self.first_output_alike(name, way) if way in CHEAP_WAYS else None
                last = (seconds(self.first_output(name, way)), seconds(alike), ", ".join(compilers) or "none")
                rows.append((name, label, *steps, shown, *last))
        return rows

    def reattach_table(self, names: Sequence[str]) -> list[Row]:
        """How aotc's reattach comes about."""
        rows: list[Row] = [
            ("model", "eager's first call", "aotc: load", "aotc: first call", "after eager: load", "first call")
        ]
        for name in names:
            parts = (
                self.first_call(name, "eager"),
                self.median(name, "aotc", lambda run: run["marks"]["attached"] - run["marks"]["module"]),
                self.median(name, "aotc", lambda run: run["marks"]["first output"] - run["marks"]["attached"]),
                self.median(name, "eager", lambda run: run["after eager"]["load"]),
                self.median(name, "eager", lambda run: run["after eager"]["first call"]),
            )
            rows.append((name, *map(milliseconds, parts)))
        return rows

    def latency_table(self, names: Sequence[str]) -> list[Row]:
        header = [f"{way} {unit}" for unit in ("ms", "host µs") for way in STEADY]
        rows: list[Row] = [("model", *header, "picked", "worst error")]
        for name in names:
            ms, host, found = self.steady(name, "ms"), self.steady(name, "host us"), self.find(f"{name}-latency")
            if not ms:
                continue
            shown = [f"{ms[way]:.4f}" if way in ms else "–" for way in STEADY]
            shown += [f"{host[way]:.1f}" if way in host else "–" for way in STEADY]
            worst = max(found["errors"].values(), key=lambda error: math.inf if math.isnan(error) else error)
            rows.append((name, *shown, "graph" if found["graph picked"] else "direct", f"{worst:.1e}"))
        return rows

    # -- requirements -------------------------------------------------------------------------------------------------

    def requirements(self, names: Sequence[str]) -> list[tuple[str, str, bool]]:
        verified = [
            (
                name,
                f"`aotc verify`: {', '.join(sorted(set(each['statuses'])))}, {each['worst']:.2f} of the error allowed",
                set(each["statuses"]) == {"ok"},
            )
            for name, each in self.find("verify").items()
        ]
        return verified + [
            row for name in names for row in (*self.start_requirements(name), *self.steady_requirements(name))
        ]

    def start_requirements(self, name: str) -> list[tuple[str, str, bool]]:
        found = []
        mega, eager = self.reattach(name, "mega"), self.first_output_alike(name, "eager")
        after = self.after_eager(name)
        if after is not None:
            found.append((name, f"reattach after eager ≤ 10 ms: {after * 1e3:.2f} ms", after <= 0.010))
            if mega is not None:
                found.append(
                    (name, f"… ≤ 1/1000 of the mega-cache's {mega:.2f} s: 1/{mega / after:.0f}", after <= mega / 1e3)
                )
        value, first = self.reattach(name, "aotc"), self.first_output_alike(name, "aotc")
        if value is None or first is None or eager is None:
            return found
        found.append((name, f"reattach ≤ 10 ms: {value * 1e3:.2f} ms", value <= 0.010))
        if mega is not None:
            share = f"1/{mega / value:.0f}" if value > 0 else "none of it"
            found.append((name, f"… ≤ 1/1000 of the mega-cache's {mega:.2f} s: {share}", value <= mega / 1e3))
        apart = (self.first_output(name, "aotc") or math.nan) / (self.first_output(name, "eager") or math.nan)
        text = f"first output ≤ 1.02 × eager's: {first / eager:.3f} ({apart:.3f} with each its `import torch`)"
        found.append((name, text, first <= 1.02 * eager))
        compilers = {each for run in self.find(f"{name}-aotc")["runs"] for each in run["compilers"]}
        found.append((name, f"no compiler imported: {', '.join(sorted(compilers)) or 'none'}", not compilers))
        return found

    def steady_requirements(self, name: str) -> list[tuple[str, str, bool]]:
        found = []
        ms, host, kind = self.steady(name, "ms"), self.steady(name, "host us"), name.partition("-")[0]
        if "torch.compile" in ms:
            limit, ratio = LATENCY_LIMITS.get(kind, 1.0), ms["aotc"] / ms["torch.compile"]
            found.append((name, f"latency ≤ {limit} × `torch.compile`'s: {ratio:.3f}", ratio <= limit))
            text = f"host time ≤ `torch.compile`'s {host['torch.compile']:.1f} µs: {host['aotc']:.1f} µs"
            found.append((name, text, host["aotc"] <= host["torch.compile"]))
            views, kept = ms["aotc view"] / ms["torch.compile"], ms["aotc"] / ms["torch.compile kept"]
            text = f"like for like (no limit): views of a graph {views:.3f}, outputs kept {kept:.3f}"
            found.append((name, text, True))
        if ms:
            errors, limit = self.find(f"{name}-latency")["errors"], TOLERANCE[self.models[name]["dtype"]]
            close = {way: error <= limit for way, error in errors.items()}  # False for NaN
            worst = ", ".join(f"{way} {errors[way]:.1e}" for way in close if not close[way]) or "all are"
            found.append((name, f"outputs within {limit:g} of eager's: {worst}", all(close.values())))
            speed_up = ms["eager"] / ms["aotc"]
            if kind == "pointwise":
                found.append((name, f"speed-up over eager ≥ 8: {speed_up:.2f}", speed_up >= 8))
            else:
                found.append((name, f"speed-up over eager (no limit): {speed_up:.2f}", True))
        return found

    # -- many buckets and storage -------------------------------------------------------------------------------------

    SMALL: Mapping[str, Any] = {
        "factory": "examples.models:tiny_block",
        "kwargs": {"hidden": 768, "expansion": 4},
        "dtype": "float16",
        "inputs": {"x": {"shape": ["batch", "seq", 768]}},
    }

    def small_store(self, embedded: bool) -> str:
        """Eight buckets of TinyBlock, kernels beside the library or embedded in it; the reference of the result."""
        name, store = "embedded" if embedded else "beside", self.work / "small-store"
        model = {
            **self.SMALL,
            "mode": "default",
            "targets": ["cuda"],
            "cuda_graphs": "always",
            "options": {"aot_inductor.embed_kernel_binary": embedded},
            "buckets": [{"batch": size, "seq": 128} for size in REAL_SIZES],
        }
        manifest = self.work / f"{name}.yaml"
        manifest.write_text(json.dumps({"version": 1, "models": {name: model}}))  # JSON is YAML
        task = {"action": "build", "manifest": str(manifest), "store": str(store), "jobs": self.options.jobs or 4}
        self.attempt(f"{name}-build", lambda: self.perform(task, self.work / "build"))
        return f"{store}#{name}"

    def buckets(self, ref: str, count: int, copies: int = 1, graphs: str = "always", **more: Any) -> dict[str, Any]:
        """Open buckets in a fresh process."""
        model = {**self.SMALL, "precision": "highest"}
        task = {"action": "buckets", "model": model, "ref": ref, "count": count, "copies": copies, "graphs": graphs}
        return self.perform({**task, **more})

    def many_buckets(self) -> tuple[list[Row], list[tuple[str, str, bool]]]:
        """Eight real buckets, and with --replicate each of them several times over, up to the number asked for."""
        ref, wanted = self.small_store(embedded=False), self.options.many_buckets
        copies = max(1, wanted // len(REAL_SIZES)) if self.options.replicate else 1
        cases = {"one": (1, 1), "real": (len(REAL_SIZES), 1)}
        if copies > 1:
            cases["replicated"] = (len(REAL_SIZES), copies)

        def repeated(count: int, copies: int) -> dict[str, Any]:
            self.buckets(ref, count)  # brings files into the page cache; not counted
            return {"runs": [self.buckets(ref, count, copies) for _ in range(self.options.repeat)]}

        found = {
            label: result["runs"]
            for label, (count, each) in cases.items()
            if (result := self.attempt(f"buckets-{label}-{count * each}", lambda c=count, e=each: repeated(c, e)))
        }
        rows: list[Row] = [("buckets", "load and capture", "each", "first calls", "torch's memory", "device memory")]
        medians = {label: column_medians(runs) for label, runs in found.items()}
        for values in medians.values():
            number = int(values["buckets"])
            figures = (values["load"], values["load"] / number, values["first calls"])
            rows.append((str(number), *map(milliseconds, figures), mib(values["reserved"]), mib(values["device"])))
        return rows, bucket_requirements(medians, wanted)

    def storage(self) -> list[Row]:
        """The same eight buckets stored in both ways: compressed sizes and load times."""
        rows: list[Row] = [
            ("kernels", "1 bucket, compressed", "8 buckets", "8, not deduplicated", "load 8", "+ first calls")
        ]
        for embedded in (False, True):
            ref = self.small_store(embedded)
            name = ref.partition("#")[2]

            def measure(ref: str = ref, embedded: bool = embedded) -> dict[str, Any]:
                more = {"graphs": "never", "library only": embedded}
                self.buckets(ref, len(REAL_SIZES), **more)
                runs = [self.buckets(ref, len(REAL_SIZES), **more) for _ in range(self.options.repeat)]
                return {"runs": runs, "sizes": blob_sizes(ref, library_only=embedded)}

            if found := self.attempt(f"storage-{name}", measure):
                values, sizes = column_medians(found["runs"]), found["sizes"]
                times = (values["load"], values["load"] + values["first calls"])
                rows.append((name, *(kib(sizes[each]) for each in ("one", "all", "summed")), *map(milliseconds, times)))
        return rows


def bucket_requirements(medians: Mapping[str, Mapping[str, float]], wanted: int) -> list[tuple[str, str, bool]]:
    if not medians:
        return []
    most = medians[list(medians)[-1]]
    number, load = int(most["buckets"]), most["load"]
    if number >= wanted:
        real = int(medians["real"]["buckets"]) if "real" in medians else 0
        how = (
            f"measured: {real} real buckets, each opened and captured {number // real if real else 1} times from copies"
        )
    else:
        load, how = load / number * wanted, f"extrapolated from {number} real buckets: use --replicate to measure"
    found = [("buckets", f"load and capture {wanted} ≤ 1 s: {load:.3f} s ({how})", load <= 1.0)]
    if one := medians.get("one"):
        more = most["reserved"] - one["reserved"], most["device"] - one["device"]
        text = f"memory of {number} over one bucket's (reported): torch {mib(more[0])}, device {mib(more[1])}"
        found.append(("buckets", text, True))
    return found


def blob_sizes(ref: str, library_only: bool) -> dict[str, int]:
    """Compressed bytes: of the first bucket, of all by digest, and of all summed as if nothing were shared."""
    from aotc.store import Store, parse_reference, read_artifact, read_bundle

    reference = parse_reference(ref)
    store = Store.open(Path(str(reference.store)))
    (entry,) = read_bundle(store, reference).artifacts
    variants = read_artifact(store, entry.digest).variants
    files = [
        {file.blob: file.blob_size for file in one.files if not (library_only and file.name.endswith(".cubin"))}
        for one in variants
    ]
    merged = {blob: size for each in files for blob, size in each.items()}
    summed = sum(sum(each.values()) for each in files)
    return {"one": sum(files[0].values()), "all": sum(merged.values()), "summed": summed}


# -- printing ---------------------------------------------------------------------------------------------------------


def column_medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} s"


def milliseconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.2f} ms"


def mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def kib(count: float) -> str:
    return f"{count / 2**10:.0f} KiB"


def print_table(title: str, rows: Sequence[Row]) -> None:
    if len(rows) < 2:
        return
    print(f"\n{title}\n")
    for index, row in enumerate(rows):
        print(f"| {' | '.join(row)} |")
        if index == 0:
            print(f"|{' --- |' * len(row)}")


def print_requirements(found: Sequence[tuple[str, str, bool]]) -> None:
    print_table("Required", [("model", "figure", ""), *((n, text, "pass" if ok else "FAIL") for n, text, ok in found)])


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manifest", type=Path, default=ROOT / "manifests" / "cuda.yaml")
    parser.add_argument("--model", action="append", default=[], help="a model of the manifest, or `all`; repeatable")
    parser.add_argument("--store", type=Path, metavar="DIR", help="where the models' artifacts are, or are built to")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep caches, stores and results there")
    parser.add_argument("--resume", action="store_true", help="do not measure again what --work holds")
    parser.add_argument("--jobs", type=int, metavar="N", help="builds and cold compiles side by side")
    parser.add_argument("--repeat", type=int, default=3, help="fresh processes of each cheap way")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the latency measurement")
    parser.add_argument("--quick", action="store_true", help="one process of each cheap way, fewer rounds")
    parser.add_argument("--skip", default="", metavar="WAYS", help="comma-separated, of cold, mega, starts")
    parser.add_argument("--many-buckets", type=int, metavar="N", help="load and capture N buckets of one model")
    parser.add_argument("--replicate", action="store_true", help="reach N with copies of the 8 that are built")
    parser.add_argument("--storage", action="store_true", help="kernels beside the library against embedded ones")
    parser.add_argument("--verify", action="store_true", help="run `aotc verify` on the models, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    options = parser.parse_args(arguments)
    options.manifest = options.manifest.resolve()
    options.skip = {way for way in options.skip.split(",") if way}
    if unknown := options.skip - {"cold", "mega", "starts"}:
        parser.error(f"--skip: {', '.join(sorted(unknown))} is none of cold, mega, starts")
    if options.resume and not options.work:
        parser.error("--resume needs --work")
    if options.quick:
        options.repeat = 1
    known = list(read_models(options.manifest))
    if unknown := set(options.model) - {*known, "all"}:
        parser.error(f"--model: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    extras = options.many_buckets or options.storage
    if "all" in options.model or not (options.model or extras):
        options.model = known
    return options


def run(options: argparse.Namespace, work: Path) -> None:
    benchmark = Benchmark(options, work.resolve())
    found: list[tuple[str, str, bool]] = []
    tables: dict[str, list[Row]] = {}
    if options.model:
        benchmark.run_models(options.model)
        names = options.model
        tables["Start, from fresh processes (medians)"] = benchmark.start_table(names)
        tables["aotc's reattach in parts"] = benchmark.reattach_table(names)
        tables["Steady state (medians)"] = benchmark.latency_table(names)
        found += benchmark.requirements(names)
    if options.many_buckets:
        rows, more = benchmark.many_buckets()
        tables["Many buckets of TinyBlock, float16, mode default"] = rows
        found += more
    if options.storage:
        tables["Storage of kernels: TinyBlock, float16, 8 buckets, direct launch"] = benchmark.storage()
    report = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "results": benchmark.results,
        "failures": benchmark.failures,
        "requirements": [{"model": name, "text": text, "holds": holds} for name, text, holds in found],
        "seconds": time.time() - benchmark.began,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    device = next((each for name, each in benchmark.results.items() if name.endswith("-latency")), {})
    print(f"\n{device.get('gpu', 'GPU')}, torch {device.get('torch', '?')}, {report['seconds']:.0f} s in all")
    for name, each in benchmark.results.items():
        if name.startswith("build-"):
            print("`aotc build`: " + ", ".join(f"{model} {s} {t:.0f} s" for model, (s, t) in each["units"].items()))
    for title, rows in tables.items():
        print_table(title, rows)
    print_requirements(found)
    for name, text in benchmark.failures.items():
        print(f"\nFAILED {name}: {text.splitlines()[-1]}")


def main() -> None:
    options = parse_options(sys.argv[1:])
    # As pip does for an installed package: without it each process would compile aotc's own Python code anew.
    compileall.compile_dir(Path(__file__).parents[2] / "aotc", quiet=1)
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        run(options, options.work)
        return
    with tempfile.TemporaryDirectory(prefix="aotc-cuda-", ignore_cleanup_errors=True) as work:
        run(options, Path(work))


if __name__ == "__main__":
    main()
