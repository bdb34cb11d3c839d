"""aotc on a GPU: the models of manifests/cuda.yaml by `aotc bench`, with limits; many buckets; how kernels are stored.

    python tests/benchmarks/cuda.py --model gpt-bf16                    # one model of manifests/cuda.yaml (repeatable)
    python tests/benchmarks/cuda.py --jobs 4 --json figures.json        # all of them
    python tests/benchmarks/cuda.py --model gpt-bf16 -- --starts 9      # options of `aotc bench`
    python tests/benchmarks/cuda.py --many-buckets 64 --replicate       # 64 buckets of one model
    python tests/benchmarks/cuda.py --storage                           # kernels beside the library, or embedded in it

A script: timings fail nothing. Most of a first output is `import torch`, which differs from process to process by more
than the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from bench_models import (
    HERE,
    Limit,
    limits_of_a_start,
    limits_of_calls,
    measure,
    parser,
    print_report,
    temporary_store,
    write_json,
)
from own_caches import ROOT, Failed, environment, spawn

LIMITS = {"pointwise": 0.6, "tinyblock": 0.85}
"""Latency at most, as a share of `torch.compile(mode="max-autotune")`'s, by the first word of the model's name."""
SPEED_UP = {"pointwise": 8.0}
"""Times as fast as eager, at least."""
TOLERANCE = {"float32": 1e-2, "float16": 2e-2, "bfloat16": 5e-2}
"""How far an output may be from eager's, as a share of eager's largest; in float32 that is TF32's."""
REAL_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)

Row = Sequence[str]


def bench_models(options: argparse.Namespace) -> None:
    manifest = ROOT / "manifests" / "cuda.yaml"
    document = yaml.safe_load(manifest.read_text())
    names = options.model or list(document["models"])
    found = list(measure(manifest, names, options.store, options.jobs, options.bench))
    limits: list[tuple[str, Limit]] = []
    for one in found:
        kind = one.name.partition("-")[0]
        shares = {"max-autotune": LIMITS[kind]} if kind in LIMITS else {}
        shares |= {"eager": 1 / SPEED_UP[kind]} if kind in SPEED_UP else {}
        tolerance = TOLERANCE[document["models"][one.name]["dtype"]]
        each = [*limits_of_a_start(one.report, 1.02, tolerance), *limits_of_calls(one.report, shares)]
        limits += [(one.name, limit) for limit in each]
    print_report(found, limits)
    write_json(options, found)


class Benchmark:
    """Processes that open many buckets of one small model, over a folder for their files."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.began = time.time()
        self.failures: dict[str, str] = {}

    def attempt(self, name: str, action: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """The result of an action. A failure is reported, and the rest goes on."""
        try:
            found = action()
        except Failed as error:
            self.failures[name] = str(error)
            return None
        print(f"[{time.time() - self.began:6.1f} s] {name}", file=sys.stderr, flush=True)
        return found

    def perform(self, task: dict[str, Any], caches: Path | None = None) -> dict[str, Any]:
        """Do a task in a fresh process, with empty caches unless `caches` names a folder, which then is kept."""
        with tempfile.TemporaryDirectory(dir=self.work, prefix="fresh-", ignore_cleanup_errors=True) as fresh:
            result = Path(fresh) / "result.json"
            command = ["-P", str(HERE / "cuda_processes.py"), json.dumps({**task, "result": str(result)})]
            spawn(command, environment(caches or Path(fresh)))
            found: dict[str, Any] = json.loads(result.read_text())
            return found

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
    from aotc.store.layout.bundle import read_artifact, read_bundle
    from aotc.store.layout.store import Store
    from aotc.store.reference import parse_reference

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


def column_medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


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


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--many-buckets", type=int, metavar="N", help="load and capture N buckets of one model")
    made.add_argument("--replicate", action="store_true", help="reach N with copies of the 8 that are built")
    made.add_argument("--storage", action="store_true", help="kernels beside the library against embedded ones")
    made.add_argument("--repeat", type=int, default=3, help="fresh processes that open many buckets")
    options = made.parse_args()
    with temporary_store(options) as folder:
        extras = options.many_buckets or options.storage
        if options.model or not extras:
            bench_models(options)
        benchmark = Benchmark(options, Path(folder))
        if options.many_buckets:
            rows, found = benchmark.many_buckets()
            print_table("Many buckets of TinyBlock, float16, mode default", rows)
            for _, text, holds in found:
                print(f"- {'pass' if holds else 'FAIL'}: {text}")
        if options.storage:
            print_table("Storage of kernels: TinyBlock, float16, 8 buckets, direct launch", benchmark.storage())
        for name, text in benchmark.failures.items():
            print(f"\nFAILED {name}: {text.splitlines()[-1]}")


if __name__ == "__main__":
    main()
