"""Buckets that torch.export can capture, in the place of those that it refuses: `aotc build --fix-buckets`.

Each bucket of a model is captured, and nothing is compiled. What a refusal tells are fields of its BuildError:

- `dim` and `instead`: sizes to have in the place of the dim's range. They are tried in turn.
- `related`: a dim, and the expression of other dims that its size must be, which is put into the shapes.
- `in_eager`: the model itself fails at these sizes.

Also the process in which `aotc.record` and `aotc init`, which import no compiler, check what they wrote:

    python -m aotc.compiler.fix_buckets JOB.json
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from aotc.amounts import listed
from aotc.compiler.capture.ranges.bucket_proposals import sizes_of
from aotc.compiler.capture.regions.equal_regions import find_regions, regions_of
from aotc.compiler.capture.regions.suggest_regions import silent, suggest_regions
from aotc.compiler.explain_failure import explain_failure
from aotc.compiler.messages import Job, Unit
from aotc.compiler.unit import capture_unit
from aotc.compiler.value_trials import Tried, try_values
from aotc.errors import AotcError, BuildError, EnvironmentMismatchError, ManifestError
from aotc.expressions import Expression
from aotc.machine.native_target import resolve_target
from aotc.machine.processes import Parent
from aotc.machine.targets import Target, parse_target
from aotc.manifest import ModelSpec, read_manifest
from aotc.manifest.edit import BucketChange, ByRegions, CheckJob, ModelEdit, Problem
from aotc.manifest.recorded_values import recorded_references
from aotc.manifest.sizes import distinct_buckets
from aotc.models.auto_inputs import with_inputs
from aotc.models.factory import build_module
from aotc.models.fake_ranks import group_left
from aotc.models.input_forms import with_inits
from aotc.records import Bucket, Size, SizeRange, bucket_name, has_range, takes, tuned_dims

MOST_BUCKETS = 8
"""Buckets in the place of one."""
MOST_TRIES = 24
"""Captures for one bucket of the manifest."""


def fix_buckets(spec: ModelSpec, folder: Path, so_far: Callable[[ModelEdit], None] = lambda edit: None) -> ModelEdit:
    """Capture every bucket of a model, and find others for those that are refused.

    Of a bucket that no other buckets can replace, the error is the `problem`. The other buckets are tried all the same.
    `so_far` is called after each bucket that is not the last.

    Raises ManifestError for a factory that fails.
    """
    changes: list[BucketChange] = []
    problems: list[Problem] = []
    for number, bucket in enumerate(spec.buckets):
        if number:
            so_far(
                ModelEdit(spec.name, tuple(changes), problems[0] if problems else None, left=len(spec.buckets) - number)
            )
        with group_left():
            found = _Tries(spec, folder, bucket).changed()
        if isinstance(found, Problem) and found.related and (other := _with_related(spec, *found.related)):
            edit = fix_buckets(other, folder, so_far)
            return msgspec.structs.replace(edit, related=dict([found.related, *edit.related.items()]))
        if isinstance(found, Problem):
            problems.append(found)
        elif found.instead != (bucket,):
            changes.append(found)
    return ModelEdit(spec.name, tuple(changes), problems[0] if problems else None)


def _with_related(spec: ModelSpec, dim: str, size: str) -> ModelSpec | None:
    """The model with an expression in the place of a dim; None where a bucket holds other sizes of the dim."""
    by = Expression(size)
    for bucket in spec.buckets:
        if not by.names <= bucket.keys() - {dim}:
            return None
        for end in ("min", "max", "tune_at"):
            dims = {
                name: getattr(sizes, end) if isinstance(sizes, SizeRange) else sizes for name, sizes in bucket.items()
            }
            if dims[dim] != by.evaluate(dims):
                return None

    def put(form: Any, of_shape: bool = False) -> Any:
        if isinstance(form, Mapping):
            return {key: put(value, key in ("shape", "randint")) for key, value in form.items()}
        if isinstance(form, list):
            return [put(value, of_shape) for value in form]
        if of_shape and isinstance(form, str):
            return size if form == dim else re.sub(rf"\b{dim}\b", f"({size})", form)
        return form

    buckets = tuple({name: sizes for name, sizes in bucket.items() if name != dim} for bucket in spec.buckets)
    return msgspec.structs.replace(spec, inputs=put(spec.inputs), buckets=buckets)


def in_parts(spec: ModelSpec, folder: Path, problem: Problem) -> ModelEdit | None:
    """The regions that can be captured of a model that has this problem as a whole, with their buckets; None where
    there are none, or the model has regions."""
    if spec.regions or spec.weights == "frozen":
        return None
    try:
        suggestion = suggest_regions(spec, folder)
    except BuildError:  # the model fails when it is run
        return None
    if not suggestion.regions:
        return None
    by_region = fix_buckets(msgspec.structs.replace(spec, regions=suggestion.regions), folder)
    if by_region.problem is not None:
        return None
    regions = ByRegions(suggestion.regions, suggestion.eager, suggestion.time)
    return ModelEdit(spec.name, by_region.changes, problem, regions)


@dataclass
class _Tries:
    """The tries for one bucket of the manifest."""

    spec: ModelSpec
    folder: Path
    bucket: Bucket
    count: int = 0
    reasons: list[str] = field(default_factory=list)

    def changed(self) -> BucketChange | Problem:
        done: list[Bucket] = []
        todo = [self.bucket]
        while todo:
            bucket = todo.pop(0)
            if (error := self.refusal(bucket)) is None:
                done.append(bucket)
                continue
            if "in_eager" in error.fields and bucket != self.bucket:  # a size that the range should not have had
                self.reasons.append(f"{bucket_name(bucket)}: {error.message}")
                continue
            instead = self.instead(bucket, error)
            if not instead or len(done) + len(todo) + len(instead) > MOST_BUCKETS:
                return _problem(bucket, error)
            self.reasons.append(error.message)
            todo = [*instead, *todo]
        if not done:
            return Problem(self.bucket, self.reasons[0])
        return BucketChange(self.bucket, tuple(done), tuple(dict.fromkeys(self.reasons)))

    def refusal(self, bucket: Bucket) -> BuildError | None:
        self.count += 1
        return why_not_captured(self.spec, self.folder, bucket)

    def instead(self, bucket: Bucket, error: BuildError) -> list[Bucket]:
        """The buckets to try in the place of a refused one; none where it cannot be helped."""
        if self.count > MOST_TRIES or not has_range(bucket) or "related" in error.fields:
            return []
        dim, sizes = error.fields.get("dim", ""), bucket.get(error.fields.get("dim", ""))
        if isinstance(sizes, SizeRange) and (instead := error.fields.get("instead", ())):
            if len(instead) > MOST_BUCKETS:  # the sizes that one graph takes lie scattered
                instead = (sizes.tune_at,)
            fixed = all(isinstance(size, int) for size in instead)
            return _with(bucket, {dim: _each(sizes, instead) if fixed else instead})
        return self._fixed(bucket)

    def _fixed(self, bucket: Bucket) -> list[Bucket]:
        """Fixed sizes for the dim whose range is at fault, or for all; none where fixed sizes are refused, too."""
        tuned = tuned_dims(bucket)
        if self.refusal(dict(tuned)) is not None:
            return []
        ranges = {dim: size for dim, size in bucket.items() if isinstance(size, SizeRange)}
        if len(ranges) > 1:
            for dim in ranges:
                if self.refusal({**bucket, dim: tuned[dim]}) is None:
                    ranges = {dim: ranges[dim]}
                    break
        return _with(bucket, {dim: _each(size, (tuned[dim],)) for dim, size in ranges.items()})


def _with(bucket: Bucket, sizes: dict[str, Sequence[Size]]) -> list[Bucket]:
    """The bucket with each combination of these sizes."""
    return [{**bucket, **dict(zip(sizes, one, strict=True))} for one in itertools.product(*sizes.values())]


def _each(sizes: SizeRange, otherwise: Sequence[Size]) -> Sequence[Size]:
    """All sizes of a range where these are few."""
    every = sizes_of(sizes)
    return list(every) if len(every) <= MOST_BUCKETS else otherwise


def why_not_captured(spec: ModelSpec, folder: Path, bucket: Bucket) -> BuildError | None:
    """The error of capturing the model, or each of its regions, at a bucket; None where it can be captured.

    Raises ManifestError for a factory that fails.
    """
    spec = msgspec.structs.replace(spec, buckets=(bucket,))
    target = _target(spec)
    try:
        with silent():
            for job in _jobs(spec, folder, bucket, target):
                capture_unit(job, lambda stage: None)
    except ManifestError:
        raise
    except Exception as error:  # of the model, torch.export and aotc's checks
        return explain_failure(error, "export")
    return None


def _jobs(spec: ModelSpec, folder: Path, bucket: Bucket, target: Target) -> Iterable[Job]:
    if not spec.regions:
        yield Job(Unit(spec, bucket, target, {}, ""), str(folder), "")
        return
    parts = find_regions(spec, build_module(spec, folder).to(target.device), folder)
    regions = regions_of(parts)
    for region, of_region, sizes in parts:
        unit = Unit(spec, of_region, target, {}, "", region=region.name, regions=regions, sizes=sizes)
        yield Job(unit, str(folder), "")


def _target(spec: ModelSpec) -> Target:
    """The model's first target; this machine's, where the first needs a GPU that is not here."""
    here = parse_target(resolve_target("native"))
    try:
        target = parse_target(resolve_target(spec.targets[0]))
    except EnvironmentMismatchError:
        return here
    return target if target.device == "cpu" or target == here else here


def _problem(bucket: Bucket, error: BuildError) -> Problem:
    fields = error.fields
    in_parts = not fields.keys() & {"in_eager", "related"}
    source, related = str(fields.get("source", "")), fields.get("related")
    return Problem(bucket, error.message.removeprefix("export: "), error.hint, source, in_parts, related)


class _Values:
    """A model's spec with what was found of its recorded values, and an edit of that as one of the manifest's."""

    def __init__(self, spec: ModelSpec, tried: Tried) -> None:
        self.inits, self.changes = tried.inits, tuple(_only_recorded(spec, tried))
        self.spec = with_inits(spec, tried.inits)
        by_bucket = {bucket_name(change.bucket): change.instead for change in self.changes}
        buckets = [by_bucket.get(bucket_name(bucket), (bucket,)) for bucket in spec.buckets]
        self.spec = msgspec.structs.replace(self.spec, buckets=distinct_buckets(itertools.chain.from_iterable(buckets)))

    def edit(self, found: ModelEdit) -> ModelEdit:
        return msgspec.structs.replace(found, inits=self.inits, changes=(*self.changes, *found.changes))


def _only_recorded(spec: ModelSpec, tried: Tried) -> Iterator[BucketChange]:
    """For each range, the recorded sizes in it, where the recorded values go with these alone."""
    for bucket in spec.buckets if tried.fixed else ():
        sizes = [dims for dims in tried.fixed if all(takes(size, dims[dim]) for dim, size in bucket.items())]
        if has_range(bucket) and sizes:
            kept = [leaf.path for leaf, _ in recorded_references(spec) if leaf.path not in tried.inits]
            named = listed([f"`{path}`" for path in kept], 3)
            reason = f"the model takes the recorded values of {named} at the recorded sizes only"
            yield BucketChange(bucket, tuple(dict(dims) for dims in sizes[:MOST_BUCKETS]), (reason,))


def _send(parent: Parent, values: _Values, found: ModelEdit) -> None:
    parent.send(values.edit(found))


def main() -> None:
    """Send a `ModelEdit` for each model; and another one where regions help, which are tried when all models have been
    captured, since that takes long."""
    parent = Parent()
    job = parent.job(CheckJob)
    manifest = read_manifest(Path(job.manifest), job.models)
    # All of them before anything is captured: a fork of a process that has threads may wait for one for ever.
    tried = {spec.name: try_values(spec, manifest.folder) for spec in manifest.models.values() if spec.recorded}
    refused: list[tuple[ModelSpec, Problem, _Values]] = []
    for spec in manifest.models.values():
        values = _Values(spec, tried.get(spec.name, Tried()))
        try:
            full = with_inputs(manifest, values.spec, build_module(spec, manifest.folder))
            found = fix_buckets(full, manifest.folder, functools.partial(_send, parent, values))
        except AotcError as error:
            issue = error.issues[0] if error.issues else None
            problem = Problem({}, issue.message if issue else error.message, error.hint)
            found = ModelEdit(spec.name, problem=problem)
        _send(parent, values, found)
        if found.problem is not None and found.problem.in_parts:
            refused.append((full, found.problem, values))
    for spec, problem, values in refused:
        if edit := in_parts(spec, manifest.folder, problem):
            _send(parent, values, edit)


if __name__ == "__main__":
    main()
