"""The store: an OCI image layout on disk, its tags, and the one lock that its writers share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from aotc.errors import NotFoundError, StoreError
from aotc.store.files.disk import exists, typed_errors
from aotc.store.files.store_locks import locked
from aotc.store.files.writing import TEMPORARY_PREFIX, make_folder, write_atomically
from aotc.store.layout import oci
from aotc.store.layout.blobs import Blobs
from aotc.store.layout.index import (
    EMPTY_INDEX,
    find_attachment,
    tag_entry,
    with_attachment,
    with_entry,
    without_entries,
)
from aotc.store.layout.leases import Lease, lease, leases
from aotc.store.layout.names import is_digest
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.reader import StoreReader, checked_path
from aotc.store.layout.tags import TagEntry, tag_entries
from aotc.store.reference import Reference

T = TypeVar("T")
R = TypeVar("R")

LOCK_TIMEOUT = 60.0  # seconds; the lock is held for a few milliseconds
GC_TIMEOUT = 600.0  # seconds; gc and `fsck --repair` hold it while they run

FOLDERS = ("blobs", "blobs/sha256", ".aotc", ".aotc/writers", ".aotc/units", ".aotc/plans", ".aotc/logs")
"""Every folder of a store: `aotc gc` and repairs want them to be folders, and no links."""


class Store(StoreReader):
    """A folder that is an OCI image layout, read and written.

    STORE/
    ├── oci-layout             {"imageLayoutVersion":"1.0.0"}, written last when a store is made
    ├── index.json             the tags; replaced as a whole, under the lock
    ├── blobs/sha256/<hex>     see `Blobs`
    └── .aotc/
        ├── index.lock         held while index.json is replaced
        ├── gc.lock            shared by who names blobs, held alone by gc
        ├── writers/<hex>      one for each running writer, see `aotc.store.layout.leases`
        └── units/<hex>.json   finished units, see `aotc.store.layout.units`
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
            refuse_foreign(path)
            with store.lock():
                store.finish_layout()
        return cls.open(path, lock_timeout=lock_timeout)

    def tags(self) -> list[TagEntry]:
        """Every tag, sorted. Takes no lock. Raises CorruptError, StoreError."""
        return sorted(tag_entries(self.read_index()), key=lambda entry: (entry.model, entry.tag, entry.digest))

    def entries(self) -> tuple[Descriptor, ...]:
        """Every entry of `index.json`, those of other tools too. Takes no lock. Raises CorruptError, StoreError."""
        return self.read_index().manifests

    def set_tag(self, model: str, tag: str, descriptor: Descriptor) -> None:
        """Let `model:tag` name a bundle from now on, under the lock; other entries stay as they are.

        Raises NotFoundError where the bundle's blob is not in the store, ReferenceFormatError, StoreError.
        """
        name = Reference(None, model, tag=tag).name
        entry = tag_entry(name, model, descriptor)
        with self.sharing(), self.lock():
            if not self.blobs.has(descriptor.digest, descriptor.size):
                raise NotFoundError(
                    f"{name} cannot name {descriptor.digest}: the store has no such blob of {descriptor.size} bytes",
                    known=(),
                )
            data = self.read_index_bytes()
            index = self.decode(data)
            self._spare_for_readers(other for other in index.manifests if other.annotation(oci.REF_NAME) == name)
            write_atomically(self.path / "index.json", with_entry(data, name, entry))

    def remove_entries(self, entries: Collection[Descriptor]) -> None:
        """Remove entries of `index.json`, under the lock; their blobs stay for the grace period of gc.

        Raises CorruptError, StoreError.
        """
        gone = {(entry.annotation(oci.REF_NAME), entry.digest) for entry in entries}
        with self.lock():
            data = self.read_index_bytes()
            self._spare_for_readers(entries)
            write_atomically(self.path / "index.json", without_entries(data, gone))

    def _spare_for_readers(self, entries: Iterable[Descriptor]) -> None:
        """Set the time of the old bundle's blobs to now: a reader may have read the tag a moment ago."""
        for entry in entries:
            if is_digest(entry.digest):
                self.blobs.touch(entry.digest, oci.MANIFEST_LIMIT)

    def change_attachment(self, name: str, change: Callable[[Descriptor | None], Descriptor]) -> Descriptor:
        """Let `name` name what `change` makes of the manifest that has the name now. `change` runs under the lock.

        Raises what `change` raises, CorruptError, StoreError.
        """
        with self.sharing(), self.lock():
            data = self.read_index_bytes()
            index = self.decode(data)
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
        """Write the missing files of an empty store, under its lock. Raises StoreError."""
        # oci-layout comes last: where it stands, the rest does too.
        make_folder(self.path / "blobs" / "sha256")
        if not exists(self.path / "index.json"):
            write_atomically(self.path / "index.json", EMPTY_INDEX)
        if not exists(self.path / "oci-layout"):
            write_atomically(self.path / "oci-layout", oci.LAYOUT)


def refuse_foreign(path: Path) -> None:
    """Raise StoreError if the folder holds anything but the beginning of a store, which a killed process leaves."""
    foreign = foreign_to_creation(path)
    if foreign and not exists(path / "oci-layout"):  # another process may have finished it meanwhile
        raise StoreError(
            f"{path} is not a store and is not empty: it holds {', '.join(foreign[:5])}",
            hint="`aotc fsck --repair` writes its oci-layout again"
            if {"blobs", "index.json"} <= {*foreign}
            else "name a store, an empty folder or a new one",
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
