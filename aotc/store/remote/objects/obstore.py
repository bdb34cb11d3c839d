"""Objects of S3, GCS, Azure and web servers, through obstore; its errors, typed, with what to do.

Imported only when one of them is talked to.
"""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore import exceptions, store

from aotc.errors import AotcError, RemoteError, StoreError
from aotc.store.extras import install_hint
from aotc.store.remote.interface import CHUNK, Limits, Traffic
from aotc.store.remote.objects.object_interface import BUCKET_SCHEMES, StoredObject, Version, too_large
from aotc.store.remote.registry.credentials import home_folder

PART = 8 << 20  # bytes of a larger upload that go in one request
COMMIT_PATIENCE = 10  # times `Limits.read`: a service answers a part when it has all of it

_log = logging.getLogger("aotc")

_CONFLICTS = (exceptions.AlreadyExistsError, exceptions.PreconditionError)


class ObstoreObjects:
    """As `Objects`. `http://` is plain; a bucket's endpoint is, if the environment says so with `http://`."""

    def __init__(self, url: str, limits: Limits, traffic: Traffic) -> None:
        _refuse_after_fork(url)
        self.url = url
        self.writable = urlsplit(url).scheme in BUCKET_SCHEMES
        self.conditions: Literal["to probe", "none"] = "to probe" if self.writable else "none"
        self._limits = limits
        self._traffic = traffic
        with self._typed("use"):
            self._reading = _open(url, limits, limits.read)
            self._writing = _open(url, limits, limits.read * COMMIT_PATIENCE)

    def read(self, name: str, limit: int) -> StoredObject | None:
        with self._typed("read", name):
            try:
                answer = obstore.get(self._reading, name)
            except FileNotFoundError as error:
                self._raise_without_bucket(name, error)
                return None
            if (size := answer.meta["size"]) > limit:
                raise too_large(f"{self.url}/{name}", size, limit)
            data = bytearray()
            for piece in self._pieces(answer, 0):  # however many there are: a server may send more than it says
                data += piece
                if len(data) > limit:
                    raise too_large(f"{self.url}/{name}", len(data), limit)
        return StoredObject(bytes(data), _version(answer.meta))

    def size(self, name: str) -> int | None:
        with self._typed("look for", name):
            try:
                return int(obstore.head(self._reading, name)["size"])
            except FileNotFoundError as error:
                self._raise_without_bucket(name, error)
                return None

    @contextlib.contextmanager
    def open(self, name: str, offset: int) -> Iterator[Iterator[bytes] | None]:
        with self._typed("fetch", name):
            try:
                answer, skip = self._get_from(name, offset)
            except FileNotFoundError as error:
                self._raise_without_bucket(name, error)
                yield None
            else:
                yield self._pieces(answer, skip)

    def put(self, name: str, stream: BinaryIO, size: int) -> None:
        with self._typed("write", name, requests=1 if size <= PART else 2 + -(-size // PART)):
            obstore.put(
                self._writing,
                name,
                stream,
                use_multipart=size > PART,
                chunk_size=PART,
                max_concurrency=2,
            )
        self._traffic.count(sent=size)

    def replace(self, name: str, data: bytes, seen: Version | None) -> bool:
        mode: Any = "create" if seen is None else seen
        with self._typed("write", name):
            try:
                obstore.put(self._writing, name, data, mode=mode, use_multipart=False)
            except _CONFLICTS:
                return False
            except FileNotFoundError as error:
                self._raise_without_bucket(name, error)
                return False  # another client removed the one that was seen
        self._traffic.count(sent=len(data))
        return True

    def remove(self, name: str) -> None:
        with self._typed("remove", name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._writing, name)

    def _get_from(self, name: str, offset: int) -> tuple[obstore.GetResult, int]:
        """The answer, and how many of its first bytes were not asked for."""
        if not offset:
            return obstore.get(self._reading, name), 0
        try:
            return obstore.get(self._reading, name, options={"range": {"offset": offset}}), 0
        except exceptions.BaseError as error:  # a plain web server sends everything; so does rclone's S3 server
            if not isinstance(error, exceptions.NotSupportedError) and "non-partial response" not in str(error):
                raise
            self._traffic.count(requests=1)
            return obstore.get(self._reading, name), offset

    def _pieces(self, answer: obstore.GetResult, skip: int) -> Iterator[bytes]:
        for piece in answer.stream(min_chunk_size=CHUNK):
            data = bytes(piece)
            self._traffic.count(received=len(data))
            skipped, skip = min(skip, len(data)), max(0, skip - len(data))
            if skipped < len(data):
                yield data[skipped:]

    def _raise_without_bucket(self, name: str, error: FileNotFoundError) -> None:
        """A missing object is an answer; a missing bucket is an error."""
        if _code_of(str(error)) in _NO_BUCKET:
            raise self._error("read", name, error) from error

    @contextlib.contextmanager
    def _typed(self, action: str, name: str = "", requests: int = 1) -> Iterator[None]:
        _refuse_after_fork(self.url)
        if name:
            self._traffic.count(requests=requests)
        try:
            yield
        except (exceptions.BaseError, OSError, ValueError, TypeError) as error:
            if isinstance(error, AotcError):
                raise
            raise self._error(action, name, error) from error

    def _error(self, action: str, name: str, error: Exception) -> RemoteError:
        return remote_error(f"cannot {action} {self.url}{'/' if name else ''}{name}", self.url, self._limits, error)


def _version(meta: obstore.ObjectMeta) -> Version:
    return {key: value for key in ("e_tag", "version") if (value := meta.get(key))}  # type: ignore[misc]


# -- one process ------------------------------------------------------------------------------------------------------

_users: list[int] = []
"""The process that obstore's threads are in, once there are any."""


def _refuse_after_fork(url: str) -> None:
    """The threads are gone in a forked child, and its calls would disturb the parent's: both would wait for ever."""
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        raise RemoteError(
            f"{url} cannot be used by process {os.getpid()}: it was forked from {_users[0]}, which had used a remote",
            hint="load before you fork, or start the process by `spawn`",
            url=url,
            transient=False,
        )


# -- configuration ----------------------------------------------------------------------------------------------------


_AWS_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def _open(url: str, limits: Limits, patience: float) -> store.ObjectStore:
    parts = urlsplit(url)
    options: dict[str, Any] = {
        "client_options": {
            "allow_http": parts.scheme == "http" or _plain_endpoint(),
            "connect_timeout": timedelta(seconds=limits.connect),
            "read_timeout": timedelta(seconds=patience),
            "timeout": timedelta(seconds=limits.total),
            "user_agent": "aotc",
            **_private_authority(),
        },
        "retry_config": {"max_retries": 0},  # `aotc.store.remote.transfer` is all that retries
    }
    prefix = parts.path.strip("/") or None
    if parts.scheme == "s3":
        return store.S3Store(parts.netloc, prefix=prefix, credential_provider=_aws_profile(url), **options)
    if parts.scheme == "gs":
        return store.GCSStore(parts.netloc, prefix=prefix, **options)
    if parts.scheme == "az":
        return store.AzureStore(parts.netloc, prefix=prefix, **options)
    if login := _netrc(parts.hostname or ""):
        options["client_options"]["default_headers"] = {"Authorization": login}
    return store.HTTPStore.from_url(url, **options)


def _plain_endpoint() -> bool:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
    return any(os.environ.get(name, "").startswith("http://") for name in names)


def _private_authority() -> dict[str, bytes]:
    """`SSL_CERT_FILE`, as everything over OpenSSL takes it; the system's certificates are trusted in any case."""
    path = os.environ.get("SSL_CERT_FILE")
    return {"root_certificate": Path(path).read_bytes()} if path else {}


def _aws_profile(url: str) -> Callable[[], Any] | None:
    """The credentials of a profile or of `aws sso login`, where the environment has none: boto3 knows how."""
    if any(os.environ.get(name) for name in _AWS_CREDENTIALS):
        return None
    folder = home_folder() / ".aws"
    files = [
        Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"),
        Path(os.environ.get("AWS_CONFIG_FILE") or folder / "config"),
    ]
    if not any(_is_readable(path) for path in files):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError as error:
        raise StoreError(
            f"{url}: the credentials of an AWS profile need boto3, which is not installed",
            hint=f"{install_hint('aws')}, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ) from error
    return Boto3CredentialProvider()


def _is_readable(path: Path) -> bool:
    with contextlib.suppress(OSError):  # in a folder that may not be entered
        return path.is_file()
    return False


def _netrc(host: str) -> str:
    """The Authorization header for a host, "" without one: obstore reads no `.netrc`. Raises StoreError."""
    path = Path(os.environ.get("NETRC") or home_folder() / ".netrc")
    try:
        if not path.is_file():  # PermissionError in a folder that may not be entered
            return ""
        found = netrc.netrc(str(path)).authenticators(host)
    except netrc.NetrcParseError as error:
        message = f"{path} cannot be read: {error.msg} in line {error.lineno}"
        raise StoreError(message, hint="mend that line", path=str(path)) from error
    except OSError as error:
        _log.warning("credentials in %s are not used: %s", path, error)
        return ""
    return "Basic " + b64encode(f"{found[0]}:{found[2]}".encode()).decode() if found else ""


# -- errors -----------------------------------------------------------------------------------------------------------

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}  # 409: S3's answer to two conditional writes at one instant
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_REJECTED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidToken", "ExpiredToken")
_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")

_REGION_HINT = "set AWS_REGION to the bucket's region"
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), or this machine's role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or this machine's service account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY, a SAS, or this machine's identity",
}


