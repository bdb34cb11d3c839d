"""`aotc verify`: one fresh process for each artifact, a new one after a crash."""

from __future__ import annotations

import signal
import subprocess
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
from aotc.machine.environment import Compat
from aotc.machine.processes import child_command, child_environment, whole_lines
from aotc.manifest import read_manifest
from aotc.models.factory import told
from aotc.provenance import BuiltArtifact
from aotc.records import bucket_name
from aotc.store.reference import Reference, parse_reference
from aotc.verify.cases import model_dispatcher, steps_of
from aotc.verify.comparison import VerifyJob
from aotc.verify.ranks import size_of, variables_of_ranks
from aotc.verify.report import Report
from aotc.verify.runnable import open_runnable, spec_of
from aotc.verify.worker import Message


def verify_manifest(
    path: Path, only: Collection[str], store_path: Path | str, tag: str, seeds: int, compat: Compat = "minor"
) -> Generator[Report]:
    """Verify every model of a manifest, one after another; one that cannot be run here keeps no other from it. A bucket
    of the manifest that a bundle lacks could not run. `compat` is that of `aotc.load`.

    Raises ManifestError, StoreError.
    """
    manifest = read_manifest(path, only)
    for name, spec in manifest.models.items():
        verified: dict[str, set[str]] = {}
        try:
            for report in _verify(str(store_path), Reference(None, name, tag=tag), manifest.folder, seeds, compat):
                verified.setdefault(report.target, set()).add(report.bucket)
                yield report
        except (NotFoundError, CorruptError, SchemaVersionError, SignatureError, VerifyError) as error:
            yield Report(name, "-", "-", "-", "could not run", detail=str(error))
        for target, buckets in verified.items():
            for bucket in map(bucket_name, spec.buckets):
                if not buckets & {bucket, "-"}:
                    detail = "the bundle has no such bucket: its build failed, or the manifest is newer"
                    yield Report(name, bucket, target, "-", "could not run", detail=detail)


def verify_reference(text: str, store_path: Path | str, seeds: int, compat: Compat = "minor") -> Generator[Report]:
    """Verify one reference; the factory that its record names is imported from the working folder.

    Raises ReferenceFormatError, NotFoundError, StoreError, VerifyError where no artifact can be run here; where
    `$AOTC_TRUSTED_KEYS` is set, SignatureError.
    """
    reference = parse_reference(text)
    yield from _verify(reference.store or str(store_path), reference, Path.cwd(), seeds, compat)


def _verify(where: str, reference: Reference, folder: Path, seeds: int, compat: Compat) -> Iterator[Report]:
    opened = open_runnable(where, reference, folder, compat)
    for artifact in opened.artifacts:
        try:
            for report in _verify_artifact(opened.where, opened.pinned, artifact, folder, seeds, compat):
                yield msgspec.structs.replace(report, bundle=opened.digest)
        except AotcError:
            raise
        except Exception as error:  # a record that says what no build writes
            detail = told(error)
            yield Report(
                reference.model, "-", artifact.target, "-", "could not run", detail=detail, bundle=opened.digest
            )


def _verify_artifact(
    where: str, ref: str, artifact: BuiltArtifact, folder: Path, seeds: int, compat: Compat
) -> Iterator[Report]:
    """Follow the worker through its steps; where it dies, say so of the bucket it was at, and go on behind it."""
    spec = spec_of(artifact)
    dispatcher = model_dispatcher(artifact, spec.buckets)
    steps = steps_of(artifact, dispatcher)
    first, end = 0, len(steps)
    while first < end:
        job = VerifyJob(ref, where, spec, str(folder), artifact.target, seeds, compat, first, end)
        last: Message | None = None
        held: list[Report] = []  # the last report on code that had not run before, which says how it is launched
        with _worker(job) as (process, messages):
            for last in messages:
                if last.report:
                    yield from held
                    held = [last.report]
                elif last.launches:
                    held = [msgspec.structs.replace(report, launches=last.launches) for report in held]
                if not artifact.untested:
                    yield from held
                    held = []
            status = process.wait()
        yield from held
        if status == 0:
            break
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        detail = f"the process {how} " + ("while it ran this bucket" if last else "before it ran any bucket")
        last = last or Message(first, "-")
        bucket = bucket_name(dispatcher.variants[steps[last.step].bucket].bucket)
        yield Report(spec.name, bucket, artifact.target, last.sizes, "crashed", detail=detail)
        first = last.step + 1
        end = len(dispatcher.variants)  # with other weights, what crashes would crash again


@contextmanager
def _worker(job: VerifyJob) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[Message]]]:
    """The process that compares, and its messages as they come; who leaves before it has ended ends it."""
    with tempfile.TemporaryDirectory(prefix="aotc-verify-") as work:
        path = Path(work) / "job.json"
        path.write_bytes(msgspec.json.encode(job))
        command = child_command("aotc.verify.worker", str(path))
        with ExitStack() as started:
            ranks = started.enter_context(variables_of_ranks(size)) if (size := size_of(job.spec)) else [{}]
            processes = [
                started.enter_context(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        env=child_environment() | variables,
                    )
                )
                for rank, variables in enumerate(ranks)
            ]
            process = processes[0]
            assert process.stdout is not None
            try:
                yield process, (msgspec.json.decode(line, type=Message) for line in whole_lines(process.stdout))
            finally:
                for each in processes:
                    each.kill()
