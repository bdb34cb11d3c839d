"""Measures a release for its gate: starts in fresh processes, and calls beside those of an earlier release.

As `aotc bench` measures: every process has caches of its own, rounds of both releases alternate, and a second process
of the release itself says how much two equal processes differ.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from aotc.errors import VerifyError
from aotc.tools.bench.bench_setup import prepared
from aotc.tools.bench.contender_messages import Calls, ContenderJob, Timed
from aotc.tools.bench.contender_process import ContenderFailed, ContenderProcess
from aotc.tools.bench.contenders import Attachment
from aotc.tools.bench.latency_comparison import LatencyRatio, compare, noise_floor
from aotc.tools.bench.subject import BenchSubject, CalledSizes

STARTS = 3
LEAST_ROUNDS, ROUNDS = 7, 15
"""Fewer than six have no interval."""
SECONDS = 0.1
"""Of calls of one release in one round."""
LONGEST = 20.0
"""Seconds for a bucket, after which the least number of rounds is enough: on a busy machine."""
LEAST_CALLS, MOST_CALLS = 3, 200


class StartTimes(NamedTuple):
    """Seconds, each the median of the starts: from the module to a callable, and from the process to its output."""

    load: float
    first_output: float


class Measuring:
    """The processes of one release, over one folder of inputs."""

    def __init__(self, subject: BenchSubject, work: Path) -> None:
        self.subject, self.work = subject, work
        self.buckets: Sequence[CalledSizes] = subject.buckets
        self._count = 0
        self._prepare()

    def _prepare(self) -> None:
        subject = self.subject
        frozen = subject.spec.weights != "live"
        self.checkpoint = "" if frozen or subject.spec.regions else str(self.work / "weights.safetensors")
        sizes = [one.dims for one in self.buckets]
        self.job, _ = prepared(subject, sizes, self.work, self.checkpoint)

    @contextmanager
    def session(self, ref: str, contender: str = "aotc") -> Iterator[ContenderProcess]:
        """A process that serves the bundle `ref`. Raises ContenderFailed."""
        subject = self.subject
        attachment = Attachment(ref, subject.target, subject.device, self.checkpoint, "")
        job = ContenderJob(contender, subject.spec, str(subject.folder), attachment, self.job.inputs, self.job.expected)
        self._count += 1
        own = self.work / f"process-{self._count}"
        session = ContenderProcess(job, own / "caches", own / "session")
        try:
            yield session
        finally:
            session.close()

    def starts(self) -> StartTimes:
        """Raises VerifyError where the release does not start."""
        found = []
        try:
            for _ in range(STARTS):
                with self.session(self.subject.ref) as session:
                    found.append(session.started)
        except ContenderFailed as error:
            raise VerifyError(f"{self.subject.spec.name} does not start: {error}") from error
        load = statistics.median(one.seconds["load"] for one in found)
        return StartTimes(load, statistics.median(one.first_output for one in found))

    def beside(self, baseline: str) -> dict[str, LatencyRatio | str]:
        """By bucket, the baseline's calls against the release's; a text where the baseline cannot be called.

        Where it refuses the module, as one of older code, both are started from the weights alone.
        """
        failure = ""
        for contender in ("aotc", *(("aotc-file",) if Path(self.checkpoint or "/none").exists() else ())):
            try:
                with ExitStack() as stack:
                    names = (self.subject.ref, self.subject.ref, baseline)
                    own, control, other = (stack.enter_context(self.session(name, contender)) for name in names)
                    return {
                        sizes.bucket: _compared(number, own, control, other)
                        for number, sizes in enumerate(self.buckets)
                    }
            except ContenderFailed as error:
                failure = failure or error.first_line
        return {sizes.bucket: failure for sizes in self.buckets}


def _compared(
    number: int, own: ContenderProcess, control: ContenderProcess, other: ContenderProcess
) -> LatencyRatio | str:
    sessions = {"own": own, "control": control, "other": other}
    try:
        ms = statistics.median(own.ask(Calls(number, 5), Timed).ms)
        for session in (control, other):
            session.ask(Calls(number, 3), Timed)
        count = max(LEAST_CALLS, min(MOST_CALLS, round(SECONDS * 1e3 / ms)))
        rounds: dict[str, list[float]] = {name: [] for name in sessions}
        order, began = random.Random(0), time.monotonic()
        for turn in range(ROUNDS):
            if turn >= LEAST_ROUNDS and time.monotonic() - began > LONGEST:
                break
            for name in order.sample(list(sessions), len(sessions)):
                rounds[name].append(statistics.median(sessions[name].ask(Calls(number, count), Timed).ms))
    except ContenderFailed as error:
        return error.first_line
    return compare("the baseline", rounds["own"], rounds["other"], noise_floor(rounds["own"], rounds["control"]))


@contextmanager
def measuring(subject: BenchSubject) -> Iterator[Measuring]:
    """Raises VerifyError where the model itself cannot be run."""
    with tempfile.TemporaryDirectory(prefix="aotc-gate-", ignore_cleanup_errors=True) as work:
        yield Measuring(subject, Path(work))