class _Reason(NamedTuple):
    """Why something did not work, what to do, and whether it may pass."""

    why: str
    hint: str = ""
    transient: bool = False


def remote_error(message: str, url: str, limits: Limits, error: Exception) -> RemoteError:
    """What obstore raised, in one line, with what to do about it. Nothing of it holds a signature or a secret."""
    text = str(error)
    status = re.search(r"status code: (\d{3})", text)
    asked_for_credentials = any(host in text for host in _METADATA_HOSTS)
    if status is None or asked_for_credentials:
        reason = _no_answer(text, url, limits)
    else:
        reason = _answer(int(status[1]), _code_of(text), url)
    fields: dict[str, Any] = {} if status is None or asked_for_credentials else {"status": int(status[1])}
    return RemoteError(f"{message}: {reason.why}", hint=reason.hint, url=url, transient=reason.transient, **fields)


def _answer(status: int, code: str, url: str) -> _Reason:
    said = f"it answers {status}" + (f" {code}" if code else "")
    if code in _NO_BUCKET:
        return _Reason(said, "there is no such bucket: check its name, and the endpoint and region of the environment")
    if code == "RequestTimeTooSkewed":
        return _Reason(said, "this machine's clock is wrong: set it by NTP")
    if code in _REJECTED:
        return _Reason(said, f"the credentials are wrong or have expired; they are {_credentials(url)}")
    if code in _REGION:
        return _Reason(said, _REGION_HINT)
    if status in (401, 403):
        more = "; S3 answers so for a missing object too, without the right to list" if url.startswith("s3:") else ""
        return _Reason(said, f"these credentials may not do that{more}; they are {_credentials(url)}")
    if status in _TRANSIENT:
        return _Reason(said, "the service is busy or fails: try later", transient=True)
    return _Reason(said)


