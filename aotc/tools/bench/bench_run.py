"""All measurements of one model, in order: what is asked most comes first, for a limit of time may end them.

1. The contenders that do not compile. They start in turns, twice each, and each turn in the other direction; the last
   process of each steady one stays for its calls.
2. Each contender that compiles, in the table's order: a cold one leaves what the next ones start from. It starts once,
   and its calls are timed before the next one starts.
3. The other starts of those that do not compile, which give a verdict.
4. A trace: fresh processes, called along it.

Calls are timed in rounds. In each, every steady process of the group times some calls, in random order; so does the
subject, with which the others are compared, and beside the first group a second process of eager. Then come calls from
several threads, launches, and what the processes have used.

Only one process works at a time; the others wait for their standard input. The report fills as measurements are made.
"""

from __future__ import annotations

import logging
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import aotc
from aotc.amounts import counted, seconds_text
from aotc.tools.bench.bench_setup import prepared
from aotc.tools.bench.contender_messages import (
    Burst,
    Calls,
    ContenderJob,
    Counted,
    Launches,
    Profile,
    SaveMega,
    Timed,
    Usage,
    Used,
)
from aotc.tools.bench.contender_process import ContenderFailed, ContenderProcess
from aotc.tools.bench.contenders import CHECKPOINT, CONTENDERS, OWN, PEERS, Attachment, Contender, with_sources
from aotc.tools.bench.latency_comparison import Latency, compare, latency_of, noise_floor
from aotc.tools.bench.measurements import BenchReport, BucketReport, ContenderMeasurements, Replayed, TraceReport
from aotc.tools.bench.subject import BenchSubject, CalledSizes

_log = logging.getLogger("aotc")

CONTROL = "eager, a second process"
FIRST_STARTS = 2
"""Of each contender that does not compile, before calls are timed."""
LEAST_CALLS, MOST_CALLS = 3, 300
"""Of one contender in one round."""


class BenchOptions(NamedTuple):
    """How much to measure. trace: sizes in the order of their calls, and the name of their source."""

    contenders: tuple[str, ...] = OWN
    buckets: tuple[CalledSizes, ...] = ()
    starts: int = 6
    rounds: int = 15
    seconds: float = 0.2
    threads: tuple[int, ...] = (1, 2, 4)
    trace: Sequence[dict[str, int]] = ()
    trace_source: str = ""
    checkpoint: str = ""

    def seconds_of_calls(self, steady: int) -> float:
        """Seconds that the rounds and the threads of so many steady contenders take, if no call is slow. One process
        more takes part in the rounds only: eager's second one, or the subject."""
        latency = self.rounds * self.seconds * (steady + 1)
        throughput = len(self.threads) * self.seconds_at_once * steady
        return len(self.buckets) * (latency + throughput) if self.rounds and steady else 0.0

    @property
    def seconds_at_once(self) -> float:
        """How long a contender is called from several threads."""
        return max(0.5, 3 * self.seconds)


class Said(NamedTuple):
    """A line of progress. step: what begins. detail: how far it is. figure: what was measured. waiting: that a step
    goes on, which a terminal shows by a clock."""

    text: str
    kind: Literal["step", "detail", "figure", "waiting"] = "step"


SayProgress = Callable[[Said], None]


def bench(
    subject: BenchSubject,
    options: BenchOptions,
    say: SayProgress = lambda said: None,
    begun: Callable[[BenchReport], None] = lambda report: None,
) -> BenchReport:
    """Measure a model; `say` is told what is done and measured. A contender that fails is in the report, with its
    error.

    `begun` gets the report at once; it fills as measurements are made, so that an interruption loses none of them.
    Raises VerifyError where the model itself cannot be run.
    """
    with tempfile.TemporaryDirectory(prefix="aotc-bench-", ignore_cleanup_errors=True) as folder:
        benchmark = _Bench(subject, options, Path(folder), say)
        begun(benchmark.report)
        return benchmark.run()


