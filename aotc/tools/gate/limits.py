"""Each limit of a gate, with what was found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from aotc.call_table.dispatch import Dispatcher
from aotc.errors import ManifestError
from aotc.records import Variant
from aotc.store.opening import open_readable
from aotc.store.reference import Reference, is_remote
from aotc.tools.advise.trace import read_trace
from aotc.tools.bench.latency_comparison import LatencyRatio
from aotc.tools.bench.subject import BenchSubject, subject_of
from aotc.tools.gate.gate_document import LAST, CoverageLimit, ErrorLimit, Gate, LatencyLimit, StartupLimit
from aotc.tools.gate.gate_inputs import baseline_named, check_last
from aotc.tools.gate.releases import Measuring, measuring
from aotc.verification import Limit
from aotc.verify.verdicts import VerifyReport


def limits_of(
    gate: Gate, subject: BenchSubject, reports: Sequence[VerifyReport], where: str, folder: Path
) -> list[Limit]:
    """Measure what the gate asks for. `reports` are those of the bundle, `where` its store, `folder` the gate's.

    Raises VerifyError where the release cannot be run, ManifestError, TraceError, NotFoundError, StoreError.
    """
    found: list[Limit] = []
    if gate.numbers:
        found += _numbers(gate.numbers, reports)
    with ExitStack() as stack:
        running = stack.enter_context(measuring(subject)) if gate.startup or gate.latency else None
        if gate.startup and running:
            found += _startup(gate.startup, running)
        if gate.latency and running:
            found += _latency(gate.latency, running, subject, where)
    if gate.coverage:
        found.append(_coverage(gate.coverage, subject, folder))
    return found


def _numbers(limits: ErrorLimit, reports: Sequence[VerifyReport]) -> Iterator[Limit]:
    judged = [report for report in reports if report.error is not None]
    worst = max((report.error or 0.0 for report in judged), default=None)
    shares = [(report.error or 0.0) / report.allowed for report in judged if report.allowed]
    share = max(shares, default=0.0 if judged else None)
    for name, limit, value, shown in (
        ("largest error", limits.error, worst, "{:.2e}"),
        ("largest share of the allowed error", limits.of_allowed, share, "{:.0%}"),
    ):
        if limit is not None:
            allowed = f"at most {shown.format(limit)}"
            if value is None:
                yield Limit(name, allowed, "nothing was compared", False, measured=False)
            else:
                yield Limit(name, allowed, shown.format(value), value <= limit)


def _startup(limits: StartupLimit, running: Measuring) -> Iterator[Limit]:
    start = running.starts()
    for name, limit, value in (
        ("load", limits.load, start.load),
        ("first output of a fresh process", limits.first_output, start.first_output),
    ):
        if limit is not None:
            yield Limit(name, f"at most {_seconds(limit)}", _seconds(value), value <= limit)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _latency(limit: LatencyLimit, running: Measuring, subject: BenchSubject, where: str) -> Iterator[Limit]:
    allowed = f"at most {limit.worse:.1%} longer"
    baseline = baseline_of(limit.baseline, subject, where)
    if baseline is None:
        yield Limit("latency", allowed, "there is no earlier release: nothing to compare with", True, measured=False)
        return
    for bucket, compared in running.beside(subject_of(baseline, where).ref).items():
        name = f"latency of {bucket} against {baseline}"
        if isinstance(compared, str):
            yield Limit(name, allowed, f"not measured: {compared}", False, measured=False)
        elif (kept := is_kept(compared, limit.worse)) is None:
            yield Limit(name, allowed, f"{in_words(compared)}: too noisy to tell", False, measured=False)
        else:
            yield Limit(name, allowed, in_words(compared), kept)


TOO_NOISY, LEAST_NOISY = 2.0, 0.1
"""A slowdown of so many times the limit must not go unseen; with a low limit, one of 10 %, as two processes differ by
some per cent anyway."""


def is_kept(compared: LatencyRatio, worse: float) -> bool | None:
    """Whether the release takes at most `worse` longer than the baseline, as far as can be told: what two processes
    that run the same code differ by, and what the interval leaves open, counts for the release. None where that is so
    much that a far slower release would pass."""
    longer = 1 / compared.ratio - 1
    if compared.verdict == "slower" and longer > worse:
        return False
    if compared.verdict == "faster":
        return True
    unseen = max(compared.floor, 1 / compared.low) - 1 if compared.low else float("inf")
    return None if unseen > max(TOO_NOISY * worse, LEAST_NOISY) else True


def in_words(compared: LatencyRatio) -> str:
    """How much longer a call of the release takes, with the interval."""
    longer = f"{1 / compared.ratio - 1:+.1%}"
    if compared.low is None or compared.high is None:
        return f"{longer} (too few rounds for an interval)"
    interval = f"{1 / compared.high - 1:+.1%} to {1 / compared.low - 1:+.1%}"
    noise = f"; noise is ±{compared.floor - 1:.1%}"
    return f"{longer} ({interval}{noise})"


def baseline_of(asked: str, subject: BenchSubject, where: str) -> str | None:
    """The reference of the release to compare with; None where there is no earlier one. Raises StoreError where the
    tags of the store cannot be listed."""
    if asked != LAST:
        return str(baseline_named(asked, subject.spec.name, where))
    check_last(where)
    tags = [entry for entry in open_readable(where).tags() if entry.model == subject.spec.name]
    others = sorted((one for one in tags if one.digest != subject.digest), key=lambda one: one.published)
    if not others:
        return None
    last = Reference(where if is_remote(where) else None, others[-1].model, tag=others[-1].tag)
    return str(last)


def _coverage(limit: CoverageLimit, subject: BenchSubject, folder: Path) -> Limit:
    path = folder / limit.trace
    dims = tuple(Dispatcher(subject.signature, _variants(subject)).dims.names)
    try:
        with path.open("rb") as stream:
            trace = read_trace(stream, str(path), dims)
    except OSError as error:
        raise ManifestError(f"the trace {path} cannot be read: {error.strerror}") from error
    dispatcher = Dispatcher(subject.signature, _variants(subject))
    order = [trace.dims.index(name) for name in dims]
    missed = {shape: count for shape, count in trace.counts.items() if not _is_taken(dispatcher, shape, order)}
    share = 1 - sum(missed.values()) / trace.calls
    found = f"{share:.2%} of {trace.calls} calls"
    if missed:
        shape = max(missed, key=lambda one: missed[one])
        sizes = ", ".join(f"{name} {size}" for name, size in zip(trace.dims, shape, strict=True))
        found += f"; the most frequent miss is {sizes}"
    return Limit(f"coverage of {limit.trace}", f"at least {limit.share:.2%}", found, share >= limit.share)


def _is_taken(dispatcher: Dispatcher, shape: Sequence[int], order: Sequence[int]) -> bool:
    return dispatcher.plan(tuple(shape[index] for index in order)) is not None


def _variants(subject: BenchSubject) -> list[Variant]:
    return [
        Variant(bucket, library="", files=(), arguments=(), outputs=(), output_tree=0)
        for bucket in subject.spec.buckets
    ]
