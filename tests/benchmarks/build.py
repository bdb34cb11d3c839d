"""How long builds take: one unit against torch.compile, units side by side, and what need not be built again.

    python tests/benchmarks/build.py unit                    # one unit against torch.compile(mode="max-autotune")
    python tests/benchmarks/build.py unit --device cuda --model gpt
    python tests/benchmarks/build.py jobs                    # 8 buckets: --jobs 1, and as many as the machine takes
    python tests/benchmarks/build.py rebuild                 # 16 buckets: built, again, one added, another source
    python tests/benchmarks/build.py ray --nodes 1,2,4       # 8 buckets on Ray nodes of one core, against --jobs 1
    python tests/benchmarks/build.py quality --device cuda --model gpt   # 16 buckets, one at a time and all at once:
                                                             # the time, and the latency of what came out
    python tests/benchmarks/build.py sharing --weights frozen --dtype bfloat16   # 4 buckets, each alone, and sharing
    python tests/benchmarks/build.py large                   # a large model, whole and by regions, against
                                                             # torch.compile: the time of each stage, peak memory

`--grid` takes buckets as a service has them: batch 1, 2, 4, … by seq 64, 128, …, of which many have as many tokens.

A script, not a test: timings fail nothing. Every build has empty caches: Inductor's, Triton's, HOME and the temporary
folder (where Inductor keeps precompiled headers) are its own. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from own_caches import ROOT, environment

# -- models -----------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """A factory with an input whose first dims have these names and sizes."""

    factory: str
    kwargs: dict[str, int]
    dims: dict[str, int]
    tail: tuple[int, ...] = ()
    vocabulary: int = 0
    dtype: str = "float32"
    module: str = "examples.models"
    regions: tuple[str, ...] = ()

    def manifest(self, device: str, options: argparse.Namespace, buckets: Sequence[dict[str, int]]) -> dict[str, Any]:
        shape = {"shape": [*self.dims, *self.tail]}
        ids = {**shape, "dtype": "int64", "init": {"randint": [0, self.vocabulary]}}
        return {
            "factory": f"{self.module}:{self.factory}",
            "kwargs": self.kwargs,
            "dtype": options.dtype or self.dtype,
            "weights": options.weights,
            "mode": options.mode,
            "targets": ["cuda" if device == "cuda" else "native"],
            "inputs": {"input_ids": ids} if self.vocabulary else {"x": shape},
            "buckets": list(buckets),
        }

    def sized(self, number: int) -> dict[str, int]:
        """One of many buckets: the first dim differs."""
        first, *_ = self.dims
        return {**self.dims, first: self.dims[first] + number}

    def grid(self, count: int) -> list[dict[str, int]]:
        """About as many buckets either way: powers of two of the first two dims, whose products repeat."""
        first, second, *_ = self.dims
        across = 2 ** (count.bit_length() // 2)
        return [
            {**self.dims, first: self.dims[first] << number // across, second: self.dims[second] << number % across}
            for number in range(count)
        ]


FLUX = {"double": 2, "single": 4}
BLOCKS = ("double_blocks.*", "single_blocks.*")
GPT_CPU = {"width": 256, "heads": 8, "vocabulary": 1000, "positions": 1024}
GPT_CUDA = {"width": 1024, "heads": 16, "vocabulary": 32000, "positions": 2048}
MODELS: dict[str, dict[str, Model]] = {
    "cpu": {
        "linear": Model("matmul_heavy", {"dim": 64, "layers": 1}, {"rows": 16}, (64,)),
        "tinyblock": Model("tiny_block", {"hidden": 256, "expansion": 4}, {"batch": 1, "seq": 128}, (256,)),
        "gpt-small": Model("gpt", {"layers": 4, **GPT_CPU}, {"batch": 1, "seq": 128}, vocabulary=1000),
        "gpt": Model("gpt", {"layers": 12, **GPT_CPU}, {"batch": 1, "seq": 128}, vocabulary=1000),
        "flux": Model(  # 0.3 billion parameters
            *("flux", {**FLUX, "width": 1536, "heads": 12, "prompt": 32}, {"batch": 1, "pixels": 32}, (64,)),
            module="tests.benchmarks.flux",
            regions=BLOCKS,
        ),
        "flux-57": Model(  # 12 billion parameters, 24 GB: only by regions, with dummy weights
            *("flux", {"double": 19, "single": 38, "prompt": 8}, {"batch": 1, "pixels": 8}, (64,)),
            dtype="bfloat16",
            module="tests.benchmarks.flux",
            regions=BLOCKS,
        ),
    },
    "cuda": {
        "linear": Model("matmul_heavy", {"dim": 1024, "layers": 1}, {"rows": 256}, (1024,), dtype="float16"),
        "tinyblock": Model("tiny_block", {"hidden": 768}, {"batch": 32, "seq": 128}, (768,), dtype="float16"),
        "pointwise": Model("pointwise_heavy", {"dim": 4096}, {"rows": 1024}, (4096,)),
        "matmul": Model("matmul_heavy", {"dim": 4096, "layers": 4}, {"rows": 1024}, (4096,), dtype="bfloat16"),
        "gpt-small": Model(
            "gpt", {"layers": 4, **GPT_CUDA}, {"batch": 1, "seq": 256}, vocabulary=32000, dtype="bfloat16"
        ),
        "gpt": Model("gpt", {"layers": 12, **GPT_CUDA}, {"batch": 1, "seq": 256}, vocabulary=32000, dtype="bfloat16"),
        "flux": Model(  # 1.3 billion parameters
            *("flux", FLUX, {"batch": 1, "pixels": 1024}, (64,)),
            dtype="bfloat16",
            module="tests.benchmarks.flux",
            regions=BLOCKS,
        ),
    },
}


def write_manifest(path: Path, options: argparse.Namespace, buckets: Sequence[dict[str, int]]) -> Path:
    model = MODELS[options.device][options.model].manifest(options.device, options, buckets)
    path.write_text(json.dumps({"version": 1, "models": {"model": model}}))  # JSON is YAML
    return path


# -- processes --------------------------------------------------------------------------------------------------------


@contextmanager
def fresh_home(work: Path) -> Iterator[Path]:
    """A folder for all caches of one process and those that it starts; removed, they may be large."""
    home = Path(tempfile.mkdtemp(dir=work))
    try:
        yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


class PeakMemory(threading.Thread):
    """Samples the resident memory of this process's descendants; memory that they share counts once."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._done = threading.Event()

    def __enter__(self) -> PeakMemory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()

    def run(self) -> None:
        while not self._done.wait(0.25):
            self.peak = max(self.peak, sum(map(self._proportional, self._descendants())))

    @staticmethod
    def _proportional(process: int) -> int:
        with suppress(OSError):  # it has ended
            for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) << 10
        return 0

    @staticmethod
    def _descendants() -> list[int]:
        parents: dict[int, int] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, IndexError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = [os.getpid()]
        for process in found:
            found += [child for child, parent in parents.items() if parent == process]
        return found[1:]


