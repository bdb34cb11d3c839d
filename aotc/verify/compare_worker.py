"""The process that compares: `python -m aotc.verify.compare_worker JOB.json` writes messages to standard output.

It loads the artifact exactly as a service does, so a report also proves that loading works without a compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aotc.call_table.dispatch import Dispatcher
from aotc.errors import AotcError, BindError, LibraryError
from aotc.machine.benchmarking import call_medians, device_alone
from aotc.machine.processes import Parent
from aotc.models.calls import arguments_of, modes_of, signature_leaves, written_integers_reset
from aotc.models.extreme_calls import AtExtremes
from aotc.models.extreme_inputs import Draw
from aotc.models.factory import told
from aotc.models.tolerance import Judgement
from aotc.picks import timed_launch
from aotc.reads.tensors import plain_state
from aotc.records import Artifact, Dims, LaunchPick, SizeRange, Variant, bucket_name
from aotc.verify.cases import (
    VerifyStep,
    describe_sizes,
    model_dispatcher,
    sizes_at_extremes,
    sizes_to_verify,
    steps_of,
)
from aotc.verify.comparison import Comparison, CouldNotRun, VerifyJob
from aotc.verify.training import STEPS, compare_training
from aotc.verify.verdicts import VerifyReport, VerifyStatus

_NOT_THE_WHOLE = (
    "in eager, the ranks compute something else than the whole model (are their weights parts of those that the "
    "factory makes for it?)"
)


class StepMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the worker says: that it begins with a step at some sizes, and then how that ended. Before the steps with
    extreme inputs, of code that had not run before and was right at all others: how it is launched."""

    step: int
    sizes: str
    report: VerifyReport | None = None
    launches: tuple[LaunchPick | None, ...] = ()


def verify(job: VerifyJob) -> Iterator[StepMessage]:
    """Yield messages for each step and set of sizes. Raises AotcError where nothing can be run."""
    comparison = Comparison(job)
    artifact = comparison.compiled.artifact
    dispatcher = model_dispatcher(artifact, job.spec.buckets)
    right = True
    if comparison.ranks is not None and job.first == 0:
        yield from _whole(job, comparison, dispatcher)
    for message in _steps(job, comparison, artifact, dispatcher, extremes=False):
        if comparison.ranks is not None and message.report is not None:
            message = msgspec.structs.replace(message, report=comparison.ranks.worst(message.report))
        right &= message.report is None or message.report.status == "ok"
        yield message
    if artifact.untested and right and job.first == 0 and job.standalone is None:  # else an earlier step has crashed
        from aotc.verify.compare_worker import measured_launches

        yield StepMessage(job.first, "-", launches=measured_launches(comparison))
    yield from _steps(job, comparison, artifact, dispatcher, extremes=True)


def _whole(job: VerifyJob, comparison: Comparison, dispatcher: Dispatcher) -> Iterator[StepMessage]:
    """Say where the ranks compute something else than the whole model, by eager."""
    from aotc.verify.rank_processes import compare_with_whole

    assert comparison.ranks is not None
    for number, variant in enumerate(dispatcher.variants):
        for dims in sizes_to_verify(dispatcher, number)[:1]:
            bucket = bucket_name(variant.bucket)
            judged = compare_with_whole(job.spec, comparison.folder, comparison.signature, dims, comparison.device)
            wrong = [f"output{path}: {one.detail}" for path, one in judged.items() if not one.ok]
            detail = f"{_NOT_THE_WHOLE}: {wrong[0]}" if wrong else ""
            status: VerifyStatus = "failed" if wrong else "ok"
            report = comparison.ranks.worst(_report(job, bucket, describe_sizes(dims), status, detail=detail))
            if report.status != "ok":
                yield StepMessage(number, describe_sizes(dims), report)


