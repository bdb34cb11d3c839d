"""`aotc advise`: which buckets to compile, from the sizes that a service has seen."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from aotc.amounts import counted
from aotc.cli.options import DEFAULT_STORE, json_option, page_option
from aotc.cli.output import duration, echo, echo_lines, notice, print_json, print_table, written

if TYPE_CHECKING:
    from aotc.tools.advise import Advice, Trace
    from aotc.tools.advise.advice import BucketPlan
    from aotc.tools.advise.costs import Measurements
    from aotc.tools.advise.today import Today
    from aotc.tools.advise.trace import DimSizes

DEFAULT_BUCKETS = 8


class Share(click.ParamType):  # type: ignore[type-arg]
    """A share: `0.05` or `5%`."""

    name = "share"

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 <= share <= 1:
            self.fail(f"{value!r} is not a share from 0 to 1, like 0.05 or 5%", parameter, context)
        return share


def _multiples(context: click.Context, parameter: click.Parameter, values: Sequence[str]) -> dict[str, int]:
    found = {}
    for value in values:
        match = re.fullmatch(r"(\w+)=([1-9][0-9]{0,8})", value)
        if match is None:
            raise click.BadParameter(f"{value!r} is not DIM=NUMBER, like seq=8")
        found[match[1]] = int(match[2])
    return found


@click.command()
@click.argument("trace_file", metavar="TRACE", type=click.Path(path_type=Path, allow_dash=True))
@click.option(
    "--buckets",
    "count",
    type=click.IntRange(1, 1000),
    show_default=f"as many as the manifest's; where these cannot take every call, as few as can, if {DEFAULT_BUCKETS} "
    f"can; without a manifest {DEFAULT_BUCKETS}",
    help="At most so many buckets.",
)
@click.option("--max-waste", type=Share(), metavar="SHARE", help="As few buckets as waste at most this, like 10%.")
@click.option(
    "--minimise",
    type=click.Choice(["waste", "p95"]),
    default="waste",
    show_default=True,
    help="p95: first what 95 % of the calls cost at most, then waste; for one padded dim, without --range-cost.",
)
@click.option(
    "--dims",
    metavar="DIM,DIM",
    show_default="the manifest's, else the keys of the first line",
    help="The dims to read.",
)
@click.option(
    "--manifest",
    "manifest_file",
    type=click.Path(path_type=Path),
    help="Compare with this manifest's buckets, and take its dims and pad rules.",
)
@click.option("--model", help="The manifest's model, if it has several.")
@click.option(
    "--pad",
    "padded",
    multiple=True,
    metavar="DIM",
    show_default="those of the manifest, else every dim",
    help="A dim in which calls are padded (repeatable).",
)
@click.option(
    "--multiple-of",
    "multiples",
    multiple=True,
    callback=_multiples,
    metavar="DIM=N",
    help="Make every size of a padded dim a multiple of N (repeatable).",
)
@click.option(
    "--range-cost",
    type=click.FloatRange(min=1),
    metavar="FACTOR",
    help="Let a range compete, whose code takes FACTOR times as long as that of a fixed bucket.",
)
@click.option(
    "--cover",
    type=Share(),
    metavar="SHARE",
    default=1.0,
    show_default="100%",
    help="The calls that must find a bucket; the costliest others may be misses.",
)
@click.option(
    "--cost",
    "expression",
    metavar="EXPRESSION",
    show_default="the product of the dims",
    help="What a call costs, like `batch * seq * (512 + seq)`.",
)
@click.option(
    "--latency",
    "latencies",
    metavar="FILE|REF",
    help="Minimise milliseconds, fitted to those that the build of REF took, or to those of FILE, "
    'one a line: {"batch": 4, "seq": 512, "ms": 3.1}.',
)
@page_option
@click.option("--png", "picture", type=click.Path(path_type=Path), help="Write the page's chart to this file.")
@json_option
def advise(
    trace_file: Path,
    count: int | None,
    max_waste: float | None,
    minimise: str,
    dims: str | None,
    manifest_file: Path | None,
    model: str | None,
    padded: Sequence[str],
    multiples: dict[str, int],
    range_cost: float | None,
    cover: float,
    expression: str | None,
    latencies: str | None,
    page: Path | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Find the buckets that waste least for a trace of sizes.

    TRACE is a file, or - for standard input: JSON lines like {"batch": 4, "seq": 312, "count": 17}, an access log with
    batch=4 seq=312 in its lines, or the JSON of compiled.stats(). Prints the manifest's `buckets`.
    """
    from aotc.tools.advise import Goal
    from aotc.tools.advise import advise as find
    from aotc.tools.advise.advice import manifest_block
    from aotc.tools.advise.advice_page import render_page
    from aotc.tools.advise.costs import elements
    from aotc.tools.advise.today import read_today

    if count is not None and max_waste is not None:
        raise click.UsageError("give --buckets or --max-waste, not both")
    if model and manifest_file is None:
        raise click.UsageError("--model names a model of --manifest")
    today = read_today(manifest_file, model) if manifest_file else None
    trace = _read(trace_file, tuple(dims.split(",")) if dims else today.dims if today else ())
    _check_dims(trace, padded, multiples, today)
    measured = _measured(latencies, trace.dims) if latencies else None
    cost, unit = _cost(trace, expression, measured)
    seconds = measured.seconds if measured else None
    pads = tuple(padded) or (tuple(today.padded) if today else None)
    goal = Goal(count, max_waste, p95=minimise == "p95")
    if max_waste is None and count is None:
        number = len(today.buckets) if today else DEFAULT_BUCKETS
        goal = msgspec.structs.replace(goal, count=number, up_to=DEFAULT_BUCKETS)
    search = functools.partial(
        find,
        trace,
        cost=cost,
        elements=today.elements if today else elements,
        padded=pads,
        range_cost=range_cost,
        cover=cover,
        multiple_of=multiples,
        today=(today.buckets, today.padded) if today else None,
    )
    advice = search(goal)
    for note in advice.notes:
        notice(f"note: {note}")
    if page is not None:
        text = render_page(trace, advice, trace_file.name, unit, today.model if today else "")
        notice(written(page, text.encode()))
    if picture is not None:
        from aotc.tools.advise.picture import render_png

        data = render_png(trace, advice, f"Buckets for {today.model if today else trace_file.name}")
        notice(written(picture, data))
    if as_json:
        more = {"unit": unit, "units": _units(advice, today), "unit_seconds": seconds}
        print_json({**msgspec.to_builtins(advice), **more})
    else:
        _show(advice, unit, today, seconds)
        if goal.up_to > len(advice.plan.buckets):
            _say_why_worse(advice, lambda: search(Goal(DEFAULT_BUCKETS)))
        echo()
        echo_lines(manifest_block(advice), nl=False)


