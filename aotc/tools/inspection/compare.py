"""Two bundles side by side: everything in which their artifacts differ, with the reason where one is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from aotc.errors import NotFoundError
from aotc.provenance import BuiltArtifact, BuiltVariant, Report
from aotc.records import File, SizeRange, bucket_name, part_name
from aotc.store.layout.built import read_built, read_picks, read_report
from aotc.store.layout.bundle import Bundle, BundleEntry, read_bundle
from aotc.store.layout.units import find_built
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference
from aotc.tools.inspection.artifact_picks import PickChange, unit_changes
from aotc.tools.inspection.binaries import BinaryDifference, compare_binaries
from aotc.tools.inspection.kernels import KernelDifference, KernelStatus, compare_kernels

BINARY_LIMIT = 1 << 30
"""Files above this many bytes are not compared byte by byte: they hold weights."""


class FileDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that only one side has, or that differs. `bytes` says where, for a library or kernel of both sides."""

    status: KernelStatus
    name: str
    a: File | None = None
    b: File | None = None
    bytes: BinaryDifference | None = None
    reason: str = ""


class VariantDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """What differs between the variants of one bucket. `reason` is the most likely cause of all of it.

    `key_factors`: the named factors in which the keys differ; None where the units are not in both stores.
    """

    bucket: str
    reason: str
    key_factors: tuple[ValueChange, ...] | None = ()
    record: tuple[ValueChange, ...] = ()
    kernels: tuple[KernelDifference, ...] = ()
    picks: tuple[PickChange, ...] = ()
    files: tuple[FileDifference, ...] = ()


class ArtifactDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """What differs between two artifacts for one target. `a` and `b` are their digests.

    `record`: by part of the record (environment, options, signature, state, module, ambient, …), what differs in it.
    """

    target: str
    a: str
    b: str
    record: dict[str, tuple[ValueChange, ...]] = {}
    buckets_removed: tuple[str, ...] = ()
    buckets_added: tuple[str, ...] = ()
    buckets_equal: int = 0
    variants: tuple[VariantDifference, ...] = ()
    files: tuple[FileDifference, ...] = ()


class BundleDifference(msgspec.Struct, frozen=True, omit_defaults=True):
    """What differs between two bundles: targets that only one has, and the artifacts that both have and that differ.

    `a`, `b`: the bundles' digests, which differ by the time of the build alone too.
    """

    a: str
    b: str
    targets_removed: tuple[str, ...] = ()
    targets_added: tuple[str, ...] = ()
    targets_equal: tuple[str, ...] = ()
    artifacts: tuple[ArtifactDifference, ...] = ()

    @property
    def equal(self) -> bool:
        return not (self.targets_removed or self.targets_added or self.artifacts)


class Side(msgspec.Struct, frozen=True):
    """A bundle, and the store that it is in."""

    store: ReadableStore
    bundle: Bundle


def open_side(store: ReadableStore, reference: Reference) -> Side:
    """Raises what `read_bundle` raises."""
    return Side(store, read_bundle(store, reference))


def compare_bundles(a: Side, b: Side, target: str | None = None) -> BundleDifference:
    """Compare two bundles target by target, or for one target alone.

    Raises NotFoundError for a target that neither has, or the artifacts of which are not in the store; CorruptError,
    SchemaVersionError, StoreError.
    """
    of_a, of_b = _by_target(a.bundle, target), _by_target(b.bundle, target)
    if target is not None and not (of_a or of_b):
        known = tuple(entry.target for side in (a, b) for entry in side.bundle.artifacts)
        raise NotFoundError(
            f"neither bundle has an artifact for {target}",
            hint=f"there are {', '.join(dict.fromkeys(known))}",
            known=tuple(dict.fromkeys(known)),
        )
    both = [name for name in of_a if name in of_b]
    return BundleDifference(
        a=a.bundle.digest,
        b=b.bundle.digest,
        targets_removed=tuple(name for name in of_a if name not in of_b),
        targets_added=tuple(name for name in of_b if name not in of_a),
        targets_equal=tuple(name for name in both if of_a[name] == of_b[name]),
        artifacts=tuple(
            _compare_artifacts(name, (a.store, of_a[name]), (b.store, of_b[name]))
            for name in both
            if of_a[name] != of_b[name]
        ),
    )