def _no_answer(text: str, url: str, limits: Limits) -> _Reason:
    if any(sign in text for sign in (*_METADATA_HOSTS, "Missing AccessKeyId", "Account must be specified")):
        return _Reason("no credentials were found", f"set {_credentials(url)}")
    if "Received redirect without LOCATION" in text:
        return _Reason("the bucket is in another region", _REGION_HINT)
    if "dns error" in text:
        transient = "Temporary failure" in text
        return _Reason("a host's name has no address", "check the URL, the endpoint of the environment, DNS", transient)
    if "ConnectionRefused" in text:
        return _Reason("the connection is refused", "is the service running, and is the endpoint the right one?", True)
    if "invalid peer certificate" in text or "UnknownIssuer" in text:
        return _Reason("its certificate is not trusted", "for a private CA set SSL_CERT_FILE")
    if "InvalidContentType" in text:
        return _Reason("it does not speak TLS", "if it is plain HTTP, write http:// in the endpoint or URL")
    if "kind: Timeout" in text or "TimedOut" in text:
        limits_of = f"AOTC_REMOTE_CONNECT ({limits.connect:g}) and AOTC_REMOTE_READ ({limits.read:g})"
        return _Reason("nothing came for too long", f"{limits_of} set how many seconds to wait", True)
    if "kind: Interrupted" in text or "IncompleteBody" in text:
        return _Reason("the connection broke", transient=True)
    return _Reason(_first_line(text), transient="HttpError" in text)


def _credentials(url: str) -> str:
    return _CREDENTIALS.get(url.partition("://")[0], "a line for the host in ~/.netrc")


def _code_of(text: str) -> str:
    """The service's own name for what went wrong, in the XML of its answer."""
    found = re.search(r"<Code>([A-Za-z0-9.]{1,60})</Code>", text)
    return found[1] if found else ""


def _first_line(text: str) -> str:
    line = text.partition("\n")[0]
    return re.sub(r"\?\S*", "", line)[:300]  # a query may be a signature