def _read(path: Path, dims: Sequence[str]) -> Trace:
    from aotc.errors import TraceError
    from aotc.tools.advise import read_trace
    from aotc.tools.advise.trace import lines_of

    if str(path) == "-":
        return read_trace(lines_of(sys.stdin.buffer, "standard input"), "standard input", dims)
    try:
        with path.open("rb") as stream:
            return read_trace(lines_of(stream, str(path)), str(path), dims)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}", hint="a trace is a file, or - for input") from None


def _check_dims(trace: Trace, padded: Sequence[str], multiples: dict[str, int], today: Today | None) -> None:
    for option, names in (("--pad", padded), ("--multiple-of", multiples)):
        for name in names:
            if name not in trace.dims:
                raise click.UsageError(f"{option}: the trace has no dim {name!r}; it has {', '.join(trace.dims)}")
    if today and {*today.dims} != {*trace.dims}:
        raise click.UsageError(f"--dims: the model's dims are {','.join(today.dims)}")


class _Measured(NamedTuple):
    """Milliseconds of calls, from `source`; and the seconds that a unit took to build, where a build measured them."""

    source: str
    times: Measurements
    seconds: float | None = None


def _cost(trace: Trace, expression: str | None, measured: _Measured | None) -> tuple[Callable[[DimSizes], float], str]:
    """What a call costs, and in what: `elements`, the expression, or `ms`."""
    from aotc.tools.advise.costs import elements, expression_cost, fit_latency

    if measured is None:
        work = expression_cost(expression, trace.dims) if expression else elements
        return work, expression or " × ".join(trace.dims)
    latency = fit_latency(measured.times, measured.source, trace.dims, expression)
    error = f"mean error {latency.error:.1%}"
    if latency.exact:
        error = f"exactly determined: {counted(len(latency.terms), 'coefficient')}, so the error is not known"
    notice(f"fitted {latency} to {counted(latency.points, 'measurement')}; {error}")
    return latency.milliseconds, "ms"