def run(command: Sequence[object], home: Path, folder: Path = ROOT) -> tuple[str, float]:
    """What a Python process prints, and the seconds it took."""
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"{command}: {ran.returncode}\n{ran.stdout[-5000:]}\n{ran.stderr[-5000:]}")
    return ran.stdout, time.monotonic() - began


def build(manifest: Path, store: Path, home: Path, *more: object, folder: Path = ROOT) -> tuple[dict[str, Any], float]:
    """The report of `aotc build`, run in `folder`, and the seconds of the whole command."""
    out, seconds = run(["-m", "aotc", "build", manifest, "--store", store, "--json", *more], home, folder)
    return json.loads(out), seconds


def unit_records(store: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_bytes()) for path in sorted((store / ".aotc" / "units").glob("*.json"))]


# -- one unit against torch.compile -----------------------------------------------------------------------------------


def compare_unit(options: argparse.Namespace, work: Path) -> None:
    """One unit and torch.compile in turn, each from empty caches; then the latency of both results in one process."""
    model = MODELS[options.device][options.model]
    manifest = write_manifest(work / "manifest.yaml", options, [model.dims])
    kept = work / "kept"
    results: dict[str, list[dict[str, Any]]] = {"aotc": [], "torch.compile": []}
    for number in range(options.repeat):
        ways = [("aotc", lambda: _aotc_unit(manifest, work, kept))]
        ways.append(("torch.compile", lambda: _torch_compile(options, work)))
        for name, measure in ways if number % 2 == 0 else reversed(ways):
            result = measure()
            results[name].append(result)
            print(f"{name}: {_figures(result)}", flush=True)
            if stages := result.get("stages"):
                print(f"    stages began after {json.dumps(stages)}", flush=True)
    ours, theirs = (statistics.median(one["seconds"] for one in results[name]) for name in results)
    print(f"\n{options.model} on {options.device}, {options.mode}, {options.weights} weights, empty caches, medians:")
    print(f"aotc unit {ours:.1f} s, torch.compile process {theirs:.1f} s: {ours / theirs:.2f} ×")
    command, first = (
        statistics.median(one[name] for one in results[way])
        for way, name in (("aotc", "command"), ("torch.compile", "compile"))
    )
    print(f"`aotc build`, planning included, {command:.1f} s; torch.compile alone (first call) {first:.1f} s")
    if options.latency:
        latency = _in_child({"way": "latency", **_request(options), "ref": f"{kept}#model"}, work)
        shown = ", ".join(f"{way} {ms:.4f} ms" for way, ms in latency.items())
        print(f"latency, medians, ways in turn within one process: {shown}")
        results["latency"] = [latency]
    _save(options, results)


