"""Objects under a prefix: a bucket of S3, GCS or Azure, a web server, a folder, a repository of the Hugging Face Hub.

The few operations that an OCI image layout needs. obstore does it for `s3://`, `gs://`, `az://` and `https://`: it
writes under a condition in one way on all three clouds (with s3fs, gcsfs and adlfs that takes private calls of each),
is one wheel without dependencies, imports in 5 ms, and finds the credentials and endpoints of the environment.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import BinaryIO, Literal, Protocol

import msgspec

from aotc.errors import CorruptError, RemoteError

BUCKET_SCHEMES = ("s3", "gs", "az")
WEB_SCHEMES = ("http", "https")

Version = dict[str, str]
"""A service's name for the current bytes of an object: an ETag, a generation."""


class StoredObject(msgspec.Struct, frozen=True):
    """The bytes of an object, and their version."""

    data: bytes
    version: Version


class Objects(Protocol):
    """Objects by their names, as `blobs/sha256/…`. Threads share one; each call is one attempt.

    Every method raises RemoteError.
    """

    url: str
    writable: bool

    @property
    def conditions(self) -> Literal["kept", "to probe", "none"]:
        """Whether `replace` looks at the version: always; as the server does, which a probe finds; or never."""

    def read(self, name: str, limit: int) -> StoredObject | None:
        """A small object, None where there is none. Raises CorruptError above `limit` bytes."""

    def size(self, name: str) -> int | None:
        """In bytes; None where there is no such object."""

    def open(self, name: str, offset: int) -> AbstractContextManager[Iterator[bytes] | None]:
        """The bytes from `offset` on, None where there is no such object."""

    def put(self, name: str, stream: BinaryIO, size: int) -> None:
        """Write an object, whole or not at all, over the one that is there."""

    def replace(self, name: str, data: bytes, seen: Version | None) -> bool:
        """Write a small object if it still is the one that was seen, or, with None, if there is none.

        False where it is another one.
        """

    def remove(self, name: str) -> None: ...


def too_large(path: str, size: int, limit: int) -> CorruptError:
    return CorruptError(
        f"{path} has {size} bytes, more than the {limit} allowed for it",
        hint="it is not an aotc bundle, or it is damaged",
        path=path,
        expected=f"at most {limit} bytes",
        actual=f"{size} bytes",
    )


# -- does the server look at conditions? ------------------------------------------------------------------------------

Condition = Callable[[Version], Version]
"""The form of a version that `Objects.replace` takes."""


def find_condition(objects: Objects) -> Condition | None:
    """The form in which this server compares versions; None if it ignores conditions.

    It is tried on an object of its own, since some servers ignore the headers without a word (`rclone serve s3`).
    Raises RemoteError.
    """
    if objects.conditions != "to probe":
        return _as_it_is if objects.conditions == "kept" else None
    name = f".aotc/probe-{secrets.token_hex(8)}"
    try:
        if not objects.replace(name, b"1", None):
            return None
        if objects.replace(name, b"2 on top of 1 that is there", None):
            return None
        return next((form for form in (_as_it_is, _unquoted) if _keeps(objects, name, form)), None)
    finally:
        with suppress(RemoteError):  # permission to write need not include deletion; a few bytes stay then
            objects.remove(name)


def _keeps(objects: Objects, name: str, form: Condition) -> bool:
    """Whether a write goes through on the version that is there, and not on one that was there before."""
    found = objects.read(name, limit=1 << 10)
    if found is None or not found.version or not objects.replace(name, found.data + b"+", form(found.version)):
        return False
    return not objects.replace(name, b"stale", form(found.version))


def _as_it_is(version: Version) -> Version:
    return version


def _unquoted(version: Version) -> Version:
    """Ceph's radosgw (16, at least) compares what stands in If-Match with the ETag without its quotes."""
    return {key: value.strip('"') for key, value in version.items()}
