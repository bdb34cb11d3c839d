"""Opens a store at a path or URL: the one module that knows every kind of place."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlsplit

from aotc.errors import ReferenceFormatError, StoreError
from aotc.store.layout.store import Store
from aotc.store.readable import Listable
from aotc.store.reference import REGISTRY_SCHEMES, is_remote
from aotc.store.remote.interface import Limits, Remote, Traffic
from aotc.store.remote.objects.folder import FolderObjects
from aotc.store.remote.objects.object_interface import BUCKET_SCHEMES, WEB_SCHEMES, Objects
from aotc.store.remote.objects.object_store import ObjectStore
from aotc.store.remote.registry.repository import Registry
from aotc.store.remote.remote_store import RemoteStore
from aotc.store.remote.transfer import OnTransfer, Transfer

BACKENDS = "aotc.objects"
"""Entry points by which a package adds a scheme: `objects(url, limits, traffic)` gives an `Objects`."""


def open_readable(where: str) -> Listable:
    """The store in a folder or at a URL; nothing is connected to yet. Raises NotFoundError, StoreError, as `Store.open`
    does."""
    return RemoteStore(open_transfer(where)) if is_remote(where) else Store.open(Path(where))


def open_transfer(url: str, limits: Limits | None = None, on_event: OnTransfer | None = None) -> Transfer:
    """A transfer with the remote at a URL, which is opened when something is first asked of it."""
    return Transfer(url, open_remote, limits, on_event)


def open_remote(url: str, limits: Limits) -> Remote:
    """The remote at a URL; connects to nothing yet.

    Raises StoreError for an unknown scheme or a missing library, ReferenceFormatError for any other text.
    """
    if url.partition("://")[0] in REGISTRY_SCHEMES:
        try:
            import_module("aotc.store.remote.registry.session")
        except ImportError as error:
            if (error.name or "").partition(".")[0] == "aotc":
                raise
            raise _missing(url, "oci", error) from error
        return Registry(url, limits)
    return ObjectStore(open_objects(url, limits, traffic := Traffic()), traffic)


def open_objects(url: str, limits: Limits, traffic: Traffic) -> Objects:
    """The objects below a URL; connects to nothing yet.

    Raises ReferenceFormatError for a URL with a password or without a bucket, StoreError for a missing library or a
    configuration that cannot be used.
    """
    url = url.rstrip("/")
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ReferenceFormatError(
            "the URL of a store holds no user or password",  # and no message repeats them
            hint="https:// takes them from ~/.netrc, and the others from the environment",
        )
    if parts.scheme in (*BUCKET_SCHEMES, *WEB_SCHEMES):
        if not parts.netloc:
            raise ReferenceFormatError(
                f"{url!r} names no {'bucket' if parts.scheme in BUCKET_SCHEMES else 'host'}",
                hint="write s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or https://HOST/PATH",
            )
        if parts.query:
            raise ReferenceFormatError(
                f"the URL of a store has no query; this one has {parts.query[:20]!r}…",
                hint="leave out the `?` and what follows; settings come from the environment",
            )
        return _installed("obstore:ObstoreObjects", "objects", url)(url, limits, traffic)
    if parts.scheme == "hf":
        return _installed("hub:HubObjects", "hub", url)(url, limits, traffic)
    for found in entry_points(group=BACKENDS, name=parts.scheme):
        made: Objects = found.load()(url, limits, traffic)
        return made
    if parts.scheme != "file":
        raise StoreError(
            f"{url[:200]} is not a store that aotc knows",
            hint=f"known are oci://, s3://, gs://, az://, hf://, https://, file:///, and entry points of {BACKENDS}",
        )
    return FolderObjects(url, traffic)


def _installed(backend: str, extra: str, url: str) -> Callable[..., Objects]:
    """The class of this `module:name`. Raises StoreError where the library of its extra is missing."""
    module, _, kind = backend.partition(":")
    try:
        found: Callable[..., Objects] = getattr(import_module(f"aotc.store.remote.objects.{module}"), kind)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "aotc":
            raise
        raise _missing(url, extra, error) from error
    return found


def _missing(url: str, extra: str, error: ImportError) -> StoreError:
    from aotc.store.extras import install_hint

    message = f"{url} needs a library that is not installed: {error.name or error}"
    return StoreError(message, hint=install_hint(extra))