def _steps(
    job: VerifyJob, comparison: Comparison, artifact: Artifact, dispatcher: Dispatcher, extremes: bool
) -> Iterator[StepMessage]:
    for number, step in list(enumerate(steps_of(artifact, dispatcher, job.standalone is not None)))[
        job.first : job.end
    ]:
        if step.extremes is not extremes:
            continue
        name = bucket_name(dispatcher.variants[step.bucket].bucket)
        if step.extremes:
            if (dims := sizes_at_extremes(dispatcher, step.bucket)) is not None:
                yield StepMessage(number, describe_sizes(dims))
                if report := _verify_extremes(comparison, job, name, dims):
                    yield StepMessage(number, describe_sizes(dims), report)
            continue
        sizes = sizes_to_verify(dispatcher, step.bucket)
        if step.weights != "own":
            for dims in sizes[:1]:
                yield StepMessage(number, describe_sizes(dims))
                if report := _verify_weights(comparison, job, name, dims, step):
                    yield StepMessage(number, describe_sizes(dims), report)
            continue
        if not sizes:
            yield StepMessage(
                number, "-", _report(job, name, "-", "failed", detail="no size is dispatched to this bucket")
            )
        for place, dims in enumerate(sizes):
            yield StepMessage(number, describe_sizes(dims))
            # Twice at least: the results of the first call are looked at again after the second.
            seeds = max(job.seeds, len(comparison.forms), 2 if place == 0 else 1)
            steps = (0 if place else STEPS) if artifact.trains else None
            yield StepMessage(number, describe_sizes(dims), _verify_sizes(comparison, job, name, dims, seeds, steps))


def _verify_sizes(
    comparison: Comparison, job: VerifyJob, bucket: str, dims: Dims, seeds: int, steps: int | None = None
) -> VerifyReport:
    """`steps`: of training; None for a model that is not trained."""
    outputs: list[dict[str, Judgement]] = []
    judgements: list[Judgement] = []
    try:
        for seed in range(seeds):
            verdicts = comparison.compare(dims, seed)
            outputs.append(verdicts.outputs)
            judgements += verdicts.all()
        if steps is not None and (not comparison.draws or worst_of(judgements).ok):
            judgements += compare_training(comparison, dims, steps)
    except CouldNotRun as error:
        return _report(job, bucket, describe_sizes(dims), "could not run", detail=str(error))
    except Exception as error:  # of the compiled code: eager can be run
        return _report(job, bucket, describe_sizes(dims), "failed", detail=told(error))
    worst = worst_of(judgements)
    unseen = [path for path in outputs[0] if not any(seen[path].finite for seen in outputs if path in seen)]
    if worst.ok and unseen:
        detail = f"output{unseen[0]} has no finite element, in eager either: nothing shows that it is right; {_FINITE}"
        return _report(job, bucket, describe_sizes(dims), "failed", detail=detail)
    if not worst.ok and comparison.draws:
        worst = msgspec.structs.replace(worst, detail=f"{worst.detail}; {_RANDOM}")
    status: VerifyStatus = "ok" if worst.ok else "failed"
    return _report(job, bucket, describe_sizes(dims), status, worst)


def _verify_weights(
    comparison: Comparison, job: VerifyJob, bucket: str, dims: Dims, step: VerifyStep
) -> VerifyReport | None:
    """Compare with weights other than the factory's. None if all is right, or if nothing can be said."""
    compare = {"other": comparison.compare_with_other_weights, "swapped": comparison.compare_with_swapped_weights}
    try:
        verdicts = compare[step.weights](dims)
    except CouldNotRun:  # with weights other than the caller's
        return None
    except Exception as error:
        failed = _report(job, bucket, describe_sizes(dims), "failed", detail=f"with other weights: {told(error)}")
        return msgspec.structs.replace(failed, weights=step.weights)
    if verdicts is None or comparison.overflows:
        return None
    worst = worst_of(verdicts.all())
    if worst.ok:
        return None
    detail = f"with other weights, {worst.detail}; {_RANDOM if comparison.draws else _OTHER_WEIGHTS}"
    failed = _report(job, bucket, describe_sizes(dims), "failed", msgspec.structs.replace(worst, detail=detail))
    return msgspec.structs.replace(failed, weights=step.weights)