def _measured(latencies: str, dims: Sequence[str]) -> _Measured:
    """Of a file, or of the build of a bundle."""
    from aotc.errors import TraceError
    from aotc.store.layout.bundle import read_bundle
    from aotc.store.opening import open_readable
    from aotc.store.reference import parse_reference
    from aotc.tools.advise.costs import read_latencies
    from aotc.tools.advise.trace import lines_of
    from aotc.tools.inspection.bucket_times import measured

    if Path(latencies).is_file():
        with Path(latencies).open("rb") as stream:
            return _Measured(latencies, read_latencies(lines_of(stream, latencies), latencies, dims))
    reference = parse_reference(latencies)
    store = open_readable(reference.store or os.environ.get("AOTC_STORE") or DEFAULT_STORE)
    found = measured(store, read_bundle(store, reference))
    if {*found.times[0][0]} != {*dims}:
        raise TraceError(
            f"the buckets of {latencies} have the dims {', '.join(sorted(found.times[0][0]))}, and the trace "
            f"{', '.join(dims)}",
            hint="name the same dims with --dims",
        )
    if found.busy:
        notice(f"note: {found.busy} of {counted(len(found.times), 'bucket')} were timed on a busy machine")
    return _Measured(latencies, [(tuple(sizes[dim] for dim in dims), ms) for sizes, ms in found.times], found.seconds)


def _units(advice: Advice, today: Today | None) -> int:
    return len(advice.plan.buckets) * (today.targets if today else 1)


def _show(advice: Advice, unit: str, today: Today | None, seconds: float | None) -> None:
    print_table(
        ("bucket", "calls", "waste", "of all waste"),
        [(use.name, f"{use.calls:,}", f"{use.waste:.1%}", f"{use.lost:.1%}") for use in advice.plan.buckets],
    )
    echo()
    rows = [("advised", advice.plan), *([("today", advice.today)] if advice.today else [])]
    print_table(
        ("", "buckets", "coverage", "waste", "p95 ratio", f"mean ({unit})", f"p95 cost ({unit})"),
        [
            (
                name,
                str(len(plan.buckets)),
                f"{plan.coverage:.2%}",
                f"{plan.waste:.1%}",
                f"{plan.p95:.2f}×",
                _mean(advice, plan),
                f"{plan.p95_cost:,.4g}",
            )
            for name, plan in rows
        ],
    )
    echo()
    echo(f"{counted(advice.calls, 'call')} of {counted(advice.distinct, 'distinct size')}; {advice.kind}")
    buckets, of = f"{len(advice.plan.buckets)} {advice.kind}", ""
    if (left_out := 1 - advice.plan.coverage) > 0:
        of = f" for the calls without the costliest {left_out:.2%}"
    if advice.p95:
        echo(f"optimal{of}: no {buckets} have a lower p95 cost ({unit}), and none with the same p95 waste less")
    elif advice.optimal:
        echo(f"optimal{of}: no {buckets} waste less")
    else:
        echo(f"near-optimal{of}: no {buckets} waste less than {advice.bound:.1%}")
    if of:
        echo("  buckets that leave out other calls, which are not searched, may waste less")
    for option in advice.options:
        if option.kind != advice.kind:
            echo(f"{option.kind} would waste {option.waste:.1%} with {option.count}")
    units = _units(advice, today)
    cost = f", about {duration(units * seconds)} of compiling in all" if seconds else ""
    echo(f"units to compile: {units}{' for each region' if today and today.regions else ''}{cost}")


def _say_why_worse(advice: Advice, with_more: Callable[[], Advice]) -> None:
    """Where today's buckets waste less than as many that are advised: for which calls, and what wastes less."""
    today, plan = advice.today, advice.plan
    if today is None or today.waste >= plan.waste or today.coverage >= plan.coverage:
        return
    missed = f"{1 - today.coverage:.2%} of the calls find none of them"
    echo(f"today's {len(today.buckets)} waste less, {today.waste:.1%}, for they leave calls out: {missed}")
    echo(f"  --cover {math.floor(1e4 * today.coverage) / 100:g}% leaves out as many, the costliest")
    more = with_more().plan
    echo(f"  --buckets {len(more.buckets)} wastes {more.waste:.1%}, and takes all")


def _mean(advice: Advice, plan: BucketPlan) -> str:
    covered = plan.coverage * advice.calls
    return f"{plan.cost / covered:,.4g}" if covered else "-"
