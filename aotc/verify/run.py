"""`aotc verify`: one fresh process for each artifact, a new one after a crash."""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from aotc.errors import (
    AotcError,
    CorruptError,
    EnvironmentMismatchError,
    NotFoundError,
    SchemaVersionError,
    SignatureError,
    VerifyError,
)
from aotc.machine.environment import resolve_target
from aotc.machine.processes import child_command, child_environment, whole_lines
from aotc.machine.targets import parse_target
from aotc.manifest import ModelSpec, read_manifest
from aotc.manifest.read import check_path
from aotc.models.factory import told
from aotc.provenance import BuiltArtifact
from aotc.records import bucket_name
from aotc.runtime.fetch import fetch
from aotc.store.layout.built import read_built
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, is_remote, parse_reference
from aotc.store.signing.trust import read_trust, read_trusted
from aotc.verify.cases import model_dispatcher, steps_of
from aotc.verify.comparison import VerifyJob
from aotc.verify.report import Report
from aotc.verify.worker import Message


def verify_manifest(
    path: Path, only: Collection[str], store_path: Path | str, tag: str, seeds: int
) -> Generator[Report]:
    """Verify every model of a manifest, one after another; one that cannot be run here keeps no other from it. A bucket
    of the manifest that a bundle lacks could not run.

    Raises ManifestError, StoreError.
    """
    manifest = read_manifest(path, only)
    for name, spec in manifest.models.items():
        verified: dict[str, set[str]] = {}
        try:
            for report in _verify(str(store_path), Reference(None, name, tag=tag), manifest.folder, seeds):
                verified.setdefault(report.target, set()).add(report.bucket)
                yield report
        except (NotFoundError, CorruptError, SchemaVersionError, SignatureError, VerifyError) as error:
            yield Report(name, "-", "-", "-", "could not run", detail=str(error))
        for target, buckets in verified.items():
            for bucket in map(bucket_name, spec.buckets):
                if not buckets & {bucket, "-"}:
                    detail = "the bundle has no such bucket: its build failed, or the manifest is newer"
                    yield Report(name, bucket, target, "-", "could not run", detail=detail)


def verify_reference(text: str, store_path: Path | str, seeds: int) -> Generator[Report]:
    """Verify one reference; the factory that its record names is imported from the working folder.

    Raises ReferenceFormatError, NotFoundError, StoreError, VerifyError where no artifact can be run here; where
    `$AOTC_TRUSTED_KEYS` is set, SignatureError.
    """
    reference = parse_reference(text)
    yield from _verify(reference.store or str(store_path), reference, Path.cwd(), seeds)


def _verify(where: str, reference: Reference, folder: Path, seeds: int) -> Iterator[Report]:
    check_path(folder)
    if is_remote(where):
        source = Reference(where, reference.model, tag=reference.tag, digest=reference.digest)
        fetched = parse_reference(fetch(str(source)))
        where, reference = str(fetched.store), fetched
    store = Store.open(Path(where))
    bundle = read_trusted(store, reference, read_trust())  # before the factory that the record names is imported
    there = [entry for entry in bundle.artifacts if store.blobs.has(entry.digest, entry.size)]
    artifacts = [read_built(store, entry) for entry in there]
    runnable = [artifact for artifact in artifacts if _runs_here(artifact)]
    if not runnable:
        targets = ", ".join(artifact.target for artifact in artifacts)
        raise VerifyError(
            f"{reference.name} holds {targets}; none of it runs on this machine",
            hint="verify on a machine of one of these targets, or build for this machine's target",
        )
    pinned = str(Reference(None, bundle.model, digest=bundle.digest))
    for artifact in runnable:
        try:
            for report in _verify_artifact(where, pinned, artifact, folder, seeds):
                yield msgspec.structs.replace(report, bundle=bundle.digest)
        except AotcError:
            raise
        except Exception as error:  # a record that says what no build writes
            detail = told(error)
            yield Report(
                reference.model, "-", artifact.target, "-", "could not run", detail=detail, bundle=bundle.digest
            )


def _runs_here(artifact: BuiltArtifact) -> bool:
    try:
        return parse_target(artifact.target).device == "cpu" or resolve_target("cuda").startswith("cuda:")
    except (EnvironmentMismatchError, ValueError):  # ValueError: a target that this aotc does not know
        return False


def _verify_artifact(where: str, ref: str, artifact: BuiltArtifact, folder: Path, seeds: int) -> Iterator[Report]:
    """Follow the worker through its steps; where it dies, say so of the bucket it was at, and go on behind it."""
    spec = _spec_of(artifact)
    dispatcher = model_dispatcher(artifact, spec.buckets)
    steps = steps_of(artifact, dispatcher)
    first, end = 0, len(steps)
    while first < end:
        job = VerifyJob(ref, where, spec, str(folder), artifact.target, seeds, first, end)
        last = None
        with _worker(job) as (process, messages):
            for last in messages:
                if last.report:
                    yield last.report
            status = process.wait()
        if status == 0:
            break
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        detail = f"the process {how} " + ("while it ran this bucket" if last else "before it ran any bucket")
        last = last or Message(first, "-")
        bucket = bucket_name(dispatcher.variants[steps[last.step].bucket].bucket)
        yield Report(spec.name, bucket, artifact.target, last.sizes, "crashed", detail=detail)
        first = last.step + 1
        end = len(dispatcher.variants)  # with other weights, what crashes would crash again


def _spec_of(artifact: BuiltArtifact) -> ModelSpec:
    try:
        return msgspec.convert(artifact.manifest, ModelSpec)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"the manifest in the record of `{artifact.model}` for {artifact.target} cannot be read: {error}",
            hint="it was not written by `aotc build`, or by another version of it: build it again",
        ) from error


@contextmanager
def _worker(job: VerifyJob) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[Message]]]:
    """The process that compares, and its messages as they come; who leaves before it has ended ends it."""
    with tempfile.TemporaryDirectory(prefix="aotc-verify-") as work:
        path = Path(work) / "job.json"
        path.write_bytes(msgspec.json.encode(job))
        command = child_command("aotc.verify.worker", str(path))
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=child_environment()
        ) as process:
            assert process.stdout is not None
            try:
                yield process, (msgspec.json.decode(line, type=Message) for line in whole_lines(process.stdout))
            finally:
                process.kill()
