"""One HTTP session with a registry, over `requests`: TLS, time limits, authorization, and errors that say what to do.

Imported only when a registry is talked to.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import socket
import ssl
from collections.abc import Collection, Iterator, Mapping
from http.cookiejar import DefaultCookiePolicy
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import msgspec
import requests
import requests.adapters
import requests.utils
import urllib3.connection
import urllib3.exceptions
import urllib3.util

from aotc.errors import CorruptError, RemoteError, StoreError
from aotc.store.files.disk import files_in, open_regular, typed_errors
from aotc.store.remote.interface import CHUNK, Limits, Traffic, time_left
from aotc.store.remote.registry.authorization import Authorization
from aotc.store.remote.registry.credentials import home_folder

COMMIT_PATIENCE = 10  # times `Limits.read`: a registry may take that long to store what was uploaded
ERROR_LIMIT = 1 << 16  # bytes of an error's body that are looked at
REDIRECTS = 10  # that are followed, one after the other

_RENEWALS = 2  # the first may be another thread's, for what that one does
_PORTS = {"http": 80, "https": 443}
_TRANSIENT = {408, 425, 429, 500, 502, 503, 504}
_HTTP_ON_TLS = "HTTP request to an HTTPS server"  # what Go's servers answer, and nginx in other words
_HTTP_ON_PLAIN = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")  # what OpenSSL says of a plain HTTP answer

_CERTIFICATES = (
    "a .crt holds certificates of authorities, a .cert one of this host's, whose key is in the .key beside it, all in "
    "PEM and not encrypted: mend it, or take it away"
)


class Session:
    """Requests to the registry at `base`, each one attempt. Threads share it."""

    def __init__(self, base: str, host: str, repository: str, limits: Limits, traffic: Traffic) -> None:
        self._host = host
        self._base = base
        self._limits = limits
        self._authorization = Authorization(base, host, repository, self._ask_token_service)
        self._session = _Plain(host, limits, traffic)
        self._session.headers["User-Agent"] = "aotc"
        self._session.headers["Accept-Encoding"] = "identity"  # sizes and ranges are those of the blobs
        # A cookie makes some registries take us for a browser and ask for CSRF tokens.
        self._session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self._session.get_adapter(base)  # certificates that cannot be used are said at once

    @contextlib.contextmanager
    def send(
        self,
        method: str,
        url: str,
        what: str,
        *,
        expected: Collection[int] = (200,),
        headers: Mapping[str, str] | None = None,
        data: Any = None,
    ) -> Iterator[requests.Response]:
        """One request, its body unread; another one after a 401 of the registry that credentials can answer.

        All of it, redirects, headers and trailers too, ends with the time of the transfer (`time_left`).

        `what` completes "cannot …" in messages. Authorization goes to the registry's own host only, and what another
        host asks for, to which it redirects, is not answered. Raises RemoteError for a status that is not `expected`,
        and for what goes wrong while the body is read within the `with`.
        """
        with self._typed(what, url):
            response, authorization = self._attempt(method, url, headers, data)
            for _ in range(_RENEWALS):
                if response.status_code != 401 or not self._is_ours(response.url):
                    break
                if not self._authorization.renew(authorization, response.headers.get("WWW-Authenticate", "")):
                    break
                response.close()
                _rewind(data)
                response, authorization = self._attempt(method, url, headers, data)
            with response:
                if response.status_code not in expected:
                    raise self._refused(what, response)
                yield response
                if method != "GET":
                    _finish(response)

    def pieces(self, response: requests.Response) -> Iterator[bytes]:
        """The body as it comes, not in whole chunks: the caller can look at the clock in between."""
        return _pieces(response)

    def read(self, response: requests.Response, limit: int) -> bytes:
        """A body of at most `limit` bytes. Raises CorruptError above that."""
        data = bytearray()
        for chunk in _pieces(response):
            data += chunk
            if len(data) > limit:
                raise CorruptError(
                    f"{response.url} sends more than the {limit} bytes allowed",
                    hint="it is not an aotc bundle, or it is damaged",
                    expected=f"at most {limit} bytes",
                    actual=f"more than {limit} bytes",
                    path=response.url,
                )
        return bytes(data)

    def _attempt(
        self, method: str, url: str, headers: Mapping[str, str] | None, data: Any
    ) -> tuple[requests.Response, str]:
        authorization = self._authorization.header if self._is_ours(url) else ""
        sent = {**(headers or {}), **({"Authorization": authorization} if authorization else {})}
        patience = COMMIT_PATIENCE if method == "PUT" else 1
        timeout = (self._limits.connect, self._limits.read * patience)
        return self._request(method, url, sent, data, timeout=timeout), authorization

    def _request(
        self, method: str, url: str, headers: dict[str, str], data: Any = None, **options: Any
    ) -> requests.Response:
        """One request, and those to which it is redirected: of a redirect no byte of the body is read, what has a body
        of its own is sent again only where the answer asks for that, and no authorization goes to another host."""
        for _ in range(REDIRECTS):
            time_left()  # a transfer that was cancelled asks for nothing more
            response = self._session.request(method, url, headers=headers, data=data, stream=True, **options)
            if not (method in ("GET", "HEAD") or (method == "PUT" and response.status_code in (307, 308))):
                return response
            try:
                if not (target := self._session.get_redirect_target(response)):
                    return response
                response.close()
                target = urljoin(response.url, target)
                if not _same_origin(target, response.url):
                    headers = {name: value for name, value in headers.items() if name != "Authorization"}
            except ValueError as error:
                raise requests.exceptions.InvalidURL(f"it leads to what is not a URL: {error}") from error
            url = target
            options.pop("params", None)
            _rewind(data)
        raise requests.TooManyRedirects(f"more than {REDIRECTS} redirects")

    def _is_ours(self, url: str) -> bool:
        return _same_origin(url, self._base)

    def _ask_token_service(
        self, method: str, url: str, what: str, headers: dict[str, str] | None = None, **request: Any
    ) -> bytes:
        timeout = (self._limits.connect, self._limits.read)
        with self._typed(what, url), self._request(method, url, headers or {}, timeout=timeout, **request) as response:
            if response.status_code != 200:
                raise self._refused(what, response)
            return self.read(response, ERROR_LIMIT)

    @contextlib.contextmanager
    def _typed(self, what: str, url: str) -> Iterator[None]:
        try:
            yield
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise _unreachable(what, _shown(url), self._host, self._limits, error) from error

    def _refused(self, what: str, response: requests.Response) -> RemoteError:
        status, said = response.status_code, _what_it_said(response)
        url = _shown(response.url)
        return RemoteError(
            f"cannot {what}: {url} answers {status} {response.reason or ''}".rstrip() + (f": {said}" if said else ""),
            hint=self._hint(status, said),
            url=url,
            status=status,
            transient=status in _TRANSIENT,
            retry_after=_retry_after(response),
        )

    def _hint(self, status: int, said: str) -> str:
        if status in (401, 403):
            return self._authorization.explain()
        if status == 429:
            return "the registry limits how often one may ask: try later, log in, or use a mirror"
        if status == 400 and (_HTTP_ON_TLS in said or not said):  # an answer to HEAD has no body
            return "if it speaks TLS, write oci+https:// instead" if self._base.startswith("http://") else ""
        if status == 413:
            return "the registry or a proxy before it takes no blob of that size: raise its limit"
        if status >= 500:
            return "the registry fails: look at its log, or try later"
        return ""


def _same_origin(one: str, other: str) -> bool:
    try:
        return _origin(one) == _origin(other)
    except ValueError:  # a port that is not a number
        return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)


def _pieces(response: requests.Response) -> Iterator[bytes]:
    while chunk := response.raw.read1(CHUNK, decode_content=False):
        yield chunk


def _rewind(data: Any) -> None:
    if hasattr(data, "seek"):
        data.seek(0)


def _finish(response: requests.Response) -> None:
    """Read what is left of a short answer, so that its connection serves the next request."""
    for _ in itertools.islice(_pieces(response), 4):
        pass


class _Adapter(requests.adapters.HTTPAdapter):
    """Connections that trust the system's certificates and the private ones; counts what passes."""

    def __init__(self, limits: Limits, traffic: Traffic, tls: ssl.SSLContext | None = None) -> None:
        self._traffic = traffic
        self._tls = tls
        super().__init__(pool_connections=4, pool_maxsize=limits.jobs, max_retries=0)

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, ssl_context=self._tls, **options)
        self.poolmanager.pool_classes_by_scheme = _POOLS

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, ssl_context=self._tls, **options)
        if not proxy.lower().startswith("socks"):
            manager.pool_classes_by_scheme = _POOLS
        return manager

    def cert_verify(self, connection: Any, url: str, verify: Any, cert: Any) -> None:
        if isinstance(verify, str):  # REQUESTS_CA_BUNDLE; else `_tls` says what is trusted
            super().cert_verify(connection, url, verify, cert)  # type: ignore[no-untyped-call]

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        self._traffic.count(requests=1)
        return super().send(request, *arguments, **options)


