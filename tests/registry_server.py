"""A real registry on loopback, Debian's docker-registry: plain, with passwords, tokens, TLS; and faults before it."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD = "builder", "s3cret:with#signs"


def needs(program: str) -> pytest.MarkDecorator:
    """Skip where a program is missing, but never in CI, which installs it."""
    missing = shutil.which(program) is None and "CI" not in os.environ
    return pytest.mark.skipif(missing, reason=f"needs {program} (Debian package of that name)")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class RegistryServer:
    port: int
    folder: Path

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def blob_files(self) -> list[Path]:
        return sorted((self.folder / "data").glob("docker/registry/v2/blobs/sha256/*/*/data"))


@contextlib.contextmanager
def running_registry(folder: Path, port: int | None = None, **config: Any) -> Iterator[RegistryServer]:
    """The registry with its data in `folder`; `config` is merged into its configuration file, which is also JSON."""
    assert PROGRAM, "docker-registry is not installed"
    port = port or free_port()
    folder.mkdir(parents=True, exist_ok=True)
    http_config = {"addr": f"127.0.0.1:{port}", **config.pop("http", {})}
    whole = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": http_config,
        **config,
    }
    (folder / "config.yml").write_text(json.dumps(whole))
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen([PROGRAM, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        _wait_for(port, process, folder / "log")
        yield RegistryServer(port, folder)
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise AssertionError(f"no registry at port {port}: {log.read_text()}")


def htpasswd(folder: Path) -> dict[str, Any]:
    """The configuration of a registry that knows USER alone."""
    import bcrypt

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "htpasswd"
    path.write_text(f"{USER}:{bcrypt.hashpw(PASSWORD.encode(), bcrypt.gensalt(4)).decode()}\n")
    return {"auth": {"htpasswd": {"realm": "the test, with a comma", "path": str(path)}}}


def docker_config(folder: Path, host: str, user: str = USER, password: str = PASSWORD) -> Path:
    """What `docker login` leaves: the folder for DOCKER_CONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return folder


# -- a token service --------------------------------------------------------------------------------------------------


class TokenService:
    """Gives the registry's bearer tokens, signed with a key that it trusts, to USER; pull alone to everybody.

    `asked` holds each request: what it carried, and for which scopes. `lifetime` of a token in seconds.
    """

    def __init__(self, folder: Path) -> None:
        import trustme

        self._ca = trustme.CA(key_type=trustme.KeyType.RSA)
        self._cert = self._ca.issue_cert("token.test", key_type=trustme.KeyType.RSA)
        self.asked: list[tuple[str, str]] = []
        self.lifetime = 300
        folder.mkdir(parents=True, exist_ok=True)
        self._bundle = folder / "token-ca.pem"
        self._ca.cert_pem.write_to_path(str(self._bundle))
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = parse_qs(urlsplit(self.path).query)
                known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
                header = self.headers.get("Authorization", "")
                service.answer(self, header, header == f"Basic {known}", query)

            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                good = form.get("refresh_token") == ["a refresh token"] and form["grant_type"] == ["refresh_token"]
                service.answer(self, "refresh_token", good, form)

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def config(self) -> dict[str, Any]:
        realm = f"http://127.0.0.1:{self._server.server_port}/token"
        token = {"realm": realm, "service": "the registry", "issuer": "issuer", "rootcertbundle": str(self._bundle)}
        return {"auth": {"token": token}}

    def answer(self, handler: BaseHTTPRequestHandler, carried: str, known: bool, query: dict[str, list[str]]) -> None:
        scopes = [scope for value in query.get("scope", []) for scope in value.split()]
        self.asked.append((carried, " ".join(scopes)))
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            granted = [action for action in actions.split(",") if known or action == "pull"]
            access.append({"type": kind, "name": name, "actions": granted})
        status, body = (200, {"token": self._token(access)}) if known or not carried else (401, {"errors": []})
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _token(self, access: list[dict[str, Any]]) -> str:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding, rsa
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        chain = [ssl.PEM_cert_to_DER_cert(pem.bytes().decode()) for pem in self._cert.cert_chain_pems]
        header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode() for der in chain]}
        now = int(time.time())
        times = {"iat": now - 5, "nbf": now - 5, "exp": now + self.lifetime}
        claims = {"iss": "issuer", "aud": "the registry", "sub": "", "jti": "1", **times, "access": access}
        signed = f"{_url64(json.dumps(header).encode())}.{_url64(json.dumps(claims).encode())}"
        key = load_pem_private_key(self._cert.private_key_pem.bytes(), None)
        assert isinstance(key, rsa.RSAPrivateKey)
        return f"{signed}.{_url64(key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256()))}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _url64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


# -- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Fault:
    """What happens to a request instead of, or on the way to, the registry."""

    status: int | None = None  # answer so, and do not forward
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    cut_after: int | None = None  # bytes of the answer's body that still come; then the connection breaks
    cut_request_after: int | None = None  # bytes of the request's body that are read; then the connection breaks
    stall: float = 0.0  # seconds of silence before the rest
    trickle: float = 0.0  # seconds before each further byte of the answer's body
    change: Callable[[bytes], bytes] | None = None  # of the answer's body
    drop_headers: tuple[str, ...] = ()  # of the request


class FaultProxy:
    """Forwards to a registry; `fault(request)` decides what goes wrong. `seen` holds every request, in order."""

    def __init__(self, port: int, fault: Callable[[Request], Fault | None] = lambda request: None) -> None:
        self.fault = fault
        self.seen: list[Request] = []
        self._upstream = port
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.handle(self)

            do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = forward

            def log_message(self, *arguments: object) -> None: ...

        self._server = _QuietServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"

    def count(self, method: str, part: str = "") -> int:
        return sum(request.method == method and part in request.path for request in self.seen)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        request = Request(handler.command, handler.path, dict(handler.headers))
        with self._lock:
            self.seen.append(request)
            fault = self.fault(request) or Fault()
        length = int(handler.headers.get("Content-Length", 0))
        if fault.cut_request_after is not None:
            handler.rfile.read(min(length, fault.cut_request_after))
            return _break(handler)
        body = handler.rfile.read(length)
        if fault.status is not None:
            return _answer(handler, fault.status, fault.headers, fault.body, Fault(stall=fault.stall))
        headers = {key: value for key, value in request.headers.items() if key not in fault.drop_headers}
        upstream = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        try:
            upstream.request(request.method, request.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        given = {**dict(answer.getheaders()), **fault.headers}
        return _answer(handler, answer.status, given, fault.change(data) if fault.change else data, fault)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, fault: Fault) -> None:
    handler.send_response(status)
    for key, value in headers.items():
        if key.lower() not in ("content-length", "connection", "date", "server"):
            handler.send_header(key, value)
    length = headers.get("Content-Length") if handler.command == "HEAD" else str(len(body))
    handler.send_header("Content-Length", length or "0")
    handler.end_headers()
    first = body if fault.cut_after is None else body[: fault.cut_after]
    for index in range(len(first) if fault.trickle else 0):
        handler.wfile.write(first[index : index + 1])
        time.sleep(fault.trickle)
    half = first[: len(first) // 2] if fault.stall else first
    handler.wfile.write(half)
    handler.wfile.flush()
    time.sleep(fault.stall)
    handler.wfile.write(first[len(half) :])
    if fault.cut_after is not None:
        _break(handler)


def _break(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.wfile.flush()
        handler.connection.shutdown(socket.SHUT_RDWR)


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, address: Any) -> None:
        """A client that went away is what these tests are about."""
