"""`aotc fsck`: reads the whole store and collects all that is wrong with it. Repairs are in `aotc.store.repair`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from aotc.digest import sha256_stream
from aotc.errors import CorruptError, NotFoundError, SchemaVersionError, StoreError
from aotc.records import File
from aotc.store import oci
from aotc.store.bundle import ARTIFACT_TYPE, each_file, read_artifact, read_bundle
from aotc.store.disk import files_in, open_regular, read_limited, refuse_links, status_of, typed_errors
from aotc.store.findings import Finding, FsckReport, Kind, Severity
from aotc.store.layout import FOLDERS, Store, as_tag, foreign_to_creation
from aotc.store.leases import is_lease_name
from aotc.store.leftovers import dead_temporaries, is_temporary, stale_holder
from aotc.store.names import is_digest
from aotc.store.oci import Descriptor
from aotc.store.reach import Reach, ignore_flaw
from aotc.store.reference import Reference
from aotc.store.repair import repair_all
from aotc.store.units import is_unit_file, is_unit_lock, load_unit, units_folder

LOCK_TIMEOUT = 60.0
"""Seconds for which a repair waits for writers that are just naming blobs, and for gc."""

_ROUNDS = 4  # a corrupt blob, then the units and tags that named it, then nothing

_KNOWN = {
    "": {"oci-layout", "index.json", "blobs", ".aotc", "lost+found"},
    "blobs": {"sha256"},
    ".aotc": {"index.lock", "index.lock.holder", "gc.lock", "gc.lock.holder", "units", "logs", "writers", "plans"},
}
"""What aotc keeps where, by the folder in the store."""
DAMAGED_INDEX = "index.json.damaged-"
"""In `.aotc`: an `index.json` that could not be read, put aside by a repair."""


def fsck(path: Path | str, *, repair: bool = False, timeout: float = LOCK_TIMEOUT) -> FsckReport:
    """Check a store: every byte of every blob, and all that names them. Builds may run meanwhile; gc waits.

    With `repair`: what cannot be right is removed, so that a build or pull makes it anew, and `index.json` and
    `oci-layout` are restored from what is certain. What is then still wrong is in the report's findings.

    Raises NotFoundError where there is no store, StoreError where it cannot be read or, for a repair, not be locked
    within `timeout` seconds, or where one of its folders is a link.
    """
    store = _store_at(Path(path))
    if not repair:
        with _gc_kept_out(store):
            return _Check(store).report()
    refuse_links(store.path, FOLDERS)
    with store.alone(timeout):
        report = _Check(store).report()
        for _ in range(_ROUNDS):
            if not (done := repair_all(store, report.findings)):
                break
            again = _Check(store).report()
            report = msgspec.structs.replace(again, repairs=(*report.repairs, *done))
    return report


def _store_at(path: Path) -> Store:
    """The store, however damaged."""
    with typed_errors("look into", path):
        if path.is_dir() and ((path / "index.json").exists() or (path / "blobs").is_dir() or (path / ".aotc").is_dir()):
            return Store(path)
    return Store.open(path)  # says what is wrong with it


@contextmanager
def _gc_kept_out(store: Store) -> Iterator[None]:
    """Where no lock can be had, as on a read-only file system, the store is checked without."""
    with ExitStack() as stack:
        try:
            stack.enter_context(store.sharing())
        except StoreError as error:
            if error.fields.get("errno") is None:
                raise
        yield


@dataclass
class _Wanted:
    """A blob that something names: by whom, its size as they say, and the files that it should hold."""

    size: int
    by: list[str] = field(default_factory=list)
    files: dict[tuple[str, int], File] = field(default_factory=dict)


class _Check:
    """One pass over the store."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.reach = Reach(store.blobs)
        self.findings: list[Finding] = []
        self.wanted: dict[str, _Wanted] = {}
        self.bad: set[str] = set()
        self.index_known = True

    def report(self) -> FsckReport:
        entries = self._entries()
        closures = [self._want_all(entry) for entry in entries]
        units = self._units()
        blobs = list(_each_blob(self.store))
        self._blobs(blobs)
        self._missing({digest for digest, _ in blobs})
        for entry, reached in zip(entries, closures, strict=True):
            self._entry(entry, reached)
        self._ambiguous(entries)
        for path, wanted in units.items():
            self._unit_blobs(path, wanted)
        self._tree()
        return FsckReport(
            folder=str(self.store.path),
            findings=tuple(sorted(self.findings, key=lambda one: (one.severity != "error", one.path, one.kind))),
            blobs=len(blobs),
            size=sum(status.st_size for _, status in blobs),
        )

    def _add(self, kind: Kind, severity: Severity, path: str, message: str, **fields: object) -> None:
        self.findings.append(Finding(kind, severity, path, message, **fields))  # type: ignore[arg-type]

    # -- what names blobs ---------------------------------------------------------------------------------------------

    def _entries(self) -> tuple[Descriptor, ...]:
        root = self.store.path
        layout = root / "oci-layout"
        if not layout.exists() and not foreign_to_creation(root):
            self._add("unfinished", "garbage", ".", "its creation was killed; the next `aotc build` finishes it")
            return ()
        try:
            with typed_errors("read", layout):
                oci.decode_layout(read_limited(layout, oci.MANIFEST_LIMIT), str(layout))
        except StoreError as error:
            self._add_error("layout", "oci-layout", error)
        try:
            return self.store.entries()
        except StoreError as error:
            self._add_error("index", "index.json", error)
            self.index_known = False
            return ()

    def _add_error(self, kind: Kind, path: str, error: StoreError, **fields: object) -> None:
        gone = isinstance(error.__cause__, FileNotFoundError)
        expected = str(error.fields.get("expected", error.fields.get("supported", "a file" if gone else "")))
        actual = str(error.fields.get("actual", error.fields.get("found", "nothing" if gone else "")))
        facts = {"expected": expected, "actual": actual, "hint": error.hint, **fields}
        self._add(kind, "error", path, error.message, **facts)

    def _want_all(self, entry: Descriptor) -> dict[str, Descriptor]:
        """Note what an entry reaches, and the files of the artifacts in it."""
        name = entry.annotation(oci.REF_NAME) or entry.digest
        reached = self.reach.reached([entry], ignore_flaw)
        for digest, descriptor in reached.items():
            self.wanted.setdefault(digest, _Wanted(descriptor.size)).by.append(name)
        for descriptor in reached.values():
            if descriptor.media_type == oci.MANIFEST:
                for file in _files_of(self.store, descriptor.digest):
                    self.wanted[file.blob].files[file.digest, file.size] = file
        return reached

    def _units(self) -> dict[Path, list[File]]:
        """The files of every unit that can be read."""
        found = {}
        for path in files_in(units_folder(self.store)):
            name = str(path.relative_to(self.store.path))
            if not is_unit_file(path):
                continue
            try:
                files = list(each_file(load_unit(path).artifact))
            except SchemaVersionError as error:
                self._add("unit", "warning", name, error.message)
                continue
            except StoreError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # gone meanwhile
                    self._add_error("unit", name, error, hint="--repair removes it; a build compiles it anew")
                continue
            found[path] = files
            for file in files:
                wanted = self.wanted.setdefault(file.blob, _Wanted(file.blob_size))
                wanted.by.append(name)
                wanted.files[file.digest, file.size] = file
        return found

    # -- bytes --------------------------------------------------------------------------------------------------------

    def _blobs(self, blobs: Iterable[tuple[str, os.stat_result]]) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing and decompressing leave the GIL free
            for found in pool.map(lambda blob: list(self._blob(*blob)), blobs):
                self.findings += found
                self.bad |= {one.digest for one in found if one.severity == "error"}

    def _blob(self, digest: str, status: os.stat_result) -> Iterator[Finding]:
        path = self.store.blobs.path(digest)
        wanted = self.wanted.get(digest)
        facts = {
            "path": f"blobs/sha256/{path.name}",
            "digest": digest,
            "size": status.st_size,
            "needed_by": tuple(sorted(set(wanted.by))) if wanted else (),
        }
        if not stat.S_ISREG(status.st_mode):
            yield _finding("blob type", "error", facts, "it is no regular file", "a regular file", _type_of(status))
            return
        if not status.st_mode & stat.S_IRUSR or status.st_mode & stat.S_IWOTH:
            severity: Severity = "warning" if status.st_mode & stat.S_IRUSR else "error"
            yield _finding(
                "blob permissions",
                severity,
                facts,
                "its owner cannot read it" if severity == "error" else "everybody may change it",
                "0644",
                f"{stat.S_IMODE(status.st_mode):04o}",
            )
        try:
            yield from self._bytes(path, digest, wanted, facts)
        except NotFoundError:
            return  # `_missing` says so, if anybody needs it
        except StoreError as error:
            yield _finding("blob unreadable", "error", facts, error.message, hint=error.hint)
            return
        if wanted is None and self.index_known:
            yield _finding("unreferenced", "garbage", facts, "no tag and no unit names it")

    def _bytes(self, path: Path, digest: str, wanted: _Wanted | None, facts: dict[str, object]) -> Iterator[Finding]:
        try:
            files = list(wanted.files.values()) if wanted else []
            for file in files:
                self.store.blobs.verify(file)
            if files:
                return
        except CorruptError as error:
            content = error
        actual, size = _digest_of(path)
        if actual == digest and not files:
            return
        if actual == digest:
            hint = "the record is wrong: build with --force, and publish again"
            expected, actual = str(content.expected), str(content.actual)
            yield _finding("blob content", "error", facts, content.message, expected, actual, hint)
        elif wanted and size != wanted.size:
            hint = "--repair removes it; then build or pull again"
            yield _finding("blob size", "error", facts, "it has another size", str(wanted.size), str(size), hint)
        else:
            hint = "--repair removes it; then build or pull again"
            yield _finding("blob digest", "error", facts, "its bytes are not what its name says", digest, actual, hint)

    def _missing(self, there: set[str]) -> None:
        for digest, wanted in sorted(self.wanted.items()):
            path = self.store.blobs.path(digest)
            if digest in there or path.exists():
                continue
            self.bad.add(digest)
            if tags := tuple(sorted({name for name in wanted.by if not name.startswith(".aotc/")})):
                name = f"blobs/sha256/{path.name}"
                hint = "build or pull it again"
                facts = {"digest": digest, "size": wanted.size, "needed_by": tags, "hint": hint}
                self._add(
                    "blob missing", "error", name, "it is not there", expected="a file", actual="nothing", **facts
                )

    # -- whether what names blobs can be used -------------------------------------------------------------------------

    def _entry(self, entry: Descriptor, reached: Mapping[str, Descriptor]) -> None:
        name = entry.annotation(oci.REF_NAME) or entry.digest
        if broken := [digest for digest in reached if digest in self.bad]:
            gone = entry.digest in broken
            message = (
                "what it names is missing or corrupt" if gone else f"{len(broken)} of its blobs are missing or corrupt"
            )
            hint = "--repair removes the tag; or build or pull it again" if gone else "build or pull it again"
            expected = entry.digest if gone else ""
            self._add("tag", "error", name, message, digest=entry.digest, expected=expected, hint=hint)
        elif (tag := as_tag(entry)) is not None:
            try:
                for artifact in read_bundle(self.store, Reference(None, tag.model, digest=tag.digest)).artifacts:
                    read_artifact(self.store, artifact)
            except StoreError as error:
                self._add_error("tag", name, error, digest=entry.digest)

    def _ambiguous(self, entries: Iterable[Descriptor]) -> None:
        bundles: dict[str, set[str]] = {}
        for entry in entries:
            if as_tag(entry) is not None:
                bundles.setdefault(entry.annotation(oci.REF_NAME), set()).add(entry.digest)
        for name, digests in sorted(bundles.items()):
            if len(digests) > 1:
                actual = ", ".join(sorted(digests))
                hint = "build or tag it again, or load one of them by its digest"
                message = f"it names {len(digests)} bundles"
                self._add("ambiguous tag", "error", name, message, expected="one bundle", actual=actual, hint=hint)

    def _unit_blobs(self, path: Path, files: Iterable[File]) -> None:
        broken = sorted({file.blob for file in files if file.blob in self.bad})
        if broken:
            message = f"{len(broken)} of its blobs are missing or corrupt, like {broken[0]}"
            hint = "--repair removes it; a build compiles it anew"
            self._add("unit", "error", str(path.relative_to(self.store.path)), message, hint=hint)

    # -- what else is there -------------------------------------------------------------------------------------------

    def _tree(self) -> None:
        root = self.store.path
        for name in FOLDERS:
            if (root / name).is_symlink():
                message = "it is a link: gc and --repair remove nothing behind it"
                self._add("linked folder", "warning", name, message, hint="let a folder of its own stand there")
        for folder, known in _KNOWN.items():
            for path in files_in(root / folder):
                if path.name not in known and not path.name.startswith(DAMAGED_INDEX) and not is_temporary(path):
                    self._foreign(path)
        for path in files_in(self.store.blobs.folder / "sha256"):
            if not is_temporary(path) and not is_digest(f"sha256:{path.name}"):
                self._foreign(path)
        for path in files_in(units_folder(self.store)):
            if not is_temporary(path) and not is_unit_file(path) and not is_unit_lock(path):
                self._foreign(path)
        for path in files_in(root / ".aotc" / "writers"):
            if not is_lease_name(path.name):
                self._foreign(path)
        for path in dead_temporaries(self.store):
            if (status := status_of(path)) is not None:
                self._garbage("temporary", path, "its writer was killed", status.st_size)
        for writer in self.store.writers():
            if not writer.alive:
                self._garbage("stale lock", Path(writer.path), f"{writer.holder} was killed")
        if (holder := stale_holder(self.store)) is not None:
            self._garbage("stale lock", holder, "its holder was killed")

    def _foreign(self, path: Path) -> None:
        message, hint = "aotc did not put it there", "move it away if nobody needs it there"
        self._add("foreign file", "warning", str(path.relative_to(self.store.path)), message, hint=hint)

    def _garbage(self, kind: Kind, path: Path, message: str, size: int = 0) -> None:
        name = str(path.relative_to(self.store.path))
        self._add(kind, "garbage", name, message, size=size, hint="`aotc gc` removes it")


