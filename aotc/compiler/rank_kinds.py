"""Which ranks of a parallel model run the same code: found by capturing each, never assumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from torch import nn

from aotc.compiler.capture.collectives import code_digest, name_groups
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.ranges.dynamic_shapes import dynamic_shapes
from aotc.compiler.capture.regions.equal_regions import find_regions, regions_of
from aotc.compiler.capture.unit_graph import Exported, UnitModule, subject_of
from aotc.compiler.messages import Job
from aotc.compiler.publish.unit_record import Snapshot, take_snapshot
from aotc.errors import BuildError
from aotc.machine.targets import Target
from aotc.models.factory import build_module
from aotc.models.fake_ranks import become_rank, parallel_of
from aotc.reads.attributes import read_attributes
from aotc.reads.state_specs import state_specs
from aotc.reads.tensors import named_state, plain_state
from aotc.records import Parallel, part_name, tuned_dims
from aotc.tensors.subclasses import descriptions


class _Facts(NamedTuple):
    """What an artifact holds of one rank: a digest of its code, and by name its attributes and its tensors' forms."""

    code: str
    attributes: dict[str, Any]
    state: dict[str, Any]
    constants: bytes | None


def ranks_of_code(
    job: Job, snapshot: Snapshot, subject: UnitModule, exported: Exported, runs_on: Target
) -> tuple[Parallel | None, list[str]]:
    """Those of the job's ranks that run the captured code, and how each other one differs; None without ranks.

    The model of each further rank is captured: it runs the same if its code, its attributes and the forms of its
    tensors are equal. This process is the job's rank before and after.
    """
    spec, bucket = job.unit.spec, job.unit.bucket
    parallel = parallel_of(spec.parallel)
    if parallel is None:
        return None, []
    first, same, notes = _facts(snapshot, subject, exported.captured, exported), [job.rank], []
    for rank in (job.ranks or range(parallel.size))[1:]:
        made = build_module(spec, Path(job.folder), dummy_weights=job.settings.dummy_weights, rank=rank)
        model = made.to(runs_on.device)
        taken, other = take_snapshot(job.unit, model), subject_of(with_own_regions(job, model, rank), model, runs_on)
        leaves = other.leaves_at(tuned_dims(bucket), 0)
        shapes = dynamic_shapes(other.signature, bucket)
        captured = capture(other.module, other.signature, leaves, shapes, False, other.outside)
        name_groups(captured.graph, parallel)
        if why := next(_differences(job.rank, first, _facts(taken, other, captured, exported)), ""):
            notes.append(f"rank {rank} has code of its own: {why}")
        else:
            same.append(rank)
        del made, model, taken, other, captured, leaves
    become_rank(parallel, job.rank)
    return msgspec.structs.replace(parallel, ranks=tuple(same) if len(same) < parallel.size else ()), notes


def with_own_regions(job: Job, model: nn.Module, rank: int | None = None) -> Job:
    """The job with the regions as a further rank calls them: the inputs of uneven shards have other sizes there.

    Raises BuildError where that rank does not call the unit's region, or calls it at other buckets.
    """
    unit, rank = job.unit, job.rank if rank is None else rank
    if not unit.region or rank == 0:  # the plan found those of rank 0
        return job
    parts = find_regions(unit.spec, model, Path(job.folder))
    if not any((part.region.name, part.bucket) == (unit.region, unit.bucket) for part in parts):
        called = ", ".join(dict.fromkeys(part_name(part.region.name, part.bucket) for part in parts))
        raise BuildError(
            f"rank {rank} calls the regions {called}; rank 0 calls {unit.part}, too",
            hint="name regions that are equal on all ranks, or compile the model whole: leave out `regions`",
            stage="regions",
        )
    return msgspec.structs.replace(job, unit=msgspec.structs.replace(unit, regions=regions_of(parts)))


def _facts(snapshot: Snapshot, subject: UnitModule, captured: Capture, exported: Exported) -> _Facts:
    read = read_attributes(snapshot.guarded, exported.reads)
    attributes = {
        f"{path}.{name}".removeprefix("."): value
        for part in (snapshot.identity.attributes, read)
        for path, values in part.items()
        for name, value in values.items()
    }
    state = plain_state(subject.module)
    subclasses = descriptions(named_state(subject.module))
    forms = {spec.name: spec for spec in state_specs(state, state, digests=False, subclasses=subclasses)}
    return _Facts(code_digest(captured), attributes, forms, snapshot.constants_file)


def _differences(rank: int, one: _Facts, other: _Facts) -> Iterator[str]:
    for name in sorted(one.state.keys() | other.state.keys()):
        specs = [facts.state.get(name) for facts in (one, other)]
        if specs[0] != specs[1]:
            yield f"`{name}` is {_form(specs[1])}, of rank {rank} {_form(specs[0])}"
    for name in sorted(one.attributes.keys() | other.attributes.keys()):
        values = [str(facts.attributes.get(name, "absent")) for facts in (one, other)]
        if values[0] != values[1]:
            yield f"the attribute `{name}` is {values[1][:200]}, of rank {rank} {values[0][:200]}"
    if one.constants != other.constants:
        yield f"buffers that no checkpoint holds have other values than those of rank {rank}"
    if one.code != other.code:
        yield f"its forward is captured as other code than that of rank {rank}"


def _form(spec: Any) -> str:
    if spec is None:
        return "absent"
    within = f" in {spec.subclass}" if spec.subclass is not None else ""
    return f"{spec.dtype} {list(spec.shape)} strides {list(spec.stride)}{within}"
