"""`aotc fsck`: reads the whole store and collects all damage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aotc.digest import sha256_stream
from aotc.errors import CorruptError, NotFoundError, SchemaVersionError, StoreError
from aotc.records import File
from aotc.store.files.disk import open_regular, read_limited, typed_errors
from aotc.store.files.store_locks import is_held
from aotc.store.files.writing import refuse_links
from aotc.store.layout import oci
from aotc.store.layout.built import with_provenance
from aotc.store.layout.bundle import BundleEntry, each_file, read_bundle
from aotc.store.layout.check_record import check_artifact, check_record
from aotc.store.layout.compiler_cache import read_cache
from aotc.store.layout.oci import Descriptor, ImageIndex, check_layout
from aotc.store.layout.reader import find_tag
from aotc.store.layout.store import FOLDERS, Store, foreign_to_creation
from aotc.store.layout.tags import as_tag
from aotc.store.layout.units import load_unit
from aotc.store.maintenance.reach import Reach
from aotc.store.maintenance.repair import repair_all
from aotc.store.maintenance.reports import Finding, FlawSeverity, FsckReport
from aotc.store.maintenance.survey import StoreFile, survey
from aotc.store.reference import Reference

LOCK_TIMEOUT = 60.0
"""Seconds for which a repair waits for writers that are just naming blobs, and for gc."""


def fsck(path: Path | str, *, repair: bool = False, timeout: float = LOCK_TIMEOUT) -> FsckReport:
    """Check every byte of every blob, and every tag and unit that names blobs. Builds may run meanwhile; gc waits.

    With `repair`: what cannot be right is removed, so that a build or fetch makes it anew, and `index.json` and
    `oci-layout` are restored from what is certain. What is then still wrong is in the report's findings.

    Raises NotFoundError where there is no store, StoreError where it cannot be read or, for a repair, not be locked
    within `timeout` seconds, or where one of its folders is a link.
    """
    store = _store_at(Path(path))
    if not repair:
        with ExitStack() as stack:
            try:
                stack.enter_context(store.sharing())
            except StoreError as error:
                if error.fields.get("errno") is None:  # held by gc; a read-only disk has no locks
                    raise
            return _Check(store).report()
    refuse_links(store.path, FOLDERS)
    with store.alone(timeout):
        report = _Check(store).report()
        done = tuple(repair_all(store, report.findings))
        return msgspec.structs.replace(_Check(store).report(), repairs=done) if done else report


def _store_at(path: Path) -> Store:
    """The store, however damaged."""
    with typed_errors("look into", path):
        if path.is_dir() and any((path / name).exists() for name in ("index.json", "blobs", ".aotc")):
            return Store(path)
    return Store.open(path)  # says what is wrong with it


class _Name(NamedTuple):
    """A tag or a unit: the digests that it needs, and why it cannot be used, whatever their bytes are."""

    kind: str
    path: str
    needs: frozenset[str]
    flaw: StoreError | None = None
    digest: str = ""


class _Wanted(NamedTuple):
    """A blob that something names: its size as they say, who they are, and the files that it should hold."""

    size: int
    by: set[str]
    files: dict[tuple[str, int], File]


class _Check:
    """One pass over the store: names, then every byte, then the documents that name them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reach = Reach(store.blobs)
        self.wanted: dict[str, _Wanted] = {}
        self.findings: set[Finding] = set()
        self.index_known = True

    def report(self) -> FsckReport:
        entries = self._entries()
        found = survey(self.store.path)
        blobs = {one.digest: one for one in found if one.kind == "blob"}
        names = [self._tag(entry, entries) for entry in entries]
        names += [self._unit(one.name) for one in found if one.kind == "unit"]
        bad = self._check_bytes(blobs)
        for name in names:
            self._check_name(name, bad & name.needs)
        self._check_others(found)
        findings = sorted(self.findings, key=lambda one: (one.severity != "error", one.path, one.kind, one.message))
        size = sum(blob.size for blob in blobs.values())
        return FsckReport(str(self.store.path), tuple(findings), blobs=len(blobs), size=size)

    def _add(self, kind: str, path: str, message: str, severity: FlawSeverity = "error", **fields: Any) -> None:
        self.findings.add(Finding(kind, severity, path, message, **fields))

    def _add_error(self, kind: str, path: str, error: StoreError, **fields: Any) -> None:
        is_version, is_gone = isinstance(error, SchemaVersionError), isinstance(error.__cause__, FileNotFoundError)
        facts = {
            "expected": str(error.fields.get("expected", error.fields.get("supported", "a file" if is_gone else ""))),
            "actual": str(error.fields.get("actual", error.fields.get("found", "nothing" if is_gone else ""))),
            "hint": error.hint,
        }
        if is_version and kind == "tag":  # which the aotc that wrote it reads
            fields["severity"] = "warning"
        self._add("version" if is_version else kind, path, error.message, **{**facts, **fields})

    # -- what names blobs ---------------------------------------------------------------------------------------------

    def _entries(self) -> tuple[Descriptor, ...]:
        layout = self.store.path / "oci-layout"
        if not layout.exists() and not foreign_to_creation(self.store.path):
            message = "its creation was killed; the next `aotc build` finishes it"
            self._add("unfinished", ".", message, severity="garbage")
            return ()
        try:
            with typed_errors("read", layout):
                check_layout(read_limited(layout, oci.MANIFEST_LIMIT), str(layout))
        except StoreError as error:
            self._add_error("layout", "oci-layout", error)
        try:
            return self.store.entries()
        except StoreError as error:
            self._add_error("index", "index.json", error)
            self.index_known = False
            return ()

    def _tag(self, entry: Descriptor, entries: tuple[Descriptor, ...]) -> _Name:
        name = entry.annotation(oci.REF_NAME) or entry.digest
        reached = self.reach.reached([entry], lambda error: None)
        for digest, descriptor in reached.items():
            self._want(digest, descriptor.size, name)
        flaws: list[StoreError] = []
        if (tag := as_tag(entry)) is not None:
            try:
                find_tag(
                    ImageIndex(oci.OCI_SCHEMA_VERSION, entries), Reference(None, tag.model, tag=tag.tag), "index.json"
                )
            except StoreError as error:  # it names two bundles
                flaws.append(error)
            try:
                bundle = read_bundle(self.store, Reference(None, tag.model, digest=tag.digest))
            except StoreError as error:
                return _Name("tag", name, frozenset(reached), error, entry.digest)
            for artifact in bundle.artifacts:
                if artifact.digest in reached:  # all but those that a sparse bundle lacks
                    try:
                        for file in self._files(artifact):
                            self._want(file.blob, file.blob_size, name, file)
                    except StoreError as error:
                        flaws.append(error)
        return _Name("tag", name, frozenset(reached), next(iter(flaws), None), entry.digest)

    def _files(self, entry: BundleEntry) -> list[File]:
        """Every file of a bundle's artifact or compiler cache, after all checks of its record. Raises StoreError."""
        if entry.is_cache:
            return [read_cache(self.store, entry).pack]
        record = check_artifact(self.store, entry)
        check_record(built := with_provenance(self.store, record))
        return [*each_file(record), *each_file(built)]

    def _unit(self, name: str) -> _Name:
        try:
            files = list(each_file(load_unit(self.store.path / name).artifact))
        except StoreError as error:
            return _Name("unit", name, frozenset(), error)
        for file in files:
            self._want(file.blob, file.blob_size, name, file)
        return _Name("unit", name, frozenset(file.blob for file in files))

    def _want(self, digest: str, size: int, by: str, file: File | None = None) -> None:
        wanted = self.wanted.setdefault(digest, _Wanted(size, set(), {}))
        wanted.by.add(by)
        if file is not None:
            wanted.files[file.digest, file.size] = file

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _check_bytes(self, blobs: Mapping[str, StoreFile]) -> set[str]:
        """Read every blob; the digests of those that are damaged or missing."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing and decompressing leave the GIL free
            found = [finding for finding in pool.map(self._blob, blobs.values()) if finding is not None]
        for digest in self.wanted.keys() - blobs.keys():
            if self.store.blobs.size(digest) is None:
                found.append(self._about(digest, "blob missing", "it is not there", "a file", "nothing"))
        self.findings.update(found)
        return {finding.digest for finding in found if finding.severity == "error"}

    def _blob(self, blob: StoreFile) -> Finding | None:
        path, wanted = self.store.blobs.path(blob.digest), self.wanted.get(blob.digest)
        try:
            with typed_errors("read", path), open_regular(path) as stream:
                actual = sha256_stream(stream)
            if actual != blob.digest:
                of_size = f" ({blob.size} instead of {wanted.size})" if wanted and wanted.size != blob.size else ""
                message = f"its bytes{of_size} are not what its name says"
                return self._about(blob.digest, "blob corrupt", message, blob.digest, actual)
            for file in wanted.files.values() if wanted else ():
                self.store.blobs.verify(file)
        except NotFoundError:
            return None  # gone meanwhile
        except CorruptError as error:
            return self._about(blob.digest, "blob content", error.message, str(error.expected), str(error.actual))
        except StoreError as error:
            gone = isinstance(error.__cause__, FileNotFoundError)
            return None if gone else self._about(blob.digest, "blob unreadable", error.message)
        if wanted is None and self.index_known:
            message = "no tag and no unit names it"
            return Finding("unreferenced", "garbage", blob.name, message, blob.digest, blob.size)
        return None

    def _about(self, digest: str, kind: str, message: str, expected: str = "", actual: str = "") -> Finding:
        wanted = self.wanted.get(digest, _Wanted(0, set(), {}))
        path = str(self.store.blobs.path(digest).relative_to(self.store.path))
        by = tuple(sorted(wanted.by))
        return Finding(kind, "error", path, message, digest, wanted.size, expected, actual, _HINTS[kind], by)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def _check_name(self, name: _Name, broken: set[str]) -> None:
        if broken:
            are = "blob is" if len(broken) == 1 else "blobs are"
            message = f"{len(broken)} {are} missing or corrupt: {min(broken)}{', …' if len(broken) > 1 else ''}"
            self._add(name.kind, name.path, message, digest=name.digest, hint=_HINTS[name.kind], follows=True)
        elif isinstance(name.flaw, SchemaVersionError) and name.kind == "unit":
            self._add("version", name.path, name.flaw.message, severity="warning")  # a build compiles it again
        elif name.flaw is not None and not isinstance(name.flaw.__cause__, FileNotFoundError):
            self._add_error(name.kind, name.path, name.flaw)

    def _check_others(self, found: Iterable[StoreFile]) -> None:
        for one in found:
            if one.kind == "foreign":
                message, hint = "aotc writes no files of this name", "move it away if it is not needed there"
                self._add("foreign file", one.name, message, severity="warning", hint=hint)
            elif one.kind in ("temporary", "lease") and not is_held(self.store.path / one.name):
                self._add("leftover", one.name, "its writer was killed", severity="garbage", size=one.size)


_HINTS = {
    "blob missing": "build or fetch it again",
    "blob corrupt": "--repair removes it; then build or fetch again",
    "blob content": "the record is wrong: build with --force, and publish again",
    "blob unreadable": "give this user permission to read it, or check the disk",
    "tag": "build or fetch it again; --repair removes a tag whose bundle itself is gone",
    "unit": "--repair removes it; a build compiles it anew",
}