def _aotc_unit(manifest: Path, work: Path, kept: Path) -> dict[str, Any]:
    with fresh_home(work) as home:
        store = home / "store"
        report, seconds = build(manifest, store, home)
        (record,) = unit_records(store)
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(store, kept)
        return {"seconds": record["seconds"], "command": seconds, "stages": record["stages"], "report": report["units"]}


def _torch_compile(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    return _in_child({"way": "torch.compile", **_request(options)}, work)


def _request(options: argparse.Namespace) -> dict[str, Any]:
    names = ("device", "model", "dtype", "mode", "weights")
    return {name: getattr(options, name) for name in names}


def _in_child(request: dict[str, Any], work: Path) -> dict[str, Any]:
    with fresh_home(work) as home:
        out, seconds = run([__file__, "child", json.dumps(request)], home)
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        return {"seconds": seconds, **result} if request["way"] == "torch.compile" else result


def _figures(result: dict[str, Any]) -> str:
    figures = {name: value for name, value in result.items() if isinstance(value, int | float)}
    return ", ".join(f"{name} {value:.2f} s" for name, value in figures.items())


def child(request: dict[str, Any]) -> None:
    """In the measured process: torch.compile from an empty cache to the first output, or latencies."""
    began = time.monotonic()
    import torch

    imported = time.monotonic() - began
    sys.path.insert(0, str(ROOT))
    if request["way"] == "stores":
        print(json.dumps(_store_latencies(request)))
        return
    began = time.monotonic()
    module, x = _make(request)
    making = time.monotonic() - began
    if request["way"] == "latency":
        print(json.dumps(_latencies(request, module, x)))
        return
    began = time.monotonic()
    with torch.no_grad():
        _compiled(request, module)(x)
        _synchronize(request)
        compiling = time.monotonic() - began
    print(json.dumps({"import": imported, "make": making, "compile": compiling}))


def _make(request: dict[str, Any]) -> tuple[Any, Any]:
    import torch

    model, device = MODELS[request["device"]][request["model"]], request["device"]
    torch.manual_seed(0)
    dtype = getattr(torch, request["dtype"] or model.dtype)
    factory = getattr(importlib.import_module(model.module), model.factory)
    module = factory(**model.kwargs).to(device=device, dtype=dtype).eval()
    return module, _input(request, module, model.dims)


def _input(request: dict[str, Any], module: Any, dims: dict[str, int]) -> Any:
    import torch

    model, parameter = MODELS[request["device"]][request["model"]], next(module.parameters())
    sizes = (*dims.values(), *model.tail)
    x = torch.randint(0, model.vocabulary, sizes) if model.vocabulary else torch.randn(sizes, dtype=parameter.dtype)
    return x.to(parameter.device)


def _timed(request: dict[str, Any], function: Callable[[Any], Any], x: Any) -> float:
    """Milliseconds per call, of calls back to back."""
    for _ in range(5):
        function(x)
    _synchronize(request)
    began = time.perf_counter()
    for _ in range(20):
        function(x)
    _synchronize(request)
    return (time.perf_counter() - began) / 20 * 1000


def _compiled(request: dict[str, Any], module: Any) -> Callable[[Any], Any]:
    import torch
    import torch._inductor.config

    torch._inductor.config.freezing = request["weights"] == "frozen"
    return torch.compile(module, mode=request["mode"], fullgraph=True, dynamic=False)


def _synchronize(request: dict[str, Any]) -> None:
    import torch

    if request["device"] == "cuda":
        torch.cuda.synchronize()


def _latencies(request: dict[str, Any], module: Any, x: Any) -> dict[str, float]:
    """Milliseconds per call: medians over rounds in which the ways take turns. Of a GPU, the device's time too."""
    import torch

    import aotc

    ways = {"eager": module, "aotc": aotc.load(request["ref"], module), "torch.compile": _compiled(request, module)}
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    with torch.no_grad():
        for _ in range(15):
            for way, function in ways.items():
                rounds[way].append(_timed(request, function, x))
    return {way: statistics.median(times) for way, times in rounds.items()}


# -- a large model ----------------------------------------------------------------------------------------------------


def compare_large(options: argparse.Namespace, work: Path) -> None:
    """A model whose weights are large, whole and by regions, and torch.compile: from empty caches."""
    model = MODELS[options.device][options.model]
    results: dict[str, dict[str, Any]] = {}
    for way in options.ways.split(","):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with PeakMemory() as memory:
            theirs = way == "torch.compile"
            result = _torch_compile(options, work) if theirs else _large_build(way, model, options, work)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        results[way] = {**result, "CPU": cpu, "peak": memory.peak}
        print(f"{way}: {_figures({**result, 'CPU': cpu})}, peak {memory.peak / 1e9:.2f} GB", flush=True)
        for unit, stages in result.get("units", {}).items():
            told = (f"{name} {one['seconds']:.1f}" for name, one in stages.items())
            print(f"    {unit}: {', '.join(told)}", flush=True)
    if yardstick := results.get("torch.compile"):
        for way, ours in results.items():
            if "longest unit" in ours:
                ratios = (ours[name] / yardstick["seconds"] for name in ("longest unit", "seconds"))
                unit, command = (f"{ratio:.2f} ×" for ratio in ratios)
                print(f"{way}: the longest unit {unit}, the whole command {command} torch.compile's process")
    _save(options, results)


def _large_build(way: str, model: Model, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One build, `whole` or by `regions`, perhaps with `+dummy` weights: with the stages of each unit."""
    asked = model.manifest(options.device, options, [model.dims])
    form, _, dummy = way.partition("+")
    if form == "regions":
        asked["regions"] = list(model.regions)
    manifest = work / "manifest.yaml"
    manifest.write_text(json.dumps({"version": 1, "models": {"model": asked}}))
    with fresh_home(work) as home:
        traced = options.trace.with_suffix(f".{way}.json") if options.trace else home / "trace.json"
        more = ("--dummy-weights",) if dummy else ()
        _, seconds = build(manifest, home / "store", home, "--trace", traced, *more)
        records = unit_records(home / "store")
    units = {record["artifact"]["variants"][0].get("region") or "model": record["stages"] for record in records}
    return {"seconds": seconds, "longest unit": max(record["seconds"] for record in records), "units": units}


# -- many units -------------------------------------------------------------------------------------------------------


def buckets(options: argparse.Namespace, count: int) -> list[dict[str, int]]:
    model = MODELS[options.device][options.model]
    return model.grid(count) if options.grid else [model.sized(number) for number in range(count)]


def built(report: dict[str, Any]) -> int:
    return sum(unit["status"] == "built" for unit in report["units"])


def shared(report: dict[str, Any]) -> str:
    """What the units of a build shared, in words."""
    taken = ", ".join(f"{count} {name}" for name, count in report["shared"].items())
    return f"shared: {taken or 'nothing'}"


def unit_line(store: Path) -> str:
    """What the units of a store took: medians, and the most memory that one had."""
    records = unit_records(store)
    seconds = statistics.median(record["seconds"] for record in records)
    memory = max(stage.get("memory", 0) for record in records for stage in record["stages"].values())
    stages = ", ".join(
        f"{name} {statistics.median(record['stages'][name]['seconds'] for record in records):.1f}"
        for name in records[0]["stages"]
    )
    took = [record["seconds"] for record in records if record.get("shared", {}).get("picks")]
    others = f"; {len(took)} took picks from others, median {statistics.median(took):.1f} s" if took else ""
    return (
        f"{len(records)} units, median {seconds:.1f} s each ({stages}){others}; "
        f"at most {memory / (1 << 20):.0f} MiB of memory each"
    )


def compare_jobs(options: argparse.Namespace, work: Path) -> None:
    """Units one at a time, and side by side."""
    manifest = write_manifest(work / "manifest.yaml", options, buckets(options, options.units))
    times: dict[str, float] = {}
    for jobs in options.jobs.split(","):
        with fresh_home(work) as home:
            more = () if jobs == "default" else ("--jobs", jobs)
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            _, times[jobs] = build(manifest, home / "store", home, *more)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            busy = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / times[jobs]
            line = f"{unit_line(home / 'store')}; {busy:.2f} cores busy"
            print(f"--jobs {jobs}: {times[jobs]:.1f} s; {line}", flush=True)
    first = next(iter(times))
    for jobs, seconds in times.items():
        print(f"--jobs {jobs}: {seconds / times[first]:.2f} × the time of --jobs {first}")
    _save(options, times)


def compare_rebuild(options: argparse.Namespace, work: Path) -> None:
    """A build, the same again with nothing to compile, one more bucket, and another source with the same graphs."""
    times, sources = {}, work / "sources"
    shutil.copytree(ROOT / "examples", sources / "examples")
    with fresh_home(work) as home:
        for name, count, added in (
            ("from nothing", options.units, ""),
            ("nothing changed", options.units, ""),
            ("one bucket added", options.units + 1, ""),
            ("a function added to the model's file", options.units + 1, "\n\ndef unused() -> int:\n    return 1\n"),
        ):
            with (sources / "examples" / "models.py").open("a") as models:
                models.write(added)
            manifest = write_manifest(work / "manifest.yaml", options, buckets(options, count))
            report, times[name] = build(manifest, home / "store", home, folder=sources)
            print(
                f"{count} buckets, {name}: {times[name]:.1f} s, {built(report)} compiled, {shared(report)}", flush=True
            )
    _save(options, times)


def compare_ray(options: argparse.Namespace, work: Path) -> None:
    """Units on Ray nodes of one core each, all on this machine, and what the build takes beside the units."""
    from ray.cluster_utils import Cluster

    shipped = work / "shipped"  # one folder with all that a node needs
    shutil.copytree(ROOT / "examples", shipped / "examples")
    manifest = write_manifest(shipped / "manifest.yaml", options, buckets(options, options.units))
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"})
    times: dict[str, float] = {}
    with fresh_home(work) as home:
        _, times["--jobs 1"] = build(manifest, home / "store", home, "--jobs", 1, folder=shipped)
        print(f"--jobs 1: {times['--jobs 1']:.1f} s; {unit_line(home / 'store')}", flush=True)
    for count in map(int, options.nodes.split(",")):
        with fresh_home(work) as home:
            small = {"object_store_memory": 80 << 20, "env_vars": environment(home)}
            cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
            try:
                for _ in range(count):
                    cluster.add_node(num_cpus=1, **small)
                more = ("--executor", "ray", "--address", cluster.address)
                name = f"{count} nodes"
                _, times[name] = build(manifest, home / "store", home, *more, folder=shipped)
                units = unit_records(home / "store")
            finally:
                cluster.shutdown()
            waves = -(-options.units // count)
            inside = sum(record["seconds"] for record in units) / options.units * waves
            over = times[name] - inside
            print(f"Ray, {name}: {times[name]:.1f} s; {over:.1f} s beside the units; {unit_line(home / 'store')}")
    _save(options, times)


def compare_quality(options: argparse.Namespace, work: Path) -> None:
    """Units one at a time and all at once: the time, and the latency of each result of both builds."""
    names = {jobs: () if jobs == "default" else ("--jobs", jobs) for jobs in options.jobs.split(",")}
    _compare_builds(options, work, {f"--jobs {jobs}": more for jobs, more in names.items()})


def compare_sharing(options: argparse.Namespace, work: Path) -> None:
    """Units that measure and compile everything themselves, and units that share: the time, and their latencies."""
    _compare_builds(options, work, {"--no-share": ("--no-share",), "--share": ("--share",)})


def _compare_builds(options: argparse.Namespace, work: Path, ways: Mapping[str, Sequence[object]]) -> None:
    """The same buckets built in several ways, the first of which the others are compared with.

    The first way may take too long for all of them: then it builds some, and is compared by the time for each unit.
    """
    sizes = buckets(options, options.units)
    some = sizes[: options.first or options.units]
    results: dict[str, Any] = {}
    stores: dict[str, Path] = {}
    for way, more in ways.items():
        built_now = sizes if stores else some
        manifest = write_manifest(work / "manifest.yaml", options, built_now)
        with fresh_home(work) as home:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            report, seconds = build(manifest, home / "store", home, *more)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            line = f"{unit_line(home / 'store')}; {cpu:.0f} s of CPU; {shared(report)}"
            print(f"{way}: {seconds:.1f} s; {line}", flush=True)
            stores[way] = work / f"store{way.replace(' ', '')}"
            shutil.copytree(home / "store", stores[way])
            results[way] = {"seconds": seconds, "units": len(built_now), "cpu": cpu, "shared": report["shared"]}
    if not options.latency:
        _save(options, results)
        return
    request = {
        "way": "stores",
        **_request(options),
        "refs": {way: f"{store}#model" for way, store in stores.items()},
        "sizes": some,
    }
    latency = _in_child(request, work)
    first, *others = stores
    for way in stores:
        results[way]["latency"] = latency[way]
    for way in others:
        ratios = [ours / theirs for ours, theirs in zip(latency[way], latency[first], strict=True)]
        each = {name: results[name]["seconds"] / results[name]["units"] for name in (way, first)}
        print(
            f"{way} took {each[way] / each[first]:.2f} × the time of {first} for each unit; "
            f"latency of {len(some)} buckets: {statistics.median(ratios):.3f} × in the median, {min(ratios):.3f} to "
            f"{max(ratios):.3f} ×"
        )
    _save(options, results)


def _store_latencies(request: dict[str, Any]) -> dict[str, list[float]]:
    """Milliseconds of each bucket of each store, medians of rounds in which the stores take turns."""
    import torch

    import aotc

    module, _ = _make(request)
    loaded = {name: aotc.load(ref, module) for name, ref in request["refs"].items()}
    found: dict[str, list[float]] = {name: [] for name in loaded}
    with torch.no_grad():
        for sizes in request["sizes"]:
            x = _input(request, module, sizes)
            rounds: dict[str, list[float]] = {name: [] for name in loaded}
            for _ in range(15):
                for name, function in loaded.items():
                    rounds[name].append(_timed(request, function, x))
            for name, times in rounds.items():
                found[name].append(statistics.median(times))
    return found


# -- the command line -------------------------------------------------------------------------------------------------


def _save(options: argparse.Namespace, results: Any) -> None:
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        child(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="WHAT")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    common.add_argument("--dtype", help="instead of the model's own")
    common.add_argument("--weights", choices=("live", "frozen"), default="live")
    common.add_argument("--mode", default="max-autotune")
    common.add_argument("--json", type=Path, help="write all figures to this file")
    common.add_argument("--work", type=Path, help="a folder for everything, which stays")

    def command(name: str, function: Callable[[argparse.Namespace, Path], None], model: str) -> Any:
        sub = commands.add_parser(name, parents=[common], help=(function.__doc__ or "").splitlines()[0])
        models = sorted({*MODELS["cpu"], *MODELS["cuda"]})
        sub.add_argument("--model", choices=models, default=model, help=f"default: {model}")
        sub.set_defaults(function=function)
        return sub

    unit = command("unit", compare_unit, "gpt-small")
    unit.add_argument("--repeat", type=int, default=1)
    unit.add_argument("--no-latency", dest="latency", action="store_false")
    large = command("large", compare_large, "flux")
    ways = "torch.compile,whole,whole+dummy,regions,regions+dummy"
    large.add_argument("--ways", default=ways, help=f"default: {ways}; dummy: with --dummy-weights")
    large.add_argument("--trace", type=Path, help="write the builds' traces to files of this name")
    large.set_defaults(mode="default")
    for name, function, count, model in (
        ("jobs", compare_jobs, 8, "linear"),
        ("rebuild", compare_rebuild, 16, "linear"),
        ("ray", compare_ray, 8, "linear"),
        ("quality", compare_quality, 16, "linear"),
        ("sharing", compare_sharing, 4, "gpt-small"),
    ):
        many = command(name, function, model)
        many.add_argument("--units", type=int, default=count, help=f"default: {count}")
        many.add_argument("--grid", action="store_true", default=name == "sharing")
        if name in ("quality", "sharing"):
            many.add_argument("--no-latency", dest="latency", action="store_false")
            many.add_argument("--first", type=int, help="buckets that the slowest way builds  [default: all]")
        if name in ("jobs", "quality"):
            many.add_argument("--jobs", default="1,default", help="default: 1,default")
        if name == "ray":
            many.add_argument("--nodes", default="1,2,4", help="default: 1,2,4")
    options = parser.parse_args()
    if options.model not in MODELS[options.device]:
        parser.error(f"{options.model} is not a model for {options.device}: {', '.join(MODELS[options.device])}")
    if getattr(options, "grid", False) and len(MODELS[options.device][options.model].dims) < 2:
        parser.error(f"{options.model} has one dim, and a grid needs two")
    if options.work:
        options.work.mkdir(parents=True, exist_ok=True)
        options.function(options, options.work)
        return
    with tempfile.TemporaryDirectory(prefix="aotc-benchmark-") as work:
        options.function(options, Path(work))


if __name__ == "__main__":
    main()
