"""Whether all ranks of a parallel model run one code: found by capturing each, never assumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from aotc.compiler.capture.collectives import code_digest, name_groups
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.ranges.dynamic_shapes import dynamic_shapes
from aotc.compiler.capture.unit_graph import Exported, Subject, subject_of
from aotc.compiler.publish.record import Snapshot, take_snapshot
from aotc.compiler.workers.messages import Job
from aotc.errors import BuildError, Issue
from aotc.machine.targets import Target
from aotc.models.factory import build_module
from aotc.models.ranks import become_rank, parallel_of
from aotc.records import tuned_dims
from aotc.snapshot.attributes import read_attributes
from aotc.snapshot.tensors import named_state, plain_state, state_specs
from aotc.tensors.subclasses import descriptions


class _Facts(NamedTuple):
    """What an artifact holds of one rank: a digest of its code, and by name its attributes and its tensors' forms."""

    code: str
    attributes: dict[str, Any]
    state: dict[str, Any]
    constants: bytes | None


def check_ranks(job: Job, snapshot: Snapshot, subject: Subject, exported: Exported, runs_on: Target) -> None:
    """Capture the model of each further rank. This process is rank 0 before and after.

    Raises BuildError where a rank differs from the first in its code, its attributes or the forms of its tensors.
    """
    parallel = parallel_of(job.spec.parallel)
    if parallel is None:
        return
    first = _facts(snapshot, subject, exported.captured, exported)
    issues: list[Issue] = []
    for rank in range(1, parallel.size):
        model = build_module(job.spec, Path(job.folder), rank=rank).to(runs_on.device)
        taken, other = take_snapshot(job, model), subject_of(job, model, runs_on)
        leaves = other.leaves_at(tuned_dims(job.bucket), 0)
        shapes = dynamic_shapes(other.signature, job.bucket)
        captured = capture(other.module, other.signature, leaves, shapes, False, other.outside)
        name_groups(captured.graph, parallel)
        issues += _differences(rank, first, _facts(taken, other, captured, exported))
        del model, taken, other, captured, leaves
    become_rank(parallel)
    if issues:
        raise BuildError(
            f"the {parallel.size} ranks of `{job.spec.name}` cannot share one code",
            hint="let the factory make equal parts (sizes that the number of ranks divides), and let forward read the "
            "rank from tensors only",
            issues=tuple(issues[:20]),
            stage="export",
        )


def _facts(snapshot: Snapshot, subject: Subject, captured: Capture, exported: Exported) -> _Facts:
    read = read_attributes(snapshot.guarded, exported.reads)
    attributes = {
        f"{path}.{name}".removeprefix("."): value
        for part in (snapshot.attributes, read)
        for path, values in part.items()
        for name, value in values.items()
    }
    state = plain_state(subject.module)
    subclasses = descriptions(named_state(subject.module))
    forms = {spec.name: spec for spec in state_specs(state, state, digests=False, subclasses=subclasses)}
    return _Facts(code_digest(captured), attributes, forms, snapshot.constants_file)


def _differences(rank: int, one: _Facts, other: _Facts) -> Iterator[Issue]:
    where = f"rank {rank}"
    for name in sorted(one.state.keys() | other.state.keys()):
        forms = [_form(facts.state.get(name)) for facts in (one, other)]
        if forms[0] != forms[1]:
            yield Issue(f"`{name}` is {forms[1]}, of rank 0 {forms[0]}", where, *forms)
    for name in sorted(one.attributes.keys() | other.attributes.keys()):
        values = [str(facts.attributes.get(name, "absent"))[:200] for facts in (one, other)]
        if values[0] != values[1]:
            yield Issue(f"the attribute `{name}` is {values[1]}, of rank 0 {values[0]}", where, *values)
    if one.constants != other.constants:
        yield Issue("buffers that no checkpoint holds have other values than those of rank 0", where)
    if one.code != other.code:
        yield Issue("its forward is captured as other code than that of rank 0", where, one.code, other.code)


def _form(spec: Any) -> str:
    if spec is None:
        return "absent"
    within = f" in {spec.subclass}" if spec.subclass is not None else ""
    return f"{spec.dtype} {list(spec.shape)} strides {list(spec.stride)}{within}"