class _Bench:
    def __init__(self, subject: BenchSubject, options: BenchOptions, work: Path, say: SayProgress) -> None:
        self.subject, self.options, self.work, self._say = subject, options, work, say
        self.numbers = iter(range(1_000_000))
        names = with_sources(options.contenders)
        from_file = [name for name in names if name in CHECKPOINT]
        wants_file = bool(from_file) and not subject.spec.regions
        live = subject.spec.weights == "live"
        self.checkpoint = options.checkpoint or (str(work / "weights.safetensors") if wants_file and live else "")
        self.report = BenchReport(
            subject.spec.name,
            subject.ref,
            subject.digest,
            subject.target,
            {"CPUs": str(len(os.sched_getaffinity(0))), "processor": _processor()},
            {"python": platform.python_version(), "torch": version("torch"), "aotc": aotc.__version__},
            {name: ContenderMeasurements(name, CONTENDERS[name].label) for name in names},
            [BucketReport(sizes.bucket, dict(sizes.dims)) for sizes in options.buckets],
        )
        if from_file and subject.spec.regions:
            self._leave_out(CHECKPOINT)
            self.report.notes.append(f"{', '.join(from_file)}: code that was built by regions runs in its module")
        self.onnx: tuple[tuple[str, str], ...] = ()
        self.distinct = [dict(pairs) for pairs in dict.fromkeys(tuple(sorted(one.items())) for one in options.trace)]
        self.sessions: dict[str, ContenderProcess] = {}
        self.waited = self.spent = 0.0
        self.ends_at: float | None = None  # the group that is measured, by time.monotonic()

    def say(self, text: str, kind: Literal["step", "detail", "figure", "waiting"] = "step") -> None:
        left = self.ends_at - time.monotonic() if self.ends_at is not None and kind != "figure" else 0.0
        if left >= 1:
            text += f" (about {left:.0f} s left)"
        said = f"{self.subject.spec.name}: {text}"
        _log.info("%s", said)
        self._say(Said(said, kind))

    @property
    def contenders(self) -> list[Contender]:
        """Those that do not compile first."""
        return sorted((CONTENDERS[name] for name in self.report.contenders), key=lambda contender: contender.slow)

    def run(self) -> BenchReport:
        try:
            self._prepare()
            self._announce()
            quick = [contender.name for contender in self.contenders if not contender.slow]
            self._start_in_turns(quick, range(min(FIRST_STARTS, self.options.starts)))
            self._measure_calls([name for name in CONTENDERS if name in self.sessions])
            for contender in self.contenders:
                if contender.slow:
                    self._start_slow(contender)
                    if contender.name in self.sessions:
                        self.ends_at = time.monotonic() + self.options.seconds_of_calls(1)
                        self._measure_calls([contender.name])
            self._start_in_turns(quick, range(FIRST_STARTS, self.options.starts), keep=False)
        finally:
            self._close()
        if self.options.trace:
            self._replay()
        return self.report

    def _announce(self) -> None:
        """Say what will be done. How long a compiler takes is not known before."""
        options, names = self.options, [contender.name for contender in self.contenders]
        slow = [name for name in names if CONTENDERS[name].slow]
        starts = len(slow) + (len(names) - len(slow)) * options.starts
        steady = [name for name in names if CONTENDERS[name].steady]
        compiled = [name for name in steady if name in slow]
        calls = options.seconds_of_calls(len(steady) - len(compiled)) + len(compiled) * options.seconds_of_calls(1)
        compiling = f", {counted(len(slow), 'contender')} with a compiler" if slow else ""
        self.say(
            f"{counted(starts, 'start')} of {', '.join(names)}{compiling}; then {calls:.0f} s of calls of "
            f"{counted(len(options.buckets), 'bucket')}"
        )

    # -- starts -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.say("preparing inputs and weights")  # which also brings torch's files into memory
        sizes = [sizes.dims for sizes in self.options.buckets] + self.distinct
        own = self.options.checkpoint
        subject = self.subject
        peers = [name for name in PEERS if name in self.report.contenders]
        if peers and subject.device != "cpu":
            self._leave_out(peers)
            self.report.notes.append(f"{', '.join(peers)}: measured for CPUs only")
            peers = []
        count = len(self.options.buckets) if peers else 0
        _, answer = prepared(subject, sizes, self.work, "" if own else self.checkpoint, count)
        self.report.notes += answer.notes
        self.onnx = answer.onnx
        for name in peers if answer.onnx_error else ():
            self.report.contenders[name].failure = f"the model cannot be exported as ONNX: {answer.onnx_error}"
        if answer.gpu:
            self.report.machine["GPU"] = answer.gpu
        if self.checkpoint and not Path(self.checkpoint).exists():
            self._leave_out(CHECKPOINT)

    def _leave_out(self, names: Sequence[str]) -> None:
        for name in names:
            self.report.contenders.pop(name, None)

    def _job(self, name: str, numbers: range, *, dynamic: bool | None = False, on_miss: str = "error") -> ContenderJob:
        subject, contender = self.subject, CONTENDERS[name]
        mega = str(self.work / f"{contender.after}.mega") if contender.starts_from_mega else ""
        attachment = Attachment(
            subject.ref,
            subject.target,
            subject.device,
            self.checkpoint,
            mega,
            dynamic=dynamic,
            on_miss=on_miss,
            onnx=self.onnx if contender.peer else (),
        )
        inputs = tuple(str(self.work / f"inputs-{number}.pt") for number in numbers)
        expected = str(self.work / "expected.pt")
        return ContenderJob(name, subject.spec, str(subject.folder), attachment, inputs, expected)

    def _open(self, name: str, job: ContenderJob) -> ContenderProcess:
        """Start a contender from its caches. Raises ContenderFailed."""
        contender, own = CONTENDERS[name], self.work / f"process-{next(self.numbers)}"
        kept = name if contender.keeps_caches else "" if contender.starts_from_mega else contender.after
        caches = self.work / "caches" / kept if kept else own / "caches"
        return ContenderProcess(job, caches, own / "session", self._waiting(name))

    def _waiting(self, name: str) -> Callable[[float], None]:
        """Says in the log that a start goes on: one with a compiler can take minutes."""
        label = CONTENDERS[name].label
        return lambda seconds: self.say(f"{label}: no output yet, {seconds:.0f} s after its start", "waiting")

    def _start(self, name: str, *, keep: bool = True) -> None:
        """Start a contender once; keep its process if its calls are to be timed, in the place of an earlier one."""
        measured = self.report.contenders[name]
        if measured.failure:
            return
        turns = 1 if CONTENDERS[name].slow else self.options.starts
        turn = len(measured.starts) + 1
        of = f", {turn} of {turns}" if turns > 1 else ""
        self.say(f"starting {measured.label}{of}", "step" if turn == 1 else "detail")
        try:
            session = self._open(name, self._job(name, range(len(self.options.buckets))))
        except ContenderFailed as error:
            measured.failure = str(error)
            self.say(f"{measured.label} failed: {error.first_line}", "figure")
            return
        measured.starts.append(session.started)
        if turn in (1, FIRST_STARTS, turns):
            median = f", the median of {turn}" if turn > 1 else ""
            self.say(f"{measured.label}: first output in {seconds_text(measured.first_output)}{median}", "figure")
        if not keep:
            session.close()
            return
        if (earlier := self.sessions.pop(name, None)) is not None:
            earlier.close()
        if CONTENDERS[name].steady:
            self.sessions[name] = session
        else:
            session.close()

    def _start_slow(self, contender: Contender) -> None:
        measured = self.report.contenders[contender.name]
        if contender.after and not self.report.contenders[contender.after].starts:
            measured.failure = f"{contender.after} failed, from whose caches this starts"
            return
        self._start(contender.name)
        needs_mega = f"{contender.name}-mega" in self.report.contenders
        if needs_mega and (session := self.sessions.get(contender.name)):
            try:
                session.ask(SaveMega(str(self.work / f"{contender.name}.mega")), Timed)
            except ContenderFailed as error:
                self.report.contenders[f"{contender.name}-mega"].failure = str(error)

    def _start_in_turns(self, names: Sequence[str], turns: range, *, keep: bool = True) -> None:
        calls = self.options.seconds_of_calls(sum(CONTENDERS[name].steady for name in names)) if keep else 0.0
        began = time.monotonic()
        for done, turn in enumerate(turns, 1):
            for name in names[:: 1 if turn % 2 == 0 else -1]:
                self._start(name, keep=keep)
            now = time.monotonic()
            self.ends_at = now + (now - began) / done * (len(turns) - done) + calls
        self.ends_at = self.ends_at if keep else None

    @contextmanager
    def _control(self, names: Sequence[str]) -> Iterator[dict[str, ContenderProcess]]:
        """A second process of eager, which differs from the first one by noise alone."""
        with ExitStack() as stack:
            found = {}
            if "eager" in names:
                try:
                    found[CONTROL] = self._open("eager", self._job("eager", range(len(self.options.buckets))))
                    stack.callback(found[CONTROL].kill)
                except ContenderFailed as error:
                    self.report.notes.append(f"{CONTROL}, failed, so that the noise is not known: {error}")
            yield found

    # -- calls --------------------------------------------------------------------------------------------------------

    def _measure_calls(self, names: Sequence[str]) -> None:
        """All that is asked of the running processes of these contenders; then only the subject's goes on."""
        if self.options.rounds:
            with self._control(names) as control:
                for number in range(len(self.report.buckets)):
                    self._time_rounds(number, names, control)
            self._measure_threads(names)
            self._count_launches(names)
        self._ask_usage(names)
        for name in names:
            if name != self.report.subject:
                self.sessions.pop(name).close()
        self.ends_at = None

    def _time_rounds(self, number: int, names: Sequence[str], control: dict[str, ContenderProcess]) -> None:
        """Rounds at a bucket, of these contenders and the subject."""
        bucket, order = self.report.buckets[number], random.Random(0)
        sessions = {**self.sessions, **control}
        counts: dict[str, int] = {}
        rounds: dict[str, list[tuple[float, ...]]] = {}
        whole = 0
        self.say(f"{bucket.bucket}: timing calls of {', '.join(names)}")
        try:
            for name, session in sessions.items():
                try:
                    (first,) = session.ask(Calls(number, 1, warm=0), Timed).ms
                    ms = statistics.median(session.ask(Calls(number, 5), Timed).ms)
                except ContenderFailed as error:
                    bucket.failures.append(f"{name}: {error}")
                    continue
                if name in names:
                    bucket.first_calls[name] = first
                counts[name] = max(LEAST_CALLS, min(MOST_CALLS, round(self.options.seconds * 1e3 / ms)))
                rounds[name] = []
            for whole in range(self.options.rounds):
                self.say(f"{bucket.bucket}: round {whole + 1} of {self.options.rounds}", "detail")
                for name in order.sample(list(counts), len(counts)):
                    try:
                        timed = sessions[name].ask(Calls(number, counts[name]), Timed)
                    except ContenderFailed as error:
                        bucket.failures.append(f"{name}, round {whole + 1}: {error}")
                        del counts[name]
                        continue
                    rounds[name].append(timed.ms)
                    self.waited, self.spent = self.waited + timed.waited, self.spent + sum(timed.ms) / 1e3
            whole = self.options.rounds
        finally:  # also when it is stopped; contenders are compared in the rounds that all of them have
            measured = {name: latency_of(each[: max(1, whole)]) for name, each in rounds.items() if each}
            self._judge(bucket, names, measured)
            self.report.waited = self.waited / self.spent if self.spent else 0.0

    def _judge(self, bucket: BucketReport, names: Sequence[str], latencies: dict[str, Latency]) -> None:
        control, subject = latencies.pop(CONTROL, None), self.report.subject
        if control is not None and "eager" in latencies:
            bucket.noise_floor = noise_floor(latencies["eager"].rounds, control.rounds)
        new = {name: latencies[name] for name in names if name in latencies}
        bucket.latencies.update(new)
        if (own := latencies.get(subject)) is not None:
            bucket.comparisons += [
                compare(name, own.rounds, other.rounds, bucket.noise_floor)
                for name, other in new.items()
                if name != subject
            ]
        if new:
            figures = ", ".join(f"{name} {one.p50:.4g} ms" for name, one in new.items())
            rounds = counted(max(len(one.rounds) for one in new.values()), "round")
            self.say(f"{bucket.bucket}: {figures}, medians of {rounds}", "figure")

    def _measure_threads(self, names: Sequence[str]) -> None:
        for number, bucket in enumerate(self.report.buckets):
            for name in names:
                if name not in bucket.latencies:
                    continue
                found: dict[int, Counted] = {}
                for threads in self.options.threads:
                    self.say(f"{bucket.bucket}: {threads} at a time, {name}", "detail")
                    try:
                        found[threads] = self.sessions[name].ask(
                            Burst(number, threads, self.options.seconds_at_once), Counted
                        )
                    except ContenderFailed as error:
                        bucket.failures.append(f"{name}, {threads} at a time: {error}")
                    else:
                        bucket.throughput[name] = found
                rates = [f"{one.rate}/s {many} at a time" for many, one in found.items()]
                if rates:
                    self.say(f"{bucket.bucket}: {name} {', '.join(rates)}", "figure")

    def _count_launches(self, names: Sequence[str]) -> None:
        if self.subject.device != "cuda":
            return
        for number, bucket in enumerate(self.report.buckets):
            for name in names:
                try:
                    bucket.launches[name] = self.sessions[name].ask(Profile(number), Launches)
                except ContenderFailed as error:
                    bucket.failures.append(f"{name}, launches: {error}")

    def _ask_usage(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self.report.contenders[name].used = self.sessions[name].ask(Usage(), Used)
            except ContenderFailed as error:
                self.report.contenders[name].failure = str(error)

    def _close(self) -> None:
        while self.sessions:
            self.sessions.popitem()[1].kill()

    # -- a trace ------------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """torch.compile decides by itself which sizes are dynamic, and starts from empty caches."""
        options = self.options
        found = TraceReport(options.trace_source, len(options.trace), len(self.distinct))
        self.report.trace = found
        place = {tuple(sorted(dims.items())): number for number, dims in enumerate(self.distinct)}
        order = [place[tuple(sorted(dims.items()))] for dims in options.trace]
        first = len(options.buckets)
        numbers = range(first, first + len(self.distinct))
        for contender in self.contenders:
            if not contender.steady or contender.peer or self.report.contenders[contender.name].failure:
                continue
            self.say(f"{contender.label}: {len(order)} calls along the trace")
            job = self._job(contender.name, numbers, dynamic=None, on_miss="eager")
            own = self.work / f"process-{next(self.numbers)}"
            try:
                session = ContenderProcess(job, own / "caches", own / "session", self._waiting(contender.name))
                try:
                    found.replayed[contender.name] = _along(session, order)
                finally:
                    session.kill()
            except ContenderFailed as error:
                found.failures.append(f"{contender.name}: {error}")


def _along(session: ContenderProcess, order: Sequence[int]) -> Replayed:
    before = session.ask(Usage(), Used)
    ms = [session.ask(Calls(sizes, 1, warm=0), Timed).ms[0] for sizes in order]
    after = session.ask(Usage(), Used)
    misses = after.misses - before.misses
    return Replayed(session.started, tuple(ms), latency_of([ms]), after.graphs - before.graphs, misses)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
