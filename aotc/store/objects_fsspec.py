"""Objects of anything that fsspec reaches: `sftp://`, `ftp://`, `hdfs://`, `file://`, …

Imported only when one of them is talked to. Credentials and endpoints are those of fsspec's own configuration
(`~/.config/fsspec/*.json`, `FSSPEC_<PROTOCOL>_<KEY>`).
"""

from __future__ import annotations

import contextlib
import posixpath
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

import fsspec
import fsspec.core
import fsspec.utils

from aotc.errors import AotcError, RemoteError, StoreError
from aotc.store.disk import temporary_name
from aotc.store.objects import Found, Version, too_large
from aotc.store.remote import CHUNK, Traffic


class FsspecObjects:
    """As `Objects`. Where renaming is no single step, a reader may come between and find nothing, or half."""

    writable = True
    conditional = False

    def __init__(self, url: str, traffic: Traffic) -> None:
        self.url = url
        self._traffic = traffic
        self._local = threading.local()  # many of fsspec's file systems are one connection, and not for two threads
        protocol = fsspec.utils.get_protocol(url)
        if protocol not in fsspec.available_protocols():
            raise StoreError(
                f"{url[:200]} is no store that aotc knows: neither aotc nor fsspec knows {protocol}://",
                hint="known are oci://, s3://, gs://, az://, https:// and what fsspec has installed",
            )

    def read(self, name: str, limit: int) -> Found | None:
        with self._typed("read", name):
            try:
                with self._files.open(self._path(name), "rb", block_size=CHUNK) as stream:
                    data = stream.read(limit + 1)
            except FileNotFoundError:
                return None
        if len(data) > limit:
            raise too_large(f"{self.url}/{name}", len(data), limit)
        self._traffic.count(received=len(data))
        return Found(data, {})

    def size(self, name: str) -> int | None:
        with self._typed("look for", name):
            try:
                return int(self._files.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def open(self, name: str, offset: int) -> Iterator[Iterator[bytes] | None]:
        with self._typed("fetch", name):
            try:
                stream = self._files.open(self._path(name), "rb", block_size=CHUNK)
            except FileNotFoundError:
                yield None
                return
            with stream:
                stream.seek(offset)
                yield self._pieces(stream)

    def put(self, name: str, stream: BinaryIO, size: int) -> None:
        path = self._path(name)
        with self._typed("write", name):
            self._files.makedirs(posixpath.dirname(path), exist_ok=True)
            temporary = f"{posixpath.dirname(path)}/{temporary_name()}"
            with self._files.open(temporary, "wb") as file:
                while data := stream.read(CHUNK):
                    file.write(data)
            self._files.mv(temporary, path)
        self._traffic.count(sent=size)

    def replace(self, name: str, data: bytes, seen: Version | None) -> bool:
        raise StoreError(
            f"cannot write {self.url}/{name} only where it is unchanged: fsspec has no such condition",
            hint="if one process at a time writes to this store, set AOTC_SINGLE_WRITER=1",
        )

    def remove(self, name: str) -> None:
        with self._typed("remove", name), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    @property
    def _files(self) -> Any:
        if not hasattr(self._local, "files"):
            self._local.files, self._local.root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        return self._local.files

    def _path(self, name: str) -> str:
        self._files  # noqa: B018
        return f"{self._local.root.rstrip('/')}/{name}"

    def _pieces(self, stream: BinaryIO) -> Iterator[bytes]:
        while data := stream.read(CHUNK):
            self._traffic.count(received=len(data))
            yield data

    @contextlib.contextmanager
    def _typed(self, action: str, name: str) -> Iterator[None]:
        self._traffic.count(requests=1)
        try:
            yield
        except AotcError:
            raise
        except ImportError as error:
            raise StoreError(
                f"{self.url} needs a library that is not installed: {error}", hint=f"pip install {error.name or ''}"
            ) from error
        except Exception as error:  # each file system has exceptions of its own
            raise _remote_error(f"cannot {action} {self.url}/{name}", self.url, error) from error


def _remote_error(message: str, url: str, error: Exception) -> RemoteError:
    lasting = isinstance(error, PermissionError | ValueError | TypeError | NotImplementedError | IsADirectoryError)
    text = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
    return RemoteError(f"{message}: {text}", url=url, transient=isinstance(error, OSError | EOFError) and not lasting)
