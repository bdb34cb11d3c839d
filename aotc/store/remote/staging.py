"""Builds for a store at a URL: the local store in which the build works, and the transfers between both."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.store.cache_folder import cache_folder
from aotc.store.layout.blobs import Blob
from aotc.store.layout.bundle import each_file
from aotc.store.layout.names import hex_of
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, decode_unit, encode_unit, find_unit, put_unit
from aotc.store.opening import open_remote
from aotc.store.reference import Reference
from aotc.store.remote.copied import Copied
from aotc.store.remote.interface import Limits
from aotc.store.remote.objects.object_store import ObjectStore
from aotc.store.remote.push import push
from aotc.store.remote.transfer import OnTransfer, Transfer

VERSION = "staging-v1"


class Staging:
    """The store on this host in which a build for the store at `url` works.

    folder/                             AOTC_CACHE_DIR
    └── staging-v1/<hex of url>/        a store; what is in it need not be fetched by the next build

    A unit goes to the URL as soon as it is finished, so a build that is killed, on a machine that is then deleted,
    loses no unit but the running ones. The tag comes last.
    """

    def __init__(self, url: str, limits: Limits | None = None) -> None:
        """Raises StoreError where the URL is not that of an object store, or the cache folder cannot be written."""
        self.url = url
        self._limits = limits or Limits.from_environment()
        remote = open_remote(url, self._limits)
        if not isinstance(remote, ObjectStore):
            raise StoreError(
                f"{url} cannot be built into: a registry keeps no finished units",
                hint="build into a folder or a bucket, then `aotc push` from there",
            )
        self._remote = remote
        self.store = Store.create(cache_folder() / VERSION / hex_of(sha256_bytes(url.encode()))[:16])
        self._kept: set[str] = set()
        self._lock = threading.Lock()

    def fetch(self, keys: Iterable[str]) -> set[str]:
        """Bring the finished units that the URL has, with their files, into the store; the keys of those.

        Raises RemoteError, StoreError. What is damaged there is left out, since it can be compiled.
        """
        transfer = self._transfer()
        units = [unit for unit in transfer.each(lambda key: self._read(transfer, key), keys) if unit is not None]
        files = {file.blob: file for unit in units for file in each_file(unit.artifact)}
        blobs = [Blob(digest=file.blob, size=file.blob_size) for file in files.values()]
        transfer.each(lambda blob: self._fetch_blob(transfer, blob), blobs)
        fetched = {unit.key for unit in units if self._put_if_whole(unit)}
        self._kept |= fetched
        return fetched

    def keep(self, key: str) -> None:
        """Upload a finished unit of the store, its files first, unless the URL has it from us.

        Raises RemoteError, StoreError.
        """
        with self._lock:
            unit = None if key in self._kept else find_unit(self.store, key)
            if unit is None:
                return
            transfer = self._transfer()
            files = {file.blob: file for file in each_file(unit.artifact)}.values()
            blobs = [Blob(digest=file.blob, size=file.blob_size) for file in files]
            transfer.each(lambda blob: transfer.upload(blob, self.store.blobs.path(blob.digest)), blobs)
            data = encode_unit(unit)
            transfer.retrying(lambda: self._remote.put_unit(key, data))
            self._kept.add(key)

    def push(self, model: str, tag: str, on_event: OnTransfer | None = None) -> Copied:
        """Upload a bundle of the store, and last let the same tag name it at the URL. Raises as `push` does."""
        reference = Reference(None, model, tag=tag)
        there = Reference(self.url, model, tag=tag)
        return push(self.store, reference, there, limits=self._limits, on_event=on_event)

    def _transfer(self) -> Transfer:
        """Each step has the whole time that a transfer may take: between two of them a unit may compile for long."""
        return Transfer(self.url, lambda url, limits: self._remote, self._limits)

    def _read(self, transfer: Transfer, key: str) -> UnitRecord | None:
        data = transfer.retrying(lambda: self._remote.read_unit(key))
        if data is None:
            return None
        try:
            return decode_unit(data, key, f"the unit {key} at {self.url}")
        except (CorruptError, SchemaVersionError):
            return None  # it is compiled again, and then replaced

    def _fetch_blob(self, transfer: Transfer, blob: Blob) -> None:
        try:
            transfer.fetch(blob, self.store.blobs, durable=True)
        except (CorruptError, LookupError):
            return  # `_put_if_whole` misses it

    def _put_if_whole(self, unit: UnitRecord) -> bool:
        try:
            put_unit(self.store, unit)
        except LookupError:
            return False
        return True
