"""`aotc verify`: one fresh process for each artifact, a new one after a crash."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from aotc.errors import (
    AotcError,
    CorruptError,
    NotFoundError,
    SchemaVersionError,
    SignatureError,
    VerifyError,
)
from aotc.machine.processes import Child, child_environment
from aotc.machine.this_host import Compat
from aotc.manifest import read_manifest
from aotc.models.factory import told
from aotc.provenance import BuiltArtifact
from aotc.records import bucket_name
from aotc.store.reference import Reference, parse_reference
from aotc.verify.cases import model_dispatcher, steps_of
from aotc.verify.compare_worker import StepMessage
from aotc.verify.comparison import VerifyJob
from aotc.verify.rank_processes import size_of, variables_of_ranks
from aotc.verify.runnable import open_runnable, spec_of
from aotc.verify.verdicts import VerifyReport


def verify_manifest(
    path: Path,
    only: Collection[str],
    store_path: Path | str,
    tag: str,
    seeds: int,
    compat: Compat = "minor",
    standalone: str | None = None,
) -> Generator[VerifyReport]:
    """Verify every model of a manifest, one after another; one that cannot be run here keeps no other from it. A bucket
    of the manifest that a bundle lacks could not run. `compat` is that of `aotc.load`, `standalone` as of `VerifyJob`.

    Raises ManifestError, StoreError.
    """
    manifest = read_manifest(path, only)
    for name, spec in manifest.models.items():
        verified: dict[str, set[str]] = {}
        try:
            for report in _verify(
                str(store_path), Reference(None, name, tag=tag), manifest.folder, seeds, compat, standalone
            ):
                verified.setdefault(report.target, set()).add(report.bucket)
                yield report
        except (NotFoundError, CorruptError, SchemaVersionError, SignatureError, VerifyError) as error:
            yield VerifyReport(name, "-", "-", "-", "could not run", detail=str(error))
        for target, buckets in verified.items():
            for bucket in map(bucket_name, spec.buckets):
                if not buckets & {bucket, "-"}:
                    detail = "the bundle has no such bucket: its build failed, or the manifest is newer"
                    yield VerifyReport(name, bucket, target, "-", "could not run", detail=detail)


def verify_reference(
    text: str, store_path: Path | str, seeds: int, compat: Compat = "minor", standalone: str | None = None
) -> Generator[VerifyReport]:
    """Verify one reference; the factory that its record names is imported from the working folder.

    Raises ReferenceFormatError, NotFoundError, StoreError, VerifyError where no artifact can be run here; where
    `$AOTC_TRUSTED_KEYS` is set, SignatureError.
    """
    reference = parse_reference(text)
    yield from _verify(reference.store or str(store_path), reference, Path.cwd(), seeds, compat, standalone)


def _verify(
    where: str, reference: Reference, folder: Path, seeds: int, compat: Compat, standalone: str | None
) -> Iterator[VerifyReport]:
    opened = open_runnable(where, reference, folder, compat, standalone or "")
    for artifact in opened.artifacts:
        try:
            for report in _verify_artifact(opened.where, opened.pinned, artifact, folder, seeds, compat, standalone):
                yield msgspec.structs.replace(report, bundle=opened.digest)
        except AotcError:
            raise
        except Exception as error:  # a record that says what no build writes
            detail = told(error)
            yield VerifyReport(
                reference.model, "-", artifact.target, "-", "could not run", detail=detail, bundle=opened.digest
            )


def _verify_artifact(
    where: str, ref: str, artifact: BuiltArtifact, folder: Path, seeds: int, compat: Compat, standalone: str | None
) -> Iterator[VerifyReport]:
    """Follow the worker through its steps; where it dies, say so of the bucket it was at, and go on behind it."""
    spec = spec_of(artifact)
    dispatcher = model_dispatcher(artifact, spec.buckets)
    steps = steps_of(artifact, dispatcher, standalone is not None)
    first, end = 0, len(steps)
    while first < end:
        job = VerifyJob(ref, where, spec, str(folder), artifact.target, seeds, compat, first, end, standalone)
        last: StepMessage | None = None
        held: list[VerifyReport] = []  # the last report on code that had not run before, which says how it is launched
        with _worker(job) as child:
            for last in child.messages(StepMessage):
                if last.report:
                    yield from held
                    held = [last.report]
                elif last.launches:
                    held = [msgspec.structs.replace(report, launches=last.launches) for report in held]
                if not artifact.untested:
                    yield from held
                    held = []
            ended = child.ended()
        yield from held
        if not ended:
            break
        detail = f"the process {ended} " + ("while it ran this bucket" if last else "before it ran any bucket")
        last = last or StepMessage(first, "-")
        bucket = bucket_name(dispatcher.variants[steps[last.step].bucket].bucket)
        yield VerifyReport(spec.name, bucket, artifact.target, last.sizes, "crashed", detail=detail)
        first = last.step + 1
        end = len(dispatcher.variants)  # with other weights, what crashes would crash again


@contextmanager
def _worker(job: VerifyJob) -> Iterator[Child]:
    """The process that compares; of a parallel model the first of its ranks, which reports for all."""
    with tempfile.TemporaryDirectory(prefix="aotc-verify-") as work, ExitStack() as started:
        ranks = started.enter_context(variables_of_ranks(size)) if (size := size_of(job.spec)) else [{}]
        first, *_ = [
            started.enter_context(
                Child("aotc.verify.compare_worker", job, Path(work), child_environment() | variables, silent=rank > 0)
            )
            for rank, variables in enumerate(ranks)
        ]
        yield first