def _by_target(bundle: Bundle, target: str | None) -> dict[str, BundleEntry]:
    return {entry.target: entry for entry in bundle.artifacts if target in (None, entry.target)}


def _compare_artifacts(
    target: str, a: tuple[ReadableStore, BundleEntry], b: tuple[ReadableStore, BundleEntry]
) -> ArtifactDifference:
    one, other = read_built(*a), read_built(*b)
    of_a, of_b = ({_part(v): v for v in artifact.variants} for artifact in (one, other))
    both = [name for name in of_a if name in of_b]
    different = [name for name in both if of_a[name] != of_b[name]]
    comparer = _Comparer(a[0], b[0])
    return ArtifactDifference(
        target=target,
        a=a[1].digest,
        b=b[1].digest,
        record=_record_changes(one, other),
        buckets_removed=tuple(name for name in of_a if name not in of_b),
        buckets_added=tuple(name for name in of_b if name not in of_a),
        buckets_equal=len(both) - len(different),
        variants=tuple(comparer.variants(name, of_a[name], of_b[name]) for name in different),
        files=tuple(comparer.attributes(one, other)),
    )


def _part(variant: BuiltVariant) -> str:
    """A variant's region and bucket, which for a range says too at which size its code is tuned."""
    tuned = {dim: size.tune_at for dim, size in variant.bucket.items() if isinstance(size, SizeRange)}
    return part_name(variant.region, variant.bucket) + (f" tuned at {bucket_name(dict(tuned))}" if tuned else "")


def _record_changes(a: BuiltArtifact, b: BuiltArtifact) -> dict[str, tuple[ValueChange, ...]]:
    """The differences of two records by part, without variants and files, which are compared in detail."""
    found: dict[str, list[ValueChange]] = {}
    for change in changes(_without(a, "variants"), _without(b, "variants")):
        part, dot, rest = change.path.partition(".")
        part, bracket, index = part.partition("[")
        if change.path.startswith(("module.attributes_file", "constants")):
            continue
        path = f"{bracket}{index}{dot}{rest}".removeprefix(".")
        found.setdefault(part, []).append(msgspec.structs.replace(change, path=path))
    order = [_part(variant) for variant in a.variants], [_part(variant) for variant in b.variants]
    if order[0] != order[1] and sorted(order[0]) == sorted(order[1]):
        found["variants"] = [ValueChange("order", *order)]
    return {part: tuple(listed) for part, listed in found.items()}


def _without(record: Any, *fields: str) -> dict[str, Any]:
    return {name: value for name, value in msgspec.to_builtins(record).items() if name not in fields}


class _Comparer:
    """Compares variants of two stores. Each pair of files is compared once, however many buckets share it."""

    def __init__(self, a: ReadableStore, b: ReadableStore) -> None:
        self.a = a
        self.b = b
        self._compared: dict[tuple[str, str], BinaryDifference] = {}

    def variants(self, bucket: str, a: BuiltVariant, b: BuiltVariant) -> VariantDifference:
        report_a, report_b = read_report(self.a, a), read_report(self.b, b)
        picks_a, picks_b = read_picks(self.a, a), read_picks(self.b, b)
        files = [
            *_files(a.files, b.files, self._bytes),
            *_files(_optional(a.report), _optional(b.report)),
            *_files(_optional(a.picks), _optional(b.picks), reason="other times or choices were recorded"),
        ]
        found = VariantDifference(
            bucket=bucket,
            reason="",
            key_factors=self._key_factors(a, b),
            record=(
                *changes(_without(a, "files", "report", "picks"), _without(b, "files", "report", "picks")),
                *changes(_operators(report_a), _operators(report_b)),
            ),
            kernels=compare_kernels(report_a.kernels if report_a else (), report_b.kernels if report_b else ()),
            picks=tuple(unit_changes(bucket, picks_a, picks_b)),
            files=tuple(files),
        )
        recorded = picks_a is not None and picks_b is not None
        return msgspec.structs.replace(found, reason=_reason(found, a.key == b.key, recorded))

    def attributes(self, a: BuiltArtifact, b: BuiltArtifact) -> Iterator[FileDifference]:
        one, other = a.module.attributes_file, b.module.attributes_file
        yield from _files(_optional(one), _optional(other), reason="the module's Python attributes differ")
        one, other = a.constants, b.constants
        yield from _files(_optional(one), _optional(other), reason="the module's non-persistent buffers differ")

    def _key_factors(self, a: BuiltVariant, b: BuiltVariant) -> tuple[ValueChange, ...] | None:
        if a.key == b.key:
            return ()
        units = find_built(self.a, a.key), find_built(self.b, b.key)
        if units[0] is None or units[1] is None:
            return None
        return changes(units[0].factors, units[1].factors)

    def _bytes(self, a: File, b: File) -> BinaryDifference | None:
        if max(a.size, b.size) > BINARY_LIMIT:
            return None
        pair = a.digest, b.digest
        if pair not in self._compared:
            loaded = self.a.blobs.load(a, BINARY_LIMIT), self.b.blobs.load(b, BINARY_LIMIT)
            self._compared[pair] = compare_binaries(*loaded)
        return self._compared[pair]