def _verify_extremes(comparison: Comparison, job: VerifyJob, bucket: str, dims: Dims) -> VerifyReport | None:
    """Compare with extreme inputs. None if all is right; where nothing could be compared, a report that says why."""
    sizes, skipped = describe_sizes(dims), ""
    draws: tuple[Draw, ...] = ("extreme", "edges")
    for draw in draws:
        try:
            found = comparison.compare_at_extremes(dims, draw)
        except Exception as error:  # of an init of the user's
            found = AtExtremes(skipped=told(error))
        if found.wrong:
            failed = _report(job, bucket, sizes, "failed", detail=f"with extreme inputs, {found.wrong}")
            return msgspec.structs.replace(failed, extremes=draw)
        skipped = skipped or found.skipped
    if not skipped:
        return None
    report = _report(job, bucket, sizes, "ok", detail=f"not compared with extreme inputs: {skipped}")
    return msgspec.structs.replace(report, extremes=draws[0])


def worst_of(judgements: Sequence[Judgement]) -> Judgement:
    return max(judgements, key=lambda j: (not j.ok, j.error / j.allowed if j.allowed else 0.0))


_RANDOM = (
    "the model draws random numbers, and compiled code draws others: build it with `options: {fallback_random: true}`, "
    "or verify it with a factory that leaves them out, or takes them as an input"
)
_OTHER_WEIGHTS = (
    "where it is right with those of its build, it may hold some of them: then no other checkpoint can be served"
)
_FINITE = "give the inputs an `init`, or the factory weights, with which the model computes finite numbers"


def _report(
    job: VerifyJob, bucket: str, sizes: str, status: VerifyStatus, judgement: Judgement | None = None, detail: str = ""
) -> VerifyReport:
    if judgement is None:
        return VerifyReport(job.spec.name, bucket, job.target, sizes, status, detail=detail)
    return VerifyReport(
        job.spec.name,
        bucket,
        job.target,
        sizes,
        status,
        judgement.error,
        judgement.eager_error,
        judgement.allowed,
        judgement.detail or detail,
    )


# -- how each variant is launched --------------------------------------------------------------------------------------


def measured_launches(comparison: Comparison) -> tuple[LaunchPick | None, ...]:
    """The launch of each variant of the artifact, in their order; None where it is not a matter of time.

    The buckets of a region, and those with a range, are launched as their record says; and all of them where the
    manifest says how. The halves of a training step are not launched as graphs.
    """
    artifact, spec = comparison.compiled.artifact, comparison.spec
    if artifact.regions or artifact.trains or spec.cuda_graphs != "auto" or comparison.device.type != "cuda":
        return tuple(None for _ in artifact.variants)
    with modes_of(spec, "cuda"):
        direct, graph = (comparison.launched(how) for how in ("never", "always"))
        return tuple(_measured(comparison, variant, direct, graph) for variant in artifact.variants)


def _measured(comparison: Comparison, variant: Variant, direct: Any, graph: Any) -> LaunchPick | None:
    if any(isinstance(size, SizeRange) for size in variant.bucket.values()):
        return None
    spec, signature = comparison.spec, comparison.signature
    dims = {name: size for name, size in variant.bucket.items() if isinstance(size, int)}
    leaves = signature_leaves(spec, signature, dims, comparison.device, 0, Path(comparison.job.folder))
    args, kwargs = arguments_of(signature, leaves)

    state = plain_state(comparison.module)
    written = [leaves[index] for index in variant.mutated_leaves]
    reset = written_integers_reset([*written, *(state[name] for name in variant.mutated_state)])

    def call_of(compiled: Any) -> Callable[[], Any]:
        def call() -> None:
            reset()
            compiled(*args, **kwargs)

        return call

    try:
        call_of(graph)()
    except LibraryError as error:
        return LaunchPick(graph=False, reason=f"no graph can be captured: {error.message}"[:500])
    with device_alone(comparison.device):
        return timed_launch(*call_medians(call_of(direct), call_of(graph)))


def main() -> int:
    parent = Parent()
    job = parent.job(VerifyJob)
    try:
        for message in verify(job):
            parent.send(message)
    except Exception as error:  # the model's own, too
        if isinstance(error, BindError):  # its hints are for callers of `aotc.load`
            error.issues = tuple(msgspec.structs.replace(issue, hint="") for issue in error.issues)
            error.hint = "the factory's model is not the one that was built: build it again with `aotc build`"
        detail = str(error) if isinstance(error, AotcError) else told(error)
        parent.send(StepMessage(job.first, "-", _report(job, "-", "-", "could not run", detail=detail)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
