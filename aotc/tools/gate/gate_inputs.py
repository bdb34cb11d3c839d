"""The inputs that a gate's file names: a trace and an earlier release. Both are opened before anything is compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aotc.errors import Issue, ManifestError, NotFoundError, ReferenceFormatError
from aotc.store.layout.bundle import read_bundle
from aotc.store.opening import open_readable
from aotc.store.reference import Reference, is_registry, is_remote, parse_reference
from aotc.tools.gate.gate_document import LAST, Gate


def baseline_named(asked: str, model: str, where: str) -> Reference:
    """The reference of a baseline. A tag alone is one of the model's, in the store `where` of the release.

    Raises ReferenceFormatError.
    """
    if {":", "@", "#", "/"}.isdisjoint(asked):
        return Reference(where if is_remote(where) else None, "" if is_registry(where) else model, tag=asked)
    return parse_reference(asked)


def check_inputs(gate: Gate, path: Path, where: str, models: Iterable[str]) -> None:
    """`path` is the gate's file, `where` the store of the release, `models` the names of those that it is for.

    Raises ManifestError with each that is not there; RemoteError and StoreError where the store cannot be read.
    """
    issues = []
    if gate.coverage:
        trace = path.parent / gate.coverage.trace
        try:
            trace.open("rb").close()
        except OSError as error:
            message = f"`coverage.trace` is {gate.coverage.trace}, and {trace} cannot be read: {error.strerror}"
            issues.append(Issue(message, where=str(path), hint="write its path from the folder of the gate's file"))
    if gate.latency and gate.latency.baseline == LAST:
        check_last(where)
    elif gate.latency:
        for model in models:
            try:
                reference = baseline_named(gate.latency.baseline, model, where)
                read_bundle(open_readable(reference.store or where), reference)
            except (NotFoundError, ReferenceFormatError) as error:
                message = f"`latency.baseline` is {gate.latency.baseline}: {error.message}"
                hint = "write a tag of the model, a reference like `MODEL:TAG`, or `last`"
                issues.append(Issue(message, where=str(path), hint=hint))
    if issues:
        raise ManifestError(f"{path} names what is not there", issues=tuple(dict.fromkeys(issues)))


def check_last(where: str) -> None:
    """Raises ManifestError where the store does not say which tag is the last."""
    if is_registry(where):
        raise ManifestError(
            "the gate compares with the last tag, and a registry does not say when tags were set",
            hint="name the release in the gate: `latency: {baseline: oci://HOST/REPOSITORY:TAG}`",
        )
