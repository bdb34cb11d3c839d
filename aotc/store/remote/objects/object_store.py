"""A store on object storage or a web server, as a remote: the same OCI image layout, object by object."""

from __future__ import annotations

import contextlib
import io
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, NotFoundError, RemoteError, StoreError
from aotc.store.layout import index, oci, reader, tags
from aotc.store.layout.names import hex_of
from aotc.store.layout.near_stores import not_found
from aotc.store.layout.oci import Descriptor, ImageIndex
from aotc.store.layout.reader import INDEX_LIMIT
from aotc.store.layout.tags import TagEntry
from aotc.store.layout.units import UNIT_LIMIT
from aotc.store.reference import Reference
from aotc.store.remote.interface import Traffic
from aotc.store.remote.objects.object_interface import Condition, Objects, StoredObject, find_condition

SINGLE_WRITER = "AOTC_SINGLE_WRITER"

_ROUNDS = 200  # writers that came first, one after the other, before this one gives up
_LONGEST_WAIT = 1.0  # seconds between two tries to change index.json


class ObjectStore:
    """A store below a URL.

    URL/
    ├── oci-layout
    ├── index.json                  the tags: read, changed, and written if it is still what was read
    ├── blobs/sha256/<64 hex>
    └── .aotc/
        ├── units/<hex of key>.json finished units
        └── probe-<16 hex>          what a writer tries the server's conditions on; removed at once

    Before its first write a writer finds out whether the server looks at conditions. Where it does not, two writers
    could undo each other's tags, so writing is refused unless `AOTC_SINGLE_WRITER=1` says that there is but one.
    """

    def __init__(self, objects: Objects, traffic: Traffic) -> None:
        self.url = objects.url
        self.traffic = traffic
        self._objects = objects
        self._lock = threading.Lock()
        self._is_read = self._may_write = False
        self._condition: Condition | None = None

    # -- reading ------------------------------------------------------------------------------------------------------

    def resolve(self, reference: Reference) -> Descriptor:
        if reference.digest is None:
            return reader.find_tag(self._index(), reference, self.url)
        size = self._objects.size(_blob(reference.digest))
        if size is None:
            raise not_found(reference, self.known(reference), self.url)
        return Descriptor(media_type=oci.INDEX, digest=reference.digest, size=size)

    def attachment(self, name: str) -> Descriptor | None:
        return index.find_attachment(self._index(), name, f"{self.url}/index.json")

    def tags(self) -> list[TagEntry]:
        """Every tag, sorted. Raises CorruptError, RemoteError."""
        return sorted(tags.tag_entries(self._index()), key=lambda entry: (entry.model, entry.tag, entry.digest))

    def known(self, reference: Reference) -> list[str]:
        tags = self.tags()
        return [str(tag) if reference.digest is None else f"{tag.model}@{tag.digest}" for tag in tags]

    def read(self, media_type: str, digest: str, limit: int) -> bytes:
        found = self._objects.read(_blob(digest), limit)
        if found is None:
            raise self._missing(digest)
        return found.data

    @contextlib.contextmanager
    def open_blob(self, digest: str, size: int, offset: int) -> Iterator[Iterator[bytes]]:
        with self._objects.open(_blob(digest), offset) as chunks:
            if chunks is None:
                raise self._missing(digest)
            yield chunks

    def has_blob(self, digest: str, size: int) -> bool:
        return self._objects.size(_blob(digest)) == size

    def read_unit(self, key: str) -> bytes | None:
        """The bytes of a finished unit, None where there is none. Raises CorruptError, RemoteError."""
        found = self._objects.read(_unit(key), UNIT_LIMIT)
        return None if found is None else found.data

    # -- writing ------------------------------------------------------------------------------------------------------

    def put_blob(self, digest: str, size: int, stream: BinaryIO) -> None:
        self._prepare_to_write()
        self._objects.put(_blob(digest), stream, size)

    def put_document(self, media_type: str, data: bytes) -> None:
        self.put_blob(sha256_bytes(data), len(data), io.BytesIO(data))

    def put_unit(self, key: str, data: bytes) -> None:
        """Remember a finished unit whose blobs are there. Raises RemoteError, StoreError."""
        self._prepare_to_write()
        self._objects.put(_unit(key), io.BytesIO(data), len(data))

    def set_tag(self, reference: Reference, media_type: str, data: bytes) -> None:
        """As `Remote.set_tag`. Raises StoreError where the rule of a single writer is not kept, too."""
        if reference.tag is None:
            raise StoreError(f"{reference} has no tag to set", hint=f"write {self.url}#model:tag")
        model, tag = reference.model, reference.tag
        self.put_document(media_type, data)
        created = oci.decode(data, ImageIndex, reference.name).annotation(oci.CREATED)
        annotations = index.created_annotation(created)
        named = Descriptor(media_type, sha256_bytes(data), len(data), annotations=annotations)
        self._change_index(lambda data: index.with_tag(data, model, tag, named))

    def remove_tag(self, reference: Reference) -> None:
        self._prepare_to_write()
        where = f"{self.url}/index.json"

        def change(data: bytes) -> bytes:
            found = tags.tag_entries(oci.decode(data, ImageIndex, where))
            gone = {(str(entry), entry.digest) for entry in found if str(entry) == reference.name}
            return index.without_entries(data, gone) if gone else data

        self._change_index(change)

    def set_attachment(self, name: str, data: bytes, seen: Descriptor | None) -> None:
        """Upload the image manifest whose bytes are `data`, and call it `name`, if that still names `seen`."""
        self.put_document(oci.MANIFEST, data)
        manifest = Descriptor(media_type=oci.MANIFEST, digest=sha256_bytes(data), size=len(data))
        where = f"{self.url}/index.json"

        def change(data: bytes) -> bytes:
            named = index.find_attachment(oci.decode(data, ImageIndex, where), name, where)
            return index.with_attachment(data, name, manifest) if named == seen else data

        self._change_index(change)

    def _change_index(self, change: Callable[[bytes], bytes]) -> None:
        """Read index.json, change it, and write it if it is still the one that was read; else again."""
        for round_ in range(_ROUNDS):
            found = self._objects.read("index.json", INDEX_LIMIT)
            if found is None:
                raise self._without_index()
            if self._replace_index(found, change(found.data)):
                return
            time.sleep(random.uniform(0, min(_LONGEST_WAIT, 0.01 * 2**round_)))
        raise RemoteError(
            f"{self.url}/index.json was changed by others {_ROUNDS} times while it was to be written",
            hint="fewer writers at a time",
            url=self.url,
            transient=True,
        )

    def _replace_index(self, seen: StoredObject, data: bytes) -> bool:
        if self._condition is not None:
            return self._objects.replace("index.json", data, self._condition(seen.version))
        self._objects.put("index.json", io.BytesIO(data), len(data))
        written = self._objects.read("index.json", INDEX_LIMIT)
        if written is None or written.data != data:
            raise StoreError(
                f"{self.url} has another writer, though {SINGLE_WRITER}=1 says that there is none: tags may be lost",
                hint="push again, and let one process at a time write to this store",
            )
        return True

    def _prepare_to_write(self) -> None:
        """Once, before anything is written: is there a store, and may we be one of several writers?"""
        with self._lock:
            if self._may_write:
                return
            if not self._objects.writable:
                raise StoreError(
                    f"{self.url} can only be read: HTTP has no one way to write",
                    hint="push to the bucket behind it, as s3://, gs:// or az://, or copy a store's folder there",
                )
            self._condition = find_condition(self._objects)
            if self._condition is None and os.environ.get(SINGLE_WRITER) != "1":
                raise StoreError(
                    f"{self.url} writes an object whatever the condition says (If-Match, If-None-Match), so two "
                    "writers could undo each other's tags",
                    hint=f"if one process at a time writes to this store, set {SINGLE_WRITER}=1",
                    url=self.url,
                )
            self._make_layout()
            self._may_write = True

    def _make_layout(self) -> None:
        """oci-layout comes last: where it stands, the rest does too."""
        if self._has_layout():
            return
        if self._condition is not None:
            self._objects.replace("index.json", index.EMPTY_INDEX, None)  # False: another was faster
        elif self._objects.size("index.json") is None:
            self._objects.put("index.json", io.BytesIO(index.EMPTY_INDEX), len(index.EMPTY_INDEX))
        self._objects.put("oci-layout", io.BytesIO(oci.LAYOUT), len(oci.LAYOUT))

    # -- the layout's own files ---------------------------------------------------------------------------------------

    def _index(self) -> ImageIndex:
        if not self._is_read and not self._has_layout():
            raise NotFoundError(
                f"there is no store at {self.url}: it has no oci-layout",
                hint="`aotc push` makes one; check the bucket and the path",
                known=(),
            )
        self._is_read = True
        found = self._objects.read("index.json", INDEX_LIMIT)
        if found is None:
            raise self._without_index()
        return oci.decode(found.data, ImageIndex, f"{self.url}/index.json")

    def _has_layout(self) -> bool:
        """Raises SchemaVersionError for another version of the layout, CorruptError."""
        found = self._objects.read("oci-layout", oci.MANIFEST_LIMIT)
        if found is not None:
            oci.check_layout(found.data, f"{self.url}/oci-layout")
        return found is not None

    def _without_index(self) -> CorruptError:
        return CorruptError(
            f"{self.url} has no index.json, so its tags are lost",
            hint="restore index.json from a copy of the store, or push again to another place",
            path=f"{self.url}/index.json",
            expected="an object",
            actual="nothing",
        )

    def _missing(self, digest: str) -> NotFoundError:
        return NotFoundError(
            f"{digest} is not in {self.url}",
            hint="the store was copied in part or cleaned by hand: push the bundle again",
            known=(),
            digest=digest,
        )


def _blob(digest: str) -> str:
    return f"blobs/sha256/{hex_of(digest)}"


def _unit(key: str) -> str:
    return f".aotc/units/{hex_of(key)}.json"
