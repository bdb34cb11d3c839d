"""Objects of a model repository of the Hugging Face Hub, `hf://ORG/REPO[@REVISION]`, through huggingface_hub.

Imported only when one of them is talked to. A write is a commit. Blobs are uploaded at once, and become files of the
repository in the next commit, with what names them: a push is one or two commits, however many blobs it has. A commit
on top of one that was read is refused by the Hub where another one came between (412), so no tag is lost.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import get_hf_file_metadata
from huggingface_hub.utils._auth import get_token
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, hf_raise_for_status
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from aotc.errors import AotcError, ReferenceFormatError, RemoteError
from aotc.store.remote.interface import CHUNK, Limits, Traffic
from aotc.store.remote.objects.object_interface import StoredObject, Version, too_large

MAIN = "main"
IN_MEMORY = 10 << 20  # bytes; the Hub keeps larger files apart from git, so they are not part of a commit's request

_CONFLICT = 412
_TRANSIENT = {408, 409, _CONFLICT, 425, 429, 500, 502, 503, 504}


class HubObjects:
    """As `Objects`. Endpoint and token are those of huggingface_hub: `HF_ENDPOINT`, `HF_TOKEN`, `hf auth login`.

    A version is the commit at which an object was read.
    """

    writable = True
    conditions: Literal["kept"] = "kept"

    def __init__(self, url: str, limits: Limits, traffic: Traffic) -> None:
        self.url = url
        self._repository, self._revision = _parts(url)
        self._endpoint = os.environ.get("HF_ENDPOINT")
        self._api = HfApi(endpoint=self._endpoint, library_name="aotc")
        self._limits = limits
        self._traffic = traffic
        self._lock = threading.Lock()
        self._uploaded: list[CommitOperationAdd] = []
        """Blobs that are to be files of the next commit."""

    def read(self, name: str, limit: int) -> StoredObject | None:
        with self._typed("read", name), self._get(name, 0) as answer:
            if answer is None:
                return None
            data = bytearray()
            for piece in answer.iter_bytes(CHUNK):
                self._traffic.count(received=len(piece))
                data += piece
                if len(data) > limit:
                    raise too_large(f"{self.url}/{name}", len(data), limit)
            commit = next((one.headers[_COMMIT] for one in (*answer.history, answer) if _COMMIT in one.headers), "")
            return StoredObject(bytes(data), {"commit": commit})

    def size(self, name: str) -> int | None:
        return self._size_at(name, self._revision)

    @contextlib.contextmanager
    def open(self, name: str, offset: int) -> Iterator[Iterator[bytes] | None]:
        with contextlib.ExitStack() as stack:
            with self._typed("fetch", name):
                answer = stack.enter_context(self._get(name, offset))
            yield None if answer is None else self._pieces(name, answer, 0 if answer.status_code == 206 else offset)

    def put(self, name: str, stream: BinaryIO, size: int) -> None:
        with self._typed("write", name), _no_progress_bars(), tempfile.TemporaryDirectory(prefix="aotc-hub-") as folder:
            added = CommitOperationAdd(name, _contents(stream, size, Path(folder)))
            if name.startswith("blobs/"):
                self._api.preupload_lfs_files(self._repository, [added], revision=self._revision)
                with self._lock:
                    self._uploaded.append(added)
            else:
                self._commit(f"Write {name}", [added])
        self._traffic.count(sent=size)

    def replace(self, name: str, data: bytes, seen: Version | None) -> bool:
        with self._typed("write", name):
            if seen is None:
                head = self._api.repo_info(self._repository, revision=self._revision).sha
                if self._size_at(name, str(head)) is not None:
                    return False
            else:
                head = seen["commit"]
                if not head:
                    message = f"{self.url} names no commit with its files, so {name} cannot be replaced"
                    hint = "write to the Hub itself: HF_ENDPOINT may be a mirror"
                    raise RemoteError(message, hint=hint, url=self.url)
            try:
                self._commit(f"Write {name}", [CommitOperationAdd(name, data)], head)
            except HfHubHTTPError as error:
                if error.response.status_code == _CONFLICT:
                    return False
                raise
        self._traffic.count(sent=len(data))
        return True

    def remove(self, name: str) -> None:
        with self._typed("remove", name), contextlib.suppress(EntryNotFoundError):
            self._commit(f"Remove {name}", [CommitOperationDelete(name)])

    def _commit(self, message: str, operations: list[Any], parent: str | None = None) -> None:
        """The operations, and all blobs that were uploaded before, as one commit."""
        with self._lock:
            uploaded = list(self._uploaded)
            self._api.create_commit(
                self._repository,
                [*uploaded, *operations],
                commit_message=message,
                revision=self._revision,
                parent_commit=parent,
            )
            self._uploaded.clear()

    def _size_at(self, name: str, revision: str) -> int | None:
        with self._typed("look for", name):
            try:
                url = self._url_of(name, revision)
                return get_hf_file_metadata(url, timeout=self._limits.read, endpoint=self._endpoint).size
            except EntryNotFoundError:
                return None

    @contextlib.contextmanager
    def _get(self, name: str, offset: int) -> Iterator[httpx2.Response | None]:
        """The answer, None where there is no such file at the revision."""
        headers = build_hf_headers(library_name="aotc") | {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        timeout = httpx2.Timeout(self._limits.read, connect=self._limits.connect)
        url = self._url_of(name, self._revision)
        with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as answer:
            try:
                if answer.is_error:
                    answer.read()
                hf_raise_for_status(answer)
            except EntryNotFoundError:
                yield None
                return
            yield answer

    def _url_of(self, name: str, revision: str) -> str:
        return hf_hub_url(self._repository, name, revision=revision, endpoint=self._endpoint)

    def _pieces(self, name: str, answer: httpx2.Response, skip: int) -> Iterator[bytes]:
        """`skip`: bytes that were not asked for, of a server that always sends all."""
        with self._typed("fetch", name, requests=0):
            for piece in answer.iter_bytes(CHUNK):
                self._traffic.count(received=len(piece))
                if skip < len(piece):
                    yield piece[skip:]
                skip = max(0, skip - len(piece))

    @contextlib.contextmanager
    def _typed(self, action: str, name: str, requests: int = 1) -> Iterator[None]:
        self._traffic.count(requests=requests)
        try:
            yield
        except AotcError:
            raise
        except (httpx2.HTTPError, OSError, HFValidationError) as error:
            raise self._error(action, name, error) from error

    def _error(self, action: str, name: str, error: Exception) -> RemoteError:
        answer: Any = getattr(error, "response", None)
        status = None if answer is None else answer.status_code
        hint = self._hint(error, status)
        transient = status in _TRANSIENT if status else isinstance(error, httpx2.TransportError)
        fields: dict[str, Any] = {"url": self.url, "transient": transient and not hint}
        if status is not None:
            fields["status"] = status
            if (seconds := answer.headers.get("Retry-After", "")).isdigit():
                fields["retry_after"] = float(seconds)
        said = re.sub(r"\s+", " ", getattr(error, "server_message", None) or str(error) or type(error).__name__)[:300]
        return RemoteError(f"cannot {action} {self.url}/{name}: {said}", hint=hint, **fields)

    def _hint(self, error: Exception, status: int | None) -> str:
        login = "`hf auth login`, or set HF_TOKEN" if get_token() is None else "a token of who may see it, as HF_TOKEN"
        match error:
            case OfflineModeIsEnabled():
                return "unset HF_HUB_OFFLINE, or load from a folder that `aotc fetch` has filled"
            case GatedRepoError():
                return f"ask for access at {self._api.endpoint}/{self._repository}, then {login}"
            case RepositoryNotFoundError():
                return f"a new one: `hf repos create {self._repository}`; a private one: {login}"
            case RevisionNotFoundError():
                return f"after the @ comes a branch, a tag or a commit of {self._repository}; without it, {MAIN}"
        if status in (401, 403):
            return "the token may not do that: it needs the right to write" if get_token() else login
        return ""


_COMMIT = "X-Repo-Commit"


def _parts(url: str) -> tuple[str, str]:
    """The repository and the revision of `hf://ORG/REPO[@REVISION]`. Raises ReferenceFormatError."""
    parts = urlsplit(url)
    repository, _, revision = f"{parts.netloc}{parts.path}".partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")) or url.endswith("@"):
        raise ReferenceFormatError(
            f"{url!r} is not a repository of the Hub", hint="write hf://ORG/REPO or hf://ORG/REPO@REVISION"
        )
    return repository, revision or MAIN


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A push shows aotc's own bars. The setting is the process's."""
    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


def _contents(stream: BinaryIO, size: int, folder: Path) -> bytes | Path:
    """What is written: a file of its own where it is large, from which huggingface_hub uploads in its newest way."""
    if size <= IN_MEMORY:
        return stream.read()
    path = folder / "blob"
    with path.open("wb") as file:
        while data := stream.read(CHUNK):
            file.write(data)
    return path
