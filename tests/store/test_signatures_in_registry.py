"""Signatures in a real registry: skopeo pushes them beside the bundle, and they are checked where they lie."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from signing import NOW, bundle_in, key_by_openssl, needs_openssl, private_key, signed, trusting

from aotc.digest import sha256_bytes
from aotc.errors import SignatureError
from aotc.store import Reference, Store, check_signatures, fetch_signatures, signature_tag, signatures_of
from aotc.store.oci import MANIFEST, Descriptor

needs_registry = pytest.mark.skipif(
    "CI" not in os.environ and not (shutil.which("docker-registry") and shutil.which("skopeo")),
    reason="needs docker-registry and skopeo",
)
pytestmark = [needs_openssl, needs_registry]

CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {root}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """`host:port` of a registry on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "registry.yml"
    config.write_text(CONFIG.format(root=tmp_path / "registry", port=port))
    server = subprocess.Popen(
        ["docker-registry", "serve", config], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class Repository:
    """Just enough of a client to read signatures."""

    def __init__(self, url: str) -> None:
        self.url = url

    def read(self, media_type: str, digest: str, limit: int) -> bytes:
        place = "manifests" if media_type == MANIFEST else "blobs"
        request = urllib.request.Request(f"{self.url}/{place}/{digest}", headers={"Accept": media_type})
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.read(limit + 1)

    def resolve(self, tag: str) -> Descriptor | None:
        try:
            data = self.read(MANIFEST, tag, 1 << 22)
        except urllib.error.HTTPError as error:
            assert error.code == 404
            return None
        return Descriptor(media_type=MANIFEST, digest=sha256_bytes(data), size=len(data))


def push(store: Store, name: str, registry: str, tag: str) -> None:
    command = ["skopeo", "--insecure-policy", "copy", "--all", "--preserve-digests", "--dest-tls-verify=false"]
    ran = subprocess.run(
        [*command, f"oci:{store.path}:{name}", f"docker://{registry}/team/tiny:{tag}"], capture_output=True, check=False
    )
    assert ran.returncode == 0, ran.stderr.decode()


def test_a_pushed_signature_is_checked_there_and_comes_back(
    registry: str, store: Store, work: Path, tmp_path: Path
) -> None:
    private, public = key_by_openssl(work, "k")
    digest = bundle_in(store, work)
    reference = Reference(None, "tiny", tag="latest")
    remote = Repository(f"http://{registry}/v2/team/tiny")
    push(store, "tiny:latest", registry, "latest")
    with pytest.raises(SignatureError, match="is not signed"):
        check_signatures(remote.read, remote.resolve, digest, reference, trusting(public), NOW)

    signed(store, digest, private_key(private))
    push(store, signature_tag(digest), registry, signature_tag(digest))
    signer = check_signatures(remote.read, remote.resolve, digest, reference, trusting(public), NOW)
    assert signer.claims.name == "tiny:latest"

    other = Store.create(tmp_path / "other")
    assert fetch_signatures(remote.read, remote.resolve, other, digest) == signatures_of(store, digest)
