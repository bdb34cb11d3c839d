"""The artifacts of a bundle that this machine can run, with the manifest that each was built from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from aotc.errors import CorruptError, EnvironmentMismatchError, VerifyError
from aotc.machine.compatibility import rules_of_host
from aotc.machine.cpp_compiler import is_foreign
from aotc.machine.native_target import resolve_target
from aotc.machine.targets import parse_target
from aotc.machine.this_host import Compat
from aotc.manifest import ModelSpec
from aotc.manifest.read import check_path
from aotc.provenance import BuiltArtifact
from aotc.runtime.fetch import fetch
from aotc.store.layout.built import read_built
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, is_remote, parse_reference
from aotc.store.signing.trust import read_trust, read_trusted
from aotc.verify.other_python import environment_of


class Runnable(NamedTuple):
    """where: the store's folder. pinned: the bundle by its digest, without the store. digest: the bundle's."""

    where: str
    pinned: str
    digest: str
    artifacts: list[BuiltArtifact]


def open_runnable(
    where: str, reference: Reference, folder: Path, compat: Compat = "minor", python: str = ""
) -> Runnable:
    """The artifacts that run here, or by another `python`; of a remote store what runs here is fetched. `folder` is
    where factories are found.

    Raises NotFoundError, StoreError, RemoteError, CorruptError; VerifyError where no artifact runs here; where
    `$AOTC_TRUSTED_KEYS` is set, SignatureError.
    """
    check_path(folder)
    if is_remote(where):
        source = Reference(where, reference.model, tag=reference.tag, digest=reference.digest)
        reference = parse_reference(fetch(str(source), compat=compat))
        where = str(reference.store)
    store = Store.open(Path(where))
    bundle = read_trusted(store, reference, read_trust())  # before the factory that the record names is imported
    there = [entry for entry in bundle.artifacts if store.blobs.has(entry.digest, entry.size)]
    artifacts = [read_built(store, entry) for entry in there]
    runnable = _run_by(python, artifacts) if python else [artifact for artifact in artifacts if _runs_here(artifact)]
    if not runnable:
        targets = ", ".join(artifact.target for artifact in artifacts)
        hint = "use a machine of one of these targets, or build for this machine's target"
        if all(is_foreign(artifact.environment.machine) for artifact in artifacts):
            hint = "verify it with --standalone --python COMMAND, a Python for such a machine that an emulator runs"
        raise VerifyError(f"{reference.name} holds {targets}; none of it runs on this machine", hint=hint)
    pinned = str(Reference(None, bundle.model, digest=bundle.digest))
    return Runnable(where, pinned, bundle.digest, runnable)


def _run_by(python: str, artifacts: list[BuiltArtifact]) -> list[BuiltArtifact]:
    """Those that the machine of another Python runs. Raises VerifyError with every mismatch where it runs none."""
    machine = environment_of(python)
    unfit = [[rule.issue for rule in rules_of_host(artifact, machine) if rule.issue] for artifact in artifacts]
    runnable = [artifact for artifact, issues in zip(artifacts, unfit, strict=True) if not issues]
    if not runnable:
        issues = tuple(
            msgspec.structs.replace(issue, where=artifact.target)
            for artifact, of_artifact in zip(artifacts, unfit, strict=True)
            for issue in of_artifact
        )
        raise VerifyError(f"nothing of the bundle runs on the machine of `{python}`", issues=issues)
    return runnable


def _runs_here(artifact: BuiltArtifact) -> bool:
    try:
        target = parse_target(artifact.target)
        if target.device == "cpu":
            return not is_foreign(target.machine)
        return resolve_target("cuda").startswith("cuda:")
    except (EnvironmentMismatchError, ValueError):  # ValueError: a target that this aotc does not know
        return False


def spec_of(artifact: BuiltArtifact) -> ModelSpec:
    """The manifest in an artifact's record. Raises CorruptError."""
    try:
        return msgspec.convert(artifact.manifest, ModelSpec)
    except (ValueError, RecursionError) as error:
        raise CorruptError(
            f"the manifest in the record of `{artifact.model}` for {artifact.target} cannot be read: {error}",
            hint="it was not written by `aotc build`, or by another version of it: build it again",
        ) from error