# -- time, whatever is being read -------------------------------------------------------------------------------------


class _Limited:
    """A socket whose reads end with the transfer: each byte of an answer comes through here."""

    def recv_into(self, *arguments: Any, **options: Any) -> int:
        patience, left = self.gettimeout(), time_left()  # type: ignore[attr-defined]
        shorter = left is not None and (patience is None or left < patience)
        if shorter:
            self.settimeout(left)  # type: ignore[attr-defined]
        try:
            received: int = super().recv_into(*arguments, **options)  # type: ignore[misc]
            return received
        except TimeoutError:
            time_left()  # says so if it is over
            raise
        finally:
            if shorter:
                self.settimeout(patience)  # type: ignore[attr-defined]


class _Socket(_Limited, socket.socket):
    pass


class _TlsSocket(_Limited, ssl.SSLSocket):
    pass


def _limited(connected: socket.socket) -> socket.socket:
    patience = connected.gettimeout()
    limited = _Socket(fileno=connected.detach())
    limited.settimeout(patience)
    return limited


class _HttpConnection(urllib3.connection.HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return _limited(super()._new_conn())


class _HttpsConnection(urllib3.connection.HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _limited(super()._new_conn())


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


_POOLS = {"http": _HttpPool, "https": _HttpsPool}


def _tls_context(host: str) -> ssl.SSLContext:
    """What OpenSSL trusts (`SSL_CERT_FILE` and `SSL_CERT_DIR` included), and docker's and podman's `certs.d/HOST`."""
    context = ssl.create_default_context()
    context.sslsocket_class = _TlsSocket
    paths = ssl.get_default_verify_paths()
    if not any((paths.cafile, paths.capath)):  # an image without ca-certificates
        context.load_verify_locations(requests.utils.DEFAULT_CA_BUNDLE_PATH)
    home = home_folder()
    for folder in (Path("/etc/docker"), Path("/etc/containers"), home / ".config/containers", home / ".docker"):
        _load_certificates(context, folder / "certs.d" / host)
    return context


def _load_certificates(context: ssl.SSLContext, folder: Path) -> None:
    """Authorities, `*.crt`, and this host's own certificates, `*.cert` with `*.key`. Raises StoreError."""
    try:
        folder.stat()
    except OSError:  # not there, or in a folder that is not this user's
        return
    for path in files_in(folder):
        if path.suffix == ".crt":
            with _certificate_errors(path):
                context.load_verify_locations(path)
        elif path.suffix == ".cert":
            key = path.with_suffix(".key")
            with _certificate_errors(path, key):
                context.load_cert_chain(path, key, password="")  # or OpenSSL asks the terminal for an encrypted key's


@contextlib.contextmanager
def _certificate_errors(*paths: Path) -> Iterator[None]:
    try:
        for path in paths:
            with typed_errors("read", path):
                open_regular(path).close()
        yield
    except ssl.SSLError as error:
        names = " with ".join(map(str, paths))
        message = f"{names} cannot be used for TLS: {error.reason or error}"
        raise StoreError(message, hint=_CERTIFICATES, path=str(paths[0])) from error
    except StoreError as error:
        error.hint = error.hint or _CERTIFICATES
        raise


def _keep_headers(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request


class _Plain(requests.Session):
    """Sends the Authorization header that it is given, where requests would put credentials of a .netrc over it, and
    follows no redirect."""

    def __init__(self, host: str, limits: Limits, traffic: Traffic) -> None:
        super().__init__()
        self.auth = _keep_headers
        self._host, self._limits, self._traffic = host, limits, traffic
        self._insecure = _Adapter(limits, traffic)

    @functools.cached_property
    def secure(self) -> _Adapter:
        """Not for a registry without TLS: reading the system's certificates takes longer than all the rest."""
        return _Adapter(self._limits, self._traffic, _tls_context(self._host))

    def get_adapter(self, url: str | bytes) -> _Adapter:
        scheme = str(url).partition("://")[0].lower()
        if scheme not in ("http", "https"):
            raise requests.exceptions.InvalidSchema(f"{scheme[:20]!r} is neither http nor https")
        return self.secure if scheme == "https" else self._insecure

    def resolve_redirects(self, *arguments: Any, **options: Any) -> Iterator[requests.Response]:
        return iter(())


def _shown(url: str | None) -> str:
    """A URL for a message: without its query, which on a storage service is a signature."""
    return (url or "").partition("?")[0]


class _Error(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Answer(msgspec.Struct):
    """The body of an error. Typed, so that decoding never descends into nested values of other fields."""

    errors: tuple[_Error, ...]


def _what_it_said(response: requests.Response) -> str:
    """The messages of an error as the distribution specification gives them, else the beginning of the text."""
    try:
        body = next(_pieces(response), b"")[:ERROR_LIMIT]
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError):
        return ""
    try:
        text = "; ".join(f"{error.code}: {error.message}" for error in msgspec.json.decode(body, type=_Answer).errors)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        text = "" if b"<html" in body.lower() else body.decode(errors="replace")
    return _readable(text)


def _retry_after(response: requests.Response) -> float | None:
    value = response.headers.get("Retry-After")
    if value is None:
        return None
    try:
        return urllib3.util.Retry().parse_retry_after(value)
    except (urllib3.exceptions.HTTPError, ValueError, OverflowError):
        return None


# -- no answer --------------------------------------------------------------------------------------------------------


def _unreachable(what: str, url: str, host: str, limits: Limits, error: Exception) -> RemoteError:
    causes = list(_causes(error))
    why, hint, transient = _reason(causes, host, limits) or (_innermost(causes), "", True)
    return RemoteError(f"cannot {what} at {url}: {why}", hint=hint, url=url, transient=transient)


def _reason(causes: list[BaseException], host: str, limits: Limits) -> tuple[str, str, bool] | None:
    """Why there was no answer, what to do, and whether it may pass; None where nothing better is known."""

    def first(*kinds: type[BaseException]) -> Any:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    # What the system said comes before what urllib3 made of it: its NewConnectionError is a ConnectTimeoutError.
    if cause := first(socket.gaierror):
        transient = cause.errno == socket.EAI_AGAIN
        return f"a host's name has no address ({cause.strerror})", f"check the name {host}, and DNS", transient
    if cause := first(ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {cause.verify_message}", _certificate_hint(cause, host), False
    if cause := first(ssl.SSLError):
        plain = any(sign in str(cause).upper().replace(" ", "_") for sign in _HTTP_ON_PLAIN)
        hint = "if it speaks plain HTTP, write oci+http:// instead" if plain else ""
        return f"TLS fails: {cause.reason or cause}", hint, not plain
    if first(ConnectionRefusedError):
        return "the connection is refused", f"is a registry running at {host}?", True
    if isinstance(_system_error(causes), TimeoutError | None) and first(urllib3.exceptions.ConnectTimeoutError):
        hint = f"is {host} reachable from here? AOTC_REMOTE_CONNECT sets the limit"
        return f"no connection within {limits.connect:g} s", hint, True
    if first(TimeoutError, urllib3.exceptions.ReadTimeoutError):
        return "it sent nothing for too long", "AOTC_REMOTE_READ sets how many seconds to wait for the next byte", True
    if cause := first(requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema):
        return _readable(str(cause)), "", False
    return None


def _certificate_hint(error: ssl.SSLCertVerificationError, host: str) -> str:
    if any(sign in error.verify_message for sign in ("ostname", "IP address")):
        return "the certificate is for another name: use that one, or have the certificate issued anew"
    return f"for a private CA set SSL_CERT_FILE, or put it at /etc/containers/certs.d/{host}/ca.crt"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it came from: requests and urllib3 wrap one in another, also as arguments."""
    seen: set[int] = set()
    todo = [error]
    while todo:
        cause = todo.pop(0)
        if isinstance(cause, BaseException) and id(cause) not in seen:
            seen.add(id(cause))
            yield cause
            todo += [getattr(cause, "reason", None), cause.__cause__, cause.__context__, *cause.args]


def _system_error(causes: list[BaseException]) -> OSError | None:
    """What the system said; requests' own errors are OSErrors too, without a number."""
    return next((cause for cause in reversed(causes) if isinstance(cause, OSError) and cause.strerror), None)


def _innermost(causes: list[BaseException]) -> str:
    """What the system said, else the last cause, without the addresses of objects that urllib3 adds."""
    said = _system_error(causes)
    text = str(causes[-1]) if said is None else str(said.strerror)
    return re.sub(r"<[^>]*>:? ?", "", _readable(text)) or type(causes[-1]).__name__


def _readable(text: str) -> str:
    """The beginning of a foreign text, as one line without control characters."""
    return "".join(char if char.isprintable() else " " for char in text).strip()[:300]
