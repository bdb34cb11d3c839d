"""Remotes: stores that are reached over a network. Their interface, and time limits and retries.

A registry (`aotc.store.remote.registry`) and an object store (`aotc.store.remote.objects`) are remotes.
`aotc.store.remote.transfer` moves blobs between a remote and this host, and is all that retries.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO, Protocol, TypeVar

import msgspec

from aotc.errors import RemoteError, StoreError
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.tags import TagEntry
from aotc.store.reference import Reference

T = TypeVar("T")

_log = logging.getLogger("aotc")

CHUNK = 1 << 18  # bytes between two looks at the clock, and at most lost when a download breaks


class Traffic:
    """Counters of network traffic: HTTP requests (failed ones too), and bytes of bodies. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests = self.received = self.sent = 0

    def count(self, *, requests: int = 0, received: int = 0, sent: int = 0) -> None:
        with self._lock:
            self.requests += requests
            self.received += received
            self.sent += sent


class Remote(Protocol):
    """A place that holds blobs and tags. Threads share one; each method is one attempt and never retries.

    Every method raises RemoteError (`transient` where another attempt may do) or NotFoundError. Whatever is read is
    for the caller to check against its digest. What a tag names must be whole before the tag names it: blobs first,
    then documents (records, manifests, the bundle), then the tag.
    """

    url: str
    traffic: Traffic

    def resolve(self, reference: Reference) -> Descriptor:
        """The bundle that a reference names; its store part is not looked at."""

    def attachment(self, name: str) -> Descriptor | None:
        """The image manifest called `name`, like the signature `sha256-<hex>.sig`; None where there is none."""

    def read(self, media_type: str, digest: str, limit: int) -> bytes:
        """A small document or blob. Raises CorruptError above `limit` bytes."""

    def open_blob(self, digest: str, size: int, offset: int) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes of a blob from `offset` on, in pieces of at most about `CHUNK`."""

    def has_blob(self, digest: str, size: int) -> bool: ...

    def put_blob(self, digest: str, size: int, stream: BinaryIO) -> None:
        """Upload a blob. Putting one that is there, also by two writers at once, is not an error."""

    def put_document(self, media_type: str, data: bytes) -> None:
        """Upload a record, manifest or bundle under its own digest; as `put_blob`."""

    def set_tag(self, reference: Reference, media_type: str, data: bytes) -> None:
        """Upload the bundle whose bytes are `data`, and let a tag name it from now on, at once.

        Two concurrent writers of one tag: the last one wins, and the tag names one of both bundles, whole. Writers of
        different tags never undo one another; where a remote cannot promise that, it refuses the second writer.
        """

    def remove_tag(self, reference: Reference) -> None:
        """Remove a tag, and nothing of what it names; one that is gone already, as after an attempt whose answer was
        lost, is not an error. StoreError where the remote removes none."""

    def set_attachment(self, name: str, data: bytes, seen: Descriptor | None) -> None:
        """Upload the image manifest whose bytes are `data`, and call it `name` from now on; as `set_tag`.

        If `name` does not name `seen` any more, all stays as it is.
        """

    def tags(self) -> list[TagEntry]:
        """Every tag, sorted; StoreError where a remote cannot say what they name without being asked for each."""

    def known(self, reference: Reference) -> list[str]:
        """Names like `reference` that exist, for messages; [] where they are not cheap to get."""


# -- how long and how often -------------------------------------------------------------------------------------------


class Limits(msgspec.Struct, frozen=True):
    """Limits on every talk with a remote, in seconds; `AOTC_REMOTE_<FIELD>` of the environment sets a default.

    connect: until a connection stands, TLS included. read: the longest wait for the next byte. total: a whole load,
    push or fetch. attempts: in a row without a byte of progress. backoff: the first retry waits a random part of it,
    the next of twice as much, … up to `longest_wait`. jobs: connections at a time.
    """

    connect: float = 10.0
    read: float = 30.0
    total: float = 600.0
    attempts: int = 8
    backoff: float = 0.5
    longest_wait: float = 30.0
    jobs: int = 8

    @classmethod
    def from_environment(cls) -> Limits:
        """Raises StoreError for a value that is not a positive number."""
        chosen: dict[str, float | int] = {}
        for field in cls.__struct_fields__:
            name = f"AOTC_REMOTE_{field.upper()}"
            if text := os.environ.get(name):
                chosen[field] = _positive(name, text, type(getattr(cls(), field)))
        return cls(**chosen)  # type: ignore[arg-type]


def _positive(name: str, text: str, kind: type[float] | type[int]) -> float | int:
    try:
        value = kind(text)
    except ValueError:
        value = kind(0)
    if not 0 < value < float("inf"):
        what = "a whole number" if kind is int else "a number of seconds"
        raise StoreError(f"{name} is {text[:100]!r}, and not {what} above 0", hint=f"unset {name}, or correct it")
    return value


class Deadline:
    """When a whole load, push or fetch has to be done. `cancel` ends it early, for all its threads."""

    def __init__(self, seconds: float, url: str) -> None:
        self._seconds = seconds
        self._url = url
        self._end = time.monotonic() + seconds
        self._cancelled = threading.Event()

    def check(self) -> None:
        """Raises RemoteError when the time is over or the work was cancelled."""
        if self._cancelled.is_set():
            raise RemoteError(f"the transfer with {self._url} was cancelled", url=self._url, transient=False)
        if time.monotonic() >= self._end:
            raise self._over()

    def left(self) -> float:
        """The seconds that are left, above 0. Raises as `check` does."""
        self.check()
        return max(0.001, self._end - time.monotonic())

    @contextmanager
    def governing(self) -> Iterator[None]:
        """Set the deadline for what this thread sends and receives within: see `time_left`."""
        before = getattr(_governing, "deadline", None)
        _governing.deadline = self
        try:
            yield
        finally:
            _governing.deadline = before

    def wait(self, seconds: float) -> None:
        """Sleep; raises RemoteError at once where the time left is shorter, and when cancelled."""
        if time.monotonic() + seconds >= self._end:
            raise self._over(f": the next attempt is {min(seconds, 1e9):.0f} s away")
        self._cancelled.wait(seconds)
        self.check()

    def cancel(self) -> None:
        self._cancelled.set()

    def _over(self, why: str = "") -> RemoteError:
        return RemoteError(
            f"{self._url} was not done within {self._seconds:g} s{why}",
            hint="AOTC_REMOTE_TOTAL sets the limit for a whole load, push or fetch, in seconds",
            url=self._url,
            transient=False,
        )


_governing = threading.local()


def time_left() -> float | None:
    """The seconds that the deadline governing this thread leaves, None where there is none. Raises RemoteError."""
    deadline: Deadline | None = getattr(_governing, "deadline", None)
    return None if deadline is None else deadline.left()


class Retry:
    """Decides after each failure whether to try again, and waits: exponential backoff with full jitter.

    A thousand replicas that fail at the same instant then come back spread over the whole wait, and not all together.
    What the server asks for with Retry-After is waited for in any case, and the jitter comes on top.
    """

    def __init__(self, limits: Limits, deadline: Deadline) -> None:
        self._limits = limits
        self._deadline = deadline
        self._failures = 0

    def progressed(self) -> None:
        """Something was transferred: reset the count of failures in a row."""
        self._failures = 0

    def after(self, error: RemoteError) -> None:
        """Wait before the next attempt; raises `error` where there is to be none."""
        self._failures += 1
        if not error.fields.get("transient"):
            raise error
        if self._failures >= self._limits.attempts:
            raise error.with_fields(attempts=self._failures)
        pause = self._pause() + (error.fields.get("retry_after") or 0.0)
        _log.warning(
            "%s; tried again in %.1f s (%d of %d)", error.message, pause, self._failures, self._limits.attempts
        )
        try:
            self._deadline.wait(pause)
        except RemoteError as over:
            raise over from error

    def _pause(self) -> float:
        longest = min(self._limits.longest_wait, self._limits.backoff * 2 ** (self._failures - 1))
        return random.uniform(0, longest)


def retrying(limits: Limits, deadline: Deadline, attempt: Callable[[], T]) -> T:
    """Call `attempt()`, again after transient RemoteErrors, and return its result."""
    retry = Retry(limits, deadline)
    while True:
        deadline.check()
        try:
            with deadline.governing():
                return attempt()
        except RemoteError as error:
            retry.after(error)
