"""A repository of an OCI registry as a remote.

The five endpoints of the OCI distribution specification 1.0 that it takes, over `requests`. Of the Python clients on
PyPI, oras (0.2) and python-dxf (12) are thin layers over `requests` too, and would have to be gone round for each of:
uploads that stream, downloads that resume, time limits, errors that keep URL and status, tokens that are renewed, and
credentials from anywhere but ~/.docker/config.json.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import quote, urljoin

import msgspec

from aotc.amounts import listed
from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, NotFoundError, RemoteError, StoreError
from aotc.records import decode
from aotc.store.layout import oci
from aotc.store.layout.names import hex_of, is_digest
from aotc.store.layout.near_stores import nearest_first
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.tags import TagEntry
from aotc.store.reference import Reference
from aotc.store.remote.interface import Limits, Traffic

if TYPE_CHECKING:
    import requests

    from aotc.store.remote.registry.session import Session

TAGS_LIMIT = 1 << 20  # bytes of a list of tags that are read for a message

_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|\[::1\]")
_DOCKER_HUB = "registry-1.docker.io"
_MANIFESTS = (oci.INDEX, oci.MANIFEST)


class Registry:
    """A repository: bundles are its tags. Setting a tag is one request, so of two writers the last one wins, whole.

    `oci://` is HTTPS, and plain HTTP on this machine's own addresses; `oci+http://` and `oci+https://` say which.
    """

    def __init__(self, url: str, limits: Limits) -> None:
        Reference(url, "", tag="latest")  # refuses what is not a repository
        scheme, _, rest = url.partition("://")
        host, _, repository = rest.partition("/")
        plain = scheme == "oci+http" or (scheme == "oci" and _LOOPBACK.fullmatch(re.sub(r":\d+$", "", host)))
        if host == "docker.io":
            host, repository = _DOCKER_HUB, repository if "/" in repository else f"library/{repository}"
        self.url = url
        self.traffic = Traffic()
        base = f"{'http' if plain else 'https'}://{host}"
        self._repository = f"{base}/v2/{repository}"
        self._session = _session(base, host, repository, limits, self.traffic)

    def resolve(self, reference: Reference) -> Descriptor:
        found = self._look_up(reference.digest or str(reference.tag), reference.name, (oci.INDEX, oci.MANIFEST))
        if found is None:
            raise self._not_found(reference)
        if found.media_type != oci.INDEX:
            raise CorruptError(
                f"{reference.name} is {found.media_type or 'of no type'}, and not an aotc bundle",
                hint="it is an image, or something else: name a bundle that `aotc push` put there",
                expected=oci.INDEX,
                actual=found.media_type,
            )
        if reference.digest not in (None, found.digest):
            raise CorruptError(
                f"{self.url} gives {found.digest} for {reference.digest}",
                hint="the registry, or a proxy before it, is broken",
                expected=str(reference.digest),
                actual=found.digest,
            )
        return found

    def attachment(self, name: str) -> Descriptor | None:
        found = self._look_up(name, name, (oci.MANIFEST,))
        return found if found is not None and found.media_type == oci.MANIFEST else None

    def _look_up(self, name: str, shown: str, accepted: Sequence[str]) -> Descriptor | None:
        """What a tag or digest names, by one request; by two where the registry does not say digest and size."""
        headers = {"Accept": ", ".join(accepted)}
        with self._session.send(
            "HEAD", self._manifest(name), f"find {shown}", expected=(200, 404), headers=headers
        ) as response:
            if response.status_code == 404:
                return None
            media_type = response.headers.get("Content-Type", "").partition(";")[0]
            digest, size = (response.headers.get(key, "") for key in ("Docker-Content-Digest", "Content-Length"))
        if not is_digest(digest) or not re.fullmatch("[0-9]{1,18}", size):
            data = self.read(media_type if media_type in _MANIFESTS else oci.INDEX, name, oci.MANIFEST_LIMIT)
            digest, size = sha256_bytes(data), str(len(data))
        return Descriptor(media_type=media_type, digest=digest, size=int(size))

    def read(self, media_type: str, digest: str, limit: int) -> bytes:
        url = self._manifest(digest) if media_type in _MANIFESTS else self._blob(digest)
        what = f"read {digest}"
        with self._session.send(
            "GET", url, what, expected=(200, 404), headers={"Accept": f"{media_type}, */*;q=0.1"}
        ) as response:
            if response.status_code == 404:
                raise self._missing(digest)
            data = self._session.read(response, limit)
            self.traffic.count(received=len(data))
            return data

    @contextlib.contextmanager
    def open_blob(self, digest: str, size: int, offset: int) -> Iterator[Iterator[bytes]]:
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        url = self._blob(digest)
        with self._session.send("GET", url, f"fetch {digest}", expected=(200, 206, 404), headers=headers) as response:
            if response.status_code == 404:
                raise self._missing(digest)
            skip = 0 if response.status_code == 206 else offset  # a registry may ignore Range
            start = response.headers.get("Content-Range", f"bytes {offset}-")
            if response.status_code == 206 and not start.startswith(f"bytes {offset}-"):
                raise RemoteError(
                    f"{url} was asked for the bytes from {offset} on and sends {start!r}",
                    hint="a proxy before the registry answers ranges wrongly: go round it",
                    url=url,
                    status=206,
                    transient=False,
                )
            yield self._counted(response, skip)

    def has_blob(self, digest: str, size: int) -> bool:
        what = f"look for {digest}"
        with self._session.send("HEAD", self._blob(digest), what, expected=(200, 404)) as response:
            said, length = (response.headers.get(key) for key in ("Docker-Content-Digest", "Content-Length"))
            # Any 200 is not enough: a proxy that wants a login, say, answers whatever it is asked with a page.
            return response.status_code == 200 and (said == digest if said else length == str(size))

    def put_blob(self, digest: str, size: int, stream: BinaryIO) -> None:
        what = f"upload {digest}"
        with self._session.send("POST", f"{self._repository}/blobs/uploads/", what, expected=(202,)) as response:
            location = self._upload_url(response)
        url = f"{location}{'&' if '?' in location else '?'}digest={quote(digest)}"
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)}
        with self._session.send(
            "PUT", url, what, expected=(201,), headers=headers, data=_Body(stream, size, self.traffic)
        ):
            pass

    def _upload_url(self, response: requests.Response) -> str:
        """Where a registry that accepts an upload wants it, which may be relative. Raises RemoteError."""
        said = response.headers.get("Location", "")
        try:
            if said:
                return urljoin(response.url, said)
        except ValueError:
            pass
        raise RemoteError(
            f"{self.url} accepts an upload, and says "
            + (f"to send it to {said[:200]!r}, which is not a URL" if said else "in no Location where to send it"),
            hint="the registry, or a proxy before it, is broken",
            url=response.url,
            status=response.status_code,
            transient=False,
        )

    def put_document(self, media_type: str, data: bytes) -> None:
        digest = sha256_bytes(data)
        if media_type in _MANIFESTS:
            self._put_manifest(digest, media_type, data)
        else:
            self.put_blob(digest, len(data), io.BytesIO(data))

    def set_tag(self, reference: Reference, media_type: str, data: bytes) -> None:
        if reference.tag is None:
            raise StoreError(f"{reference.name} has no tag to set", hint="write oci://HOST/REPOSITORY:tag")
        self._put_manifest(reference.tag, media_type, data)

    def remove_tag(self, reference: Reference) -> None:
        """By the distribution specification 1.1, "Deleting tags": a registry that removes none answers 400 or 405."""
        with self._session.send(
            "DELETE",
            self._manifest(str(reference.tag)),
            f"remove {reference.name}",
            expected=(202, 400, 404, 405),
        ) as response:
            status = response.status_code
        if status not in (202, 404):
            raise StoreError(
                f"{self.url} removes no tags: it answers {status}",
                hint="remove it by the registry's own tools, or let it name another bundle: `aotc tag`",
                url=self.url,
                status=status,
            )

    def set_attachment(self, name: str, data: bytes, seen: Descriptor | None) -> None:
        """A registry has no conditional write: between this look and the write, another client may write."""
        if self.attachment(name) != seen:
            return
        self._put_manifest(name, oci.MANIFEST, data)

    def tags(self) -> list[TagEntry]:
        raise StoreError(
            f"{self.url} is a repository of a registry, which lists no more than names",
            hint=f"`skopeo list-tags docker://{self.url.partition('://')[2]}`, or `aotc inspect {self.url}:TAG`",
        )

    def known(self, reference: Reference) -> list[str]:
        url = f"{self._repository}/tags/list?n=1000"
        with self._session.send("GET", url, "list the tags", expected=(200, 404)) as response:
            if response.status_code == 404:
                return []
            body = self._session.read(response, TAGS_LIMIT)
        try:
            return [f"{self.url}:{tag}" for tag in decode(body, _Tags).tags or ()]
        except CorruptError:
            return []

    def _manifest(self, name: str) -> str:
        return f"{self._repository}/manifests/{name}"

    def _blob(self, digest: str) -> str:
        hex_of(digest)
        return f"{self._repository}/blobs/{digest}"

    def _put_manifest(self, name: str, media_type: str, data: bytes) -> None:
        expected, headers = sha256_bytes(data), {"Content-Type": media_type}
        try:
            with self._session.send(
                "PUT", self._manifest(name), f"put the manifest {name}", expected=(201,), headers=headers, data=data
            ) as response:
                self.traffic.count(sent=len(data))
                digest = response.headers.get("Docker-Content-Digest") or expected
        except RemoteError as error:
            if "MANIFEST_BLOB_UNKNOWN" in error.message:
                # docker-registry (2.8) says so while another writer puts the same blobs, which are all there.
                error.with_fields(transient=True)
            raise
        if digest != expected:
            raise CorruptError(
                f"{self.url} made {digest} of the manifest {expected}",
                hint="this registry rewrites manifests, so that nothing in it can be pinned: use another one",
                expected=expected,
                actual=digest,
            )

    def _counted(self, response: requests.Response, skip: int) -> Iterator[bytes]:
        for chunk in self._session.pieces(response):
            self.traffic.count(received=len(chunk))
            skipped, skip = min(skip, len(chunk)), max(0, skip - len(chunk))
            if skipped < len(chunk):
                yield chunk[skipped:]

    def _missing(self, digest: str) -> NotFoundError:
        return NotFoundError(
            f"{digest} is not in {self.url}",
            hint="the registry lost it, or the bundle was copied in part: push it again",
            known=(),
            digest=digest,
        )

    def _not_found(self, reference: Reference) -> NotFoundError:
        nearest = nearest_first(reference.name, self.known(reference))
        return NotFoundError(
            f"{reference.name} is not in the registry",
            hint=f"there is {listed(nearest, 5)}"
            if nearest
            else f"{self.url} holds no tag that these credentials may list",
            known=tuple(nearest),
        )


class _Tags(msgspec.Struct):
    tags: list[str] | None = None


class _Body:
    """A stream of known length, as requests wants one; what is read of it is counted as sent."""

    def __init__(self, stream: BinaryIO, size: int, traffic: Traffic) -> None:
        self._stream = stream
        self._size = size
        self._traffic = traffic

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:  # without it, requests takes this for a form
        while data := self.read(1 << 16):
            yield data

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._traffic.count(sent=len(data))
        return data

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)


def _session(base: str, host: str, repository: str, limits: Limits, traffic: Traffic) -> Session:
    from aotc.store.remote.registry.session import Session  # `aotc.store.opening` has seen that it can be imported

    return Session(base, host, repository, limits, traffic)
