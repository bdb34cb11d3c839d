"""The store: an OCI image layout on disk, its tags, and the one lock that its writers share."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from aotc.digest import canonical_json
from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.store import oci
from aotc.store.blobs import Blobs
from aotc.store.disk import exists, typed_errors
from aotc.store.leases import Lease, lease, leases
from aotc.store.locks import locked
from aotc.store.names import is_digest
from aotc.store.oci import Descriptor, Index
from aotc.store.reader import (
    StoreReader,
    checked_path,
    find_attachment,
)
from aotc.store.reference import Reference
from aotc.store.writing import TEMPORARY_PREFIX, make_folder, write_atomically

T = TypeVar("T")
R = TypeVar("R")

LOCK_TIMEOUT = 60.0  # seconds; the lock is held for a few milliseconds
GC_TIMEOUT = 600.0  # seconds; gc and `fsck --repair` hold it while they run

FOLDERS = ("blobs", "blobs/sha256", ".aotc", ".aotc/writers", ".aotc/units", ".aotc/plans", ".aotc/logs")
"""Every folder of a store: `aotc gc` and repairs want them to be folders, and no links."""

EMPTY_INDEX = canonical_json(Index(schema_version=oci.OCI_SCHEMA_VERSION, media_type=oci.INDEX, manifests=()))
LAYOUT = canonical_json(oci.Layout(image_layout_version=oci.LAYOUT_VERSION))


class Store(StoreReader):
    """A folder that is an OCI image layout, read and written.

    STORE/
    ├── oci-layout             {"imageLayoutVersion":"1.0.0"}, written last when a store is made
    ├── index.json             the tags; replaced as a whole, under the lock
    ├── blobs/sha256/<hex>     see `Blobs`
    └── .aotc/
        ├── index.lock         held by whoever replaces index.json
        ├── gc.lock            shared by who names blobs, held alone by gc
        ├── writers/<hex>      one for each running writer, see `aotc.store.leases`
        └── units/<hex>.json   finished units, see `aotc.store.units`
    """

    blobs: Blobs

    def __init__(self, path: Path, *, lock_timeout: float = LOCK_TIMEOUT) -> None:
        super().__init__(path, Blobs(path / "blobs", self.sharing))
        self.lock_timeout = lock_timeout

    @classmethod
    def create(cls, path: Path | str, *, lock_timeout: float = LOCK_TIMEOUT) -> Store:
        """The store at `path`, made if there is none; a creation that was killed half-way is finished.

        Raises StoreError where the folder cannot be made or holds something else, and as `open` does.
        """
        path = checked_path(path)
        store = cls(path, lock_timeout=lock_timeout)
        if not exists(path / "oci-layout"):
            make_folder(path)
            _refuse_foreign(path)
            with store.lock():
                store.finish_layout()
        return cls.open(path, lock_timeout=lock_timeout)

    def set_tag(self, model: str, tag: str, descriptor: Descriptor) -> None:
        """Let `model:tag` name a bundle from now on, under the lock; other entries stay as they are.

        Raises NotFoundError where the bundle's blob is not in the store, ReferenceFormatError, StoreError.
        """
        name = Reference(None, model, tag=tag).name
        entry = _index_entry(name, model, descriptor)
        with self.sharing(), self.lock():
            if not self.blobs.has(descriptor.digest, descriptor.size):
                raise NotFoundError(
                    f"{name} cannot name {descriptor.digest}: the store has no such blob of {descriptor.size} bytes",
                    known=(),
                )
            data = self.read_index_bytes()
            index = oci.decode_index(data, "index.json")
            self._spare_for_readers(other for other in index.manifests if other.annotation(oci.REF_NAME) == name)
            write_atomically(self.path / "index.json", _with_entry(data, name, entry))

    def remove_entries(self, entries: Collection[Descriptor]) -> None:
        """Take entries out of `index.json`, under the lock; what they named stays for the grace period of gc.

        Raises CorruptError, StoreError.
        """
        gone = {(entry.annotation(oci.REF_NAME), entry.digest) for entry in entries}
        with self.lock():
            data = self.read_index_bytes()
            self._spare_for_readers(entries)
            write_atomically(self.path / "index.json", _without_entries(data, gone))

    def _spare_for_readers(self, entries: Iterable[Descriptor]) -> None:
        """Mark what the tag named as written now: a reader may have read the tag a moment ago."""
        for entry in entries:
            if is_digest(entry.digest):
                self.blobs.touch(entry.digest, oci.MANIFEST_LIMIT)

    def change_attachment(self, name: str, change: Callable[[Descriptor | None], Descriptor]) -> Descriptor:
        """Let `name` name what `change` makes of the manifest that has the name now. `change` runs under the lock.

        Raises what `change` raises, CorruptError, StoreError.
        """
        with self.sharing(), self.lock():
            data = self.read_index_bytes()
            index = oci.decode_index(data, str(self.path / "index.json"))
            new = change(find_attachment(index, name, f"{self.path}/index.json"))
            write_atomically(self.path / "index.json", with_attachment(data, name, new))
        return new

    def lock(self) -> AbstractContextManager[None]:
        """The lock of everything that replaces `index.json`. Raises StoreError, on a timeout with who may hold it."""
        return locked(self.path / ".aotc" / "index.lock", self.lock_timeout)

    def sharing(self) -> AbstractContextManager[None]:
        """Keep gc out, from looking whether blobs are there until something names them. Raises StoreError."""
        return locked(self._gc_lock, GC_TIMEOUT, shared=True)

    def alone(self, timeout: float) -> AbstractContextManager[None]:
        """The lock of gc. Raises StoreError, on a timeout with the writers that are running."""

        def running() -> str:
            return "; ".join(f"{lease.holder} may hold it" for lease in self.writers() if lease.alive)

        return locked(self._gc_lock, timeout, holders=running)

    @contextmanager
    def writing(self, what: str) -> Iterator[None]:
        """Register as a running writer: gc keeps every blob and unit written or used since the oldest writer began.

        For writers that may need longer than gc's grace period from their first blob to the tag. Raises StoreError.
        """
        with ExitStack() as stack:
            with self.sharing():  # while gc runs, no writer begins
                stack.enter_context(lease(self._writers, what))
            yield

    def writers(self) -> list[Lease]:
        """Every registered writer, also those that were killed. Raises StoreError."""
        return leases(self._writers)

    @property
    def _gc_lock(self) -> Path:
        return self.path / ".aotc" / "gc.lock"

    @property
    def _writers(self) -> Path:
        return self.path / ".aotc" / "writers"

    def finish_layout(self) -> None:
        """Write what is missing of an empty store; under its lock. Raises StoreError."""
        # oci-layout comes last: where it stands, the rest does too.
        make_folder(self.path / "blobs" / "sha256")
        if not exists(self.path / "index.json"):
            write_atomically(self.path / "index.json", EMPTY_INDEX)
        if not exists(self.path / "oci-layout"):
            write_atomically(self.path / "oci-layout", LAYOUT)


def _refuse_foreign(path: Path) -> None:
    """What is in the folder must be what a creation that was killed leaves."""
    foreign = foreign_to_creation(path)
    if foreign and not exists(path / "oci-layout"):  # another process may have finished it meanwhile
        raise StoreError(
            f"{path} is not a store and is not empty: it holds {', '.join(foreign[:5])}",
            hint="name a store, an empty folder or a new one",
            path=str(path),
        )


def foreign_to_creation(path: Path) -> list[str]:
    """The names in a folder that a creation which was killed does not leave. Raises StoreError."""
    with typed_errors("look into", path):
        return sorted(entry.name for entry in path.iterdir() if not _is_beginning(entry))


def _is_beginning(entry: Path) -> bool:
    if entry.name == "index.json":
        return entry.is_file() and entry.read_bytes() == EMPTY_INDEX
    if entry.name == "blobs":
        return all(inner.name == "sha256" and not any(inner.iterdir()) for inner in entry.iterdir())
    return entry.name in (".aotc", "lost+found") or entry.name.startswith(TEMPORARY_PREFIX)


# -- an index.json, of a folder or of an object store ------------------------------------------------------------------


def with_tag(data: bytes, model: str, tag: str, descriptor: Descriptor) -> bytes:
    """The bytes of an `index.json` in which `model:tag` names a bundle; other entries stay as they are.

    Raises ReferenceFormatError, CorruptError, SchemaVersionError.
    """
    name = Reference(None, model, tag=tag).name
    return _with_entry(data, name, _index_entry(name, model, descriptor))


def with_attachment(data: bytes, name: str, manifest: Descriptor) -> bytes:
    """The bytes of an `index.json` in which `name` names an image manifest, like a signature; others stay as they are.

    Raises CorruptError, SchemaVersionError.
    """
    fields = {"mediaType": manifest.media_type, "digest": manifest.digest, "size": manifest.size}
    return _with_entry(data, name, {**fields, "annotations": {oci.REF_NAME: name}})


def _index_entry(name: str, model: str, descriptor: Descriptor) -> dict[str, Any]:
    """The entry of a tag that is set now."""
    published = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return _named_entry(name, descriptor, {oci.MODEL: model, oci.PUBLISHED: published})


def _named_entry(name: str, descriptor: Descriptor, more: dict[str, str]) -> dict[str, Any]:
    annotations = {**(descriptor.annotations or {}), oci.REF_NAME: name, **more}
    return {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
        "annotations": annotations,
    }


def _with_entry(data: bytes, name: str, entry: dict[str, Any]) -> bytes:
    """The index with the entry called `name` replaced or added."""
    return _rewritten(data, lambda entries: [*(other for other in entries if _ref_name(other) != name), entry])


def _without_entries(data: bytes, gone: Collection[tuple[str, str]]) -> bytes:
    """The index without the entries of these names and digests."""
    return _rewritten(data, lambda entries: [one for one in entries if (_ref_name(one), one["digest"]) not in gone])


def _rewritten(data: bytes, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> bytes:
    """Through plain JSON, not through `Index`: fields and entries that aotc does not know must stay."""
    where = "index.json"
    oci.decode_index(data, where)
    try:
        index = json.loads(data)
        index["manifests"] = change(index["manifests"])
        return json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where} cannot be rewritten: {error}", path=where) from error


def _ref_name(entry: dict[str, Any]) -> str:
    return str((entry.get("annotations") or {}).get(oci.REF_NAME, ""))