def _finding(
    kind: Kind,
    severity: Severity,
    facts: Mapping[str, object],
    message: str,
    expected: str = "",
    actual: str = "",
    hint: str = "",
) -> Finding:
    more = {"message": message, "expected": expected, "actual": actual, "hint": hint}
    return Finding(kind=kind, severity=severity, **facts, **more)  # type: ignore[arg-type]


def _each_blob(store: Store) -> Iterator[tuple[str, os.stat_result]]:
    for path in files_in(store.blobs.folder / "sha256"):
        if is_digest(f"sha256:{path.name}") and (status := status_of(path)) is not None:
            yield f"sha256:{path.name}", status


def _files_of(store: Store, manifest: str) -> list[File]:
    """The files of an artifact; none where it cannot be read (`_entry` says so) or is another tool's."""
    try:
        document = oci.decode_manifest(store.blobs.read(manifest, oci.MANIFEST_LIMIT), manifest)
        return list(each_file(read_artifact(store, manifest))) if document.artifact_type == ARTIFACT_TYPE else []
    except StoreError:
        return []


def _digest_of(path: Path) -> tuple[str, int]:
    with typed_errors("read", path), open_regular(path) as stream:
        return sha256_stream(stream), os.fstat(stream.fileno()).st_size


def _type_of(status: os.stat_result) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFLNK: "a symbolic link",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(status.st_mode), "a device")
