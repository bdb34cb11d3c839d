"""`aotc bench`: eager, torch.compile and aotc side by side, on a user's own model."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotc.amounts import counted, seconds_text, size_text
from aotc.cli.options import is_manifest, json_option, keys_option, page_option, store_of, store_option
from aotc.cli.output import duration, echo, echo_lines, notice, print_json, print_table, progress_console, written
from aotc.cli.signals import ctrl_c_kept, end_on_sigterm, in_words, limited
from aotc.errors import AotcError, one_line

if TYPE_CHECKING:
    from aotc.tools.bench.bench_run import Said
    from aotc.tools.bench.latency_comparison import Latency, LatencyRatio
    from aotc.tools.bench.measurements import BenchReport, BucketReport, TraceReport
    from aotc.tools.bench.subject import BenchSubject

MOST_BUCKETS = 4
"""Buckets that are measured if none are named."""
LIMIT = 3600.0
"""Seconds that a command takes at most if nothing else is said."""


def _contenders(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    from aotc.store.extras import install_hint
    from aotc.tools.bench.contenders import CONTENDERS, OWN
    from aotc.tools.bench.peers import missing_packages

    names = tuple(filter(None, value.split(","))) if value else OWN
    if unknown := [name for name in names if name not in CONTENDERS]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(CONTENDERS)}")
    if missing := missing_packages(names):
        raise click.BadParameter(f"{', '.join(missing)} is not installed: {install_hint('peers')}")
    return names


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    if not all(part.isdecimal() and 0 < int(part) <= 256 for part in value.split(",")):
        raise click.BadParameter(f"{value!r} is not a list of numbers from 1 to 256, like 1,2,4")
    return tuple(map(int, value.split(",")))


@click.command()
@click.argument("what", metavar="REF|MANIFEST")
@store_option
@click.option("--model", "models", multiple=True, help="With a manifest: measure only this model (repeatable).")
@click.option("--tag", show_default="latest", help="With a manifest: the tag to measure.")
@click.option(
    "--contenders",
    callback=_contenders,
    metavar="NAME,NAME",
    show_default="all but the last two",
    help="Of eager, default, default-warm, default-mega, max-autotune, max-autotune-warm, max-autotune-mega, aotc, "
    "aotc-file (without the module, from a checkpoint), aotc-forked (the same in a child of a prepared process), "
    "onnxruntime and openvino (from an ONNX file of the model, on a CPU).",
)
@click.option(
    "--bucket",
    "buckets",
    multiple=True,
    metavar="DIM=N,DIM=N",
    show_default=f"the first {MOST_BUCKETS}",
    help="A bucket to measure, by its name in `aotc inspect` (repeatable). First outputs are of the first one.",
)
@click.option(
    "--starts",
    type=click.IntRange(1),
    default=6,
    show_default=True,
    help="Fresh processes of each contender that does not compile; the others start once. 6 give a verdict.",
)
@click.option(
    "--rounds",
    type=click.IntRange(0),
    default=15,
    show_default=True,
    help="Rounds in which all contenders take turns. 6 give a verdict, 0 leave calls out.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.01, 60),
    default=0.2,
    show_default=True,
    help="How long one contender is called in one round.",
)
@click.option(
    "--concurrency",
    callback=_numbers,
    default="1,2,4",
    show_default=True,
    metavar="N,N",
    help="Measure throughput with so many threads that call.",
)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Sizes that a service has seen, as for `aotc advise`: fresh processes are called along them.",
)
@click.option(
    "--calls", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Calls drawn from the trace."
)
@click.option(
    "--weights",
    "checkpoint",
    type=click.Path(path_type=Path, exists=True),
    show_default="the factory's weights, written to a file",
    help="The checkpoint of aotc-file and aotc-forked.",
)
@click.option(
    "--limit",
    type=click.FloatRange(0, min_open=True),
    default=LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="Stop after so long, show what was measured until then, and exit with 1.",
)
@keys_option
@page_option
@json_option
def bench(
    what: str,
    store_path: Path,
    models: Sequence[str],
    tag: str | None,
    contenders: tuple[str, ...],
    buckets: Sequence[str],
    starts: int,
    rounds: int,
    seconds: float,
    concurrency: tuple[int, ...],
    trace_file: Path | None,
    calls: int,
    checkpoint: Path | None,
    limit: float,
    page: Path | None,
    as_json: bool,
) -> None:
    """Measure eager, torch.compile and aotc side by side.

    Each contender starts in fresh processes with caches of its own: time to the first output, latency and throughput
    by bucket, memory, kernel launches and recompiles. A difference is only called one if it is beyond the noise. The
    model must have been built. Run nothing else meanwhile. Figures are shown as they are measured, those of contenders
    that do not compile first. Ctrl-C, SIGTERM and --limit end with the report of what was measured until then.
    """
    from aotc.tools.bench.bench_run import BenchOptions
    from aotc.tools.bench.bench_run import bench as measure

    end_on_sigterm()
    began = time.monotonic()
    reports: list[BenchReport] = []
    try:
        with ctrl_c_kept():  # imports torch
            subjects = _subjects(what, store_path, models, tag)
            subject = next(subjects, None)
        notice(f"measuring for at most {duration(limit)} (--limit {limit:g})")
        reached = f"the limit of {limit:g} s was reached (--limit)"
        with limited(limit - (time.monotonic() - began), reached), _progress() as say:
            while subject is not None:
                chosen = subject.chosen(buckets) if buckets else subject.buckets[:MOST_BUCKETS]
                options = BenchOptions(
                    contenders,
                    tuple(chosen),
                    starts,
                    rounds,
                    seconds,
                    concurrency,
                    _trace(trace_file, subject, calls) if trace_file else (),
                    trace_file.name if trace_file else "",
                    str(checkpoint.absolute()) if checkpoint else "",
                )
                report = measure(subject, options, say, reports.append)
                if len(chosen) < len(subject.buckets) and not buckets:
                    few = f"{len(chosen)} of {len(subject.buckets)} buckets"
                    report.notes.append(f"{few} were measured: --bucket names others")
                subject = next(subjects, None)
    except KeyboardInterrupt as stop:
        if reports:
            reports[-1].stopped = in_words(stop)
            _give(reports, page, as_json)
        raise
    except AotcError:
        if not as_json:  # the document is that of the error
            for report in reports:
                if report.started:
                    _show(report)
        raise
    _give(reports, page, as_json)


def _give(reports: Sequence[BenchReport], page: Path | None, as_json: bool) -> None:
    if page is not None:
        from aotc.tools.bench.bench_page import render_page

        notice(written(page, render_page(reports).encode()))
    if as_json:
        print_json([_document(report) for report in reports])
        return
    for report in reports:
        _show(report)


def _subjects(what: str, store_path: Path, models: Sequence[str], tag: str | None) -> Iterator[BenchSubject]:
    from aotc.store.reference import parse_reference
    from aotc.tools.bench.subject import subject_of, subjects_of_manifest

    if is_manifest(Path(what)):
        yield from subjects_of_manifest(Path(what), models, str(store_path), tag or "latest")
    elif models or tag is not None:
        raise click.UsageError("--model and --tag go with a manifest; a reference names its own: MODEL:TAG")
    else:
        (where,) = store_of(store_path, parse_reference(what))
        yield subject_of(what, where)


def _trace(path: Path, subject: BenchSubject, calls: int) -> list[dict[str, int]]:
    """Calls drawn from a trace by how often each size came; the same ones each time."""
    from aotc.tools.advise import read_trace

    with path.open("rb") as lines:
        trace = read_trace(lines, str(path), tuple(sorted(subject.spec.buckets[0])))
    drawn = random.Random(0).choices(list(trace.counts), list(trace.counts.values()), k=calls)
    return [dict(zip(trace.dims, shape, strict=True)) for shape in drawn]


@contextmanager
def _progress() -> Iterator[Callable[[Said], None]]:
    """Say what is measured, and each figure: in a terminal above the line of what is done now, elsewhere a line for
    each step and figure. The log has every line, so with `-v` nothing is said beside it."""
    from rich.text import Text

    if logging.getLogger("aotc").isEnabledFor(logging.INFO):
        yield lambda said: None
        return
    console = progress_console()
    if not console.is_terminal:
        yield lambda said: notice(said.text) if said.kind != "detail" else None
        return
    line = _Line()
    with console.status(line):

        def say(said: Said) -> None:
            if said.kind == "figure":
                console.print(Text(one_line(said.text)))
            elif said.kind != "waiting":  # the line has a clock
                line.begin(said.text)

        yield say


class _Line:
    """What is done now, and for how long."""

    def __init__(self) -> None:
        self.begin("measuring")

    def begin(self, text: str) -> None:
        self.text, self.began = one_line(text), time.monotonic()

    def __rich__(self) -> str:
        from rich.markup import escape

        return escape(f"{self.text} ({time.monotonic() - self.began:.0f} s)")


def _document(report: BenchReport) -> dict[str, Any]:
    """The report, with the figures of its tables beside what they are computed from."""
    import msgspec

    started = report.started
    return {
        **msgspec.to_builtins(report),
        "first_output": {one.name: one.first_output for one in started},
        "reattach": {one.name: report.reattach(one.name) for one in started},
        "start_comparisons": msgspec.to_builtins(list(report.start_comparisons())),
    }


# -- tables -----------------------------------------------------------------------------------------------------------


def _show(report: BenchReport) -> None:
    machine = ", ".join(f"{value} CPUs" if name == "CPUs" else value for name, value in report.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    echo(f"{report.model}  {report.target}  {machine}; {versions}")
    if report.stopped:
        echo(f"warning: {report.stopped}: this is what was measured until then")
    if report.busy:
        waited = f"for each second of calls, threads waited {report.waited:.2f} s for a CPU"
        echo(f"warning: busy machine: {waited}; measure again with nothing else running")
    echo()
    _show_starts(report)
    for bucket in report.buckets:
        if bucket.latencies or bucket.throughput:
            _show_bucket(bucket, report.subject)
    if report.trace:
        _show_trace(report.trace)
    for one in report.contenders.values():
        if one.failure:
            echo()
            echo_lines(f"{one.label} failed: {one.failure}")
    for note in report.notes:
        echo(f"note: {note}")
    echo()


def _show_starts(report: BenchReport) -> None:
    from aotc.tools.bench.latency_comparison import in_words

    steps = ("import torch", "imports", "device", "model", "load", "first call")
    shown = [step for step in steps if step != "device" or "GPU" in report.machine]
    rows = []
    for one in report.started:
        reattach = report.reattach(one.name)
        rows.append(
            (
                one.label,
                str(len(one.starts)),
                *(seconds_text(one.step(step)) for step in shown),
                "-" if reattach is None else seconds_text(reattach),
                seconds_text(one.first_output),
                size_text(one.peak_rss),
                *([size_text(one.peak_gpu)] if one.peak_gpu is not None else []),
                ", ".join(name.rpartition(".")[2].strip("_") for name in one.compilers) or "none",
            )
        )
    gpu = ["GPU"] if "GPU" in report.machine else []
    header = ("start", "n", *shown, "reattach", "first output", "peak RSS", *gpu, "compilers imported")
    print_table(header, rows)
    for comparison in report.start_comparisons():
        echo(f"first output: {in_words(comparison, report.subject)}")
    for advice in report.faster_starts():
        echo(advice)


def _show_bucket(bucket: BucketReport, subject: str) -> None:
    from aotc.tools.bench.latency_comparison import in_words

    echo()
    at = ",".join(f"{dim}={size}" for dim, size in sorted(bucket.dims.items()))
    echo(f"{bucket.bucket}" + (f" at {at}" if at != bucket.bucket and at else ""))
    threads = sorted({number for each in bucket.throughput.values() for number in each})
    launched = any(one.host is not None for one in bucket.launches.values())
    verdicts: dict[str, LatencyRatio] = {comparison.other: comparison for comparison in bucket.comparisons}
    rows = []
    for name in {**bucket.latencies, **bucket.throughput}:
        latency, launches = bucket.latencies.get(name), bucket.launches.get(name)
        figures = (latency.p50, latency.p95, latency.p99) if latency else (None, None, None)
        rates = [bucket.throughput.get(name, {}).get(number) for number in threads]
        ratio = verdicts.get(name)
        rows.append(
            (
                name,
                *("-" if ms is None else f"{ms:.4g}" for ms in figures),
                f"{bucket.first_calls[name]:.4g}" if name in bucket.first_calls else "-",
                *(one.rate if one else "-" for one in rates),
                *([f"{launches.host} ({launches.kernels})" if launches and launches.host else "-"] if launched else []),
                f"{ratio.ratio:.3f} × {ratio.verdict}" if ratio else "-",
            )
        )
    header = ("calls", "p50 ms", "p95", "p99", "first ms", *(f"{number} at a time/s" for number in threads))
    print_table((*header, *(["launches (kernels)"] if launched else []), f"against {subject}"), rows)
    _explain_missing(bucket.latencies.values())
    for comparison in bucket.comparisons:
        echo(f"latency: {in_words(comparison, subject)}")
    if bucket.latencies:
        echo(f"two processes of eager differ by up to {bucket.noise_floor - 1:.1%}")
    for failure in bucket.failures:
        echo_lines(f"failed: {failure}")


def _show_trace(trace: TraceReport) -> None:
    echo()
    echo(f"{trace.source}: {counted(trace.calls, 'call')} of {counted(trace.distinct, 'size')}, in fresh processes")
    print_table(
        ("trace", "last output", "p50 ms", "p95", "p99", "slowest", "recompiles", "misses"),
        [
            (
                name,
                seconds_text(one.seconds),
                *(
                    "-" if ms is None else f"{ms:.4g}"
                    for ms in (one.latency.p50, one.latency.p95, one.latency.p99, max(one.ms))
                ),
                str(one.graphs),
                str(one.misses),
            )
            for name, one in trace.replayed.items()
        ],
    )
    _explain_missing(one.latency for one in trace.replayed.values())
    for failure in trace.failures:
        echo_lines(f"failed: {failure}")


def _explain_missing(latencies: Iterable[Latency]) -> None:
    if few := min((one.calls for one in latencies if one.p99 is None), default=0):
        echo(f"-: not known from {counted(few, 'call')}; a p95 needs 20, a p99 100")