def _optional(file: File | None) -> tuple[File, ...]:
    return () if file is None else (file,)


def _operators(report: Report | None) -> dict[str, int]:
    return {} if report is None else {"captured_operators": report.captured_operators}


def _files(
    a: tuple[File, ...],
    b: tuple[File, ...],
    compare: Callable[[File, File], BinaryDifference | None] = lambda a, b: None,
    reason: str = "",
) -> Iterator[FileDifference]:
    """The files that differ, paired by name."""
    of_a, of_b = ({file.name: file for file in side} for side in (a, b))
    for name in dict.fromkeys([*of_a, *of_b]):
        one, other = of_a.get(name), of_b.get(name)
        if one is None or other is None:
            yield FileDifference("added" if one is None else "removed", name, one, other)
        elif one.digest == other.digest and one != other:
            yield FileDifference("changed", name, one, other, reason="the same bytes, compressed differently")
        elif one != other:
            yield FileDifference("changed", name, one, other, compare(one, other), reason)


def _reason(found: VariantDifference, same_key: bool, picks_recorded: bool) -> str:
    """Why two builds of one bucket differ, as far as the records tell."""
    if found.key_factors:
        return "built from other inputs: " + ", ".join(change.path for change in found.key_factors)
    if not same_key:
        return "built from other inputs; which ones is known only where both units are still in their stores"
    if any(pick.first and pick.second for pick in found.picks):
        return "built from the same inputs; autotuning chose other candidates"
    if found.kernels:
        unknown = "" if picks_recorded else ", and no picks are recorded to tell whether autotuning chose otherwise"
        return f"built from the same inputs; other kernels were generated{unknown}"
    if any(file.bytes is not None for file in found.files):
        alike = "kernels and picks" if picks_recorded else "kernels"
        return f"built from the same inputs, with the same {alike}; the compiled bytes differ"
    return "built from the same inputs, with the same code; what was recorded of it differs"


# -- two JSON values, leaf by leaf -------------------------------------------------------------------------------------


class ValueChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """One place where two values differ: `a` or `b` is UNSET (and absent in JSON) where that side has nothing there."""

    path: str
    a: Any = msgspec.UNSET
    b: Any = msgspec.UNSET


def changes(a: Any, b: Any) -> tuple[ValueChange, ...]:
    """Every leaf in which two records, mappings or lists differ, in the order of A's keys and then B's."""
    return tuple(_changes("", msgspec.to_builtins(a), msgspec.to_builtins(b)))


def _changes(path: str, a: Any, b: Any) -> Iterator[ValueChange]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            below = f"{path}.{key}" if path else str(key)
            yield from _changes(below, a.get(key, msgspec.UNSET), b.get(key, msgspec.UNSET))
    elif _are_lists_of_records(a, b):
        for index in range(max(len(a), len(b))):
            pair = [side[index] if index < len(side) else msgspec.UNSET for side in (a, b)]
            yield from _changes(f"{path}[{index}]", *pair)
    elif a != b or type(a) is not type(b):
        yield ValueChange(path, a, b)


def _are_lists_of_records(a: Any, b: Any) -> bool:
    """Lists of plain values (shapes, CPU features) are compared as wholes: that is how a person reads them."""
    lists = isinstance(a, list | tuple) and isinstance(b, list | tuple)
    return lists and any(isinstance(value, dict) for value in (*a, *b))
