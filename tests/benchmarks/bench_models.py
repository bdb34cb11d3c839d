"""Build, verify and bench a manifest's models, for the scripts beside this file: thin uses of `aotc bench`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from own_caches import ROOT, Failed, environment

HERE = Path(__file__).resolve().parent
sys.path[:] = [str(ROOT), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]

import msgspec  # noqa: E402

from aotc.tools.bench.contenders import CONTENDERS  # noqa: E402
from aotc.tools.bench.measurements import BenchReport  # noqa: E402


class Measured(NamedTuple):
    """One model: what `aotc build`, `aotc verify` and `aotc bench` say of it."""

    name: str
    seconds: float
    size: int
    verified: list[str]
    report: BenchReport


class Limit(NamedTuple):
    text: str
    holds: bool


def aotc(*arguments: object, caches: Path) -> Any:
    """The JSON document that a command prints. Raises Failed where it prints none."""
    command = [sys.executable, "-m", "aotc", *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(caches), stdout=subprocess.PIPE, check=False)
    if not done.stdout.startswith((b"{", b"[")):
        raise Failed(f"`aotc {arguments[0]}` ended with status {done.returncode}")
    document = json.loads(done.stdout)
    if isinstance(document, dict) and "error" in document:
        raise Failed(document["error"]["message"])
    return document


def measure(manifest: Path, names: Iterable[str], store: Path, jobs: int, bench: Sequence[str]) -> Iterator[Measured]:
    """Each model in turn; one that fails is reported on standard error. The bench's processes have caches of their own,
    whatever these are."""
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        of = (manifest, "--model", name, "--store", store)
        try:
            began = time.time()
            built = aotc("build", *of, "--jobs", jobs, caches=store.parent / "build")
            seconds = time.time() - began
            if failed := [unit["error"] for unit in built["units"] if unit["error"]]:
                raise Failed("\n".join(failed))
            size = sum(unit["size"] for unit in built["units"])
            verified = [one["status"] for one in aotc("verify", *of, caches=store.parent / "verify")]
            (report,) = aotc("bench", *of, *bench, caches=store.parent / "bench")
        except Failed as error:
            print(f"{name} FAILED: {error}", file=sys.stderr, flush=True)
            continue
        yield Measured(name, seconds, size, verified, msgspec.convert(report, BenchReport, str_keys=True))


def row(one: Measured) -> list[str]:
    contenders, latencies = one.report.contenders, one.report.buckets[0].latencies
    return [
        one.name,
        f"{one.seconds:.0f}",
        f"{one.size / 1e6:.2f}",
        f"{one.verified.count('ok')} of {len(one.verified)}",
        *(_first_output(one.report, name) if name in contenders else "–" for name in CONTENDERS),
        ", ".join(f"{name} {latency.p50:.3g}" for name, latency in latencies.items()) or "–",
    ]


def _first_output(report: BenchReport, name: str) -> str:
    return f"{report.contenders[name].first_output:.2f}" if report.contenders[name].starts else "failed"


def print_report(measured: Sequence[Measured], limits: Sequence[tuple[str, Limit]] = ()) -> None:
    """Markdown tables; seconds to the first output by contender."""
    heads = ["model", "build s", "MB", "verify", *CONTENDERS, "ms a call"]
    for cells in (heads, ["---"] * len(heads), *map(row, measured)):
        print(f"| {' | '.join(cells)} |")
    print()
    for name, limit in limits:
        print(f"- {'pass' if limit.holds else 'FAIL'}: {name}: {limit.text}")


def limits_of_a_start(report: BenchReport, first_output: float, tolerance: float) -> Iterator[Limit]:
    """What a start with aotc must keep: no compiler, reattach, first output as a multiple of eager's, results."""
    if not {"eager", "aotc"} <= {one.name for one in report.started}:
        return
    ours = report.contenders["aotc"]
    yield Limit(f"compilers imported: {', '.join(ours.compilers) or 'none'}", not ours.compilers)
    mega = report.contenders.get("max-autotune-mega")
    if mega and mega.starts and (reattach := report.reattach("aotc")) is not None:
        theirs = report.reattach(mega.name) or 0.0
        text = f"reattach at most 1/200 of the mega-cache's: {reattach:.4f} s, {theirs:.2f} s"
        yield Limit(text, max(0.0, reattach) <= theirs / 200)
    ratio = ours.first_output / report.contenders["eager"].first_output
    yield Limit(f"first output at most {first_output} × eager's: {ratio:.3f}", ratio <= first_output)
    for one in report.started:
        differences = [start.difference for start in one.starts]
        close = all(each is not None and each <= tolerance for each in differences)
        yield Limit(
            f"{one.name}: outputs within {tolerance:g} of eager's: {max(each or 0.0 for each in differences):.1e}",
            close,
        )


def limits_of_calls(report: BenchReport, limits: dict[str, float]) -> Iterator[Limit]:
    """Latency as a share of another contender's at most; where no limit is named, not slower beyond the noise."""
    for bucket in report.buckets:
        for comparison in bucket.comparisons:
            share, limit = 1 / comparison.ratio, limits.get(comparison.other)
            text = f"{bucket.bucket}: latency {share:.3f} × that of {comparison.other} ({comparison.verdict})"
            if limit is None:
                yield Limit(text, comparison.verdict != "slower")
            else:
                yield Limit(f"{text}, at most {limit}", share <= limit)


def parser(description: str, jobs: int = 1) -> argparse.ArgumentParser:
    """Options that the scripts share. What follows `--` goes to `aotc bench`."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", action="append", default=[], help="only this one (repeatable)")
    made.add_argument("--store", type=Path, help="keep the artifacts there, and build only what it lacks")
    made.add_argument("--jobs", type=int, default=jobs, help="units that `aotc build` compiles side by side")
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    made.add_argument("bench", nargs="*", help="after `--`: options of `aotc bench`")
    return made


def temporary_store(options: argparse.Namespace) -> tempfile.TemporaryDirectory[str]:
    """A folder for the store and caches; sets `options.store` where none was named."""
    folder = tempfile.TemporaryDirectory(prefix="aotc-benchmark-", ignore_cleanup_errors=True)
    options.store = options.store.resolve() if options.store else Path(folder.name) / "store"
    return folder


def write_json(options: argparse.Namespace, measured: Sequence[Measured]) -> None:
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode([one._asdict() for one in measured])))
