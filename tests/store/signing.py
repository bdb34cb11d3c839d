"""Keys that OpenSSL makes, a store with signed bundles, and signatures that cosign itself made and others published."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sample_artifacts import CREATED, stored_artifact

from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.keys import PrivateKey, read_private_key, read_public_keys
from aotc.store.signing.signatures import Claims, sign
from aotc.store.signing.trust import Signer, TrustedKeys, check_signatures

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)

# The signature of the image that Dangerzone runs, made with cosign and a hardware key. Printed in "How we sign our
# container image" of the Freedom of the Press Foundation, with this payload, and this key from its transparency log.
DANGERZONE_DIGEST = "sha256:7396780b5862cf8b37527854a2a2331e5c746b6a71aa1f424258c3bfaf3a1bd7"
DANGERZONE_PAYLOAD = (
    '{"critical":{"identity":{"docker-reference":"ghcr.io/freedomofpress/dangerzone/v1"},'
    f'"image":{{"docker-manifest-digest":"{DANGERZONE_DIGEST}"}},'
    '"type":"cosign container image signature"},"optional":null}'
).encode()
DANGERZONE_PAYLOAD_DIGEST = "sha256:88b8a2ac5b829f47bd25a5a4d9c2ccb0fccff7f53a17477b6d9b5680436aa80f"
DANGERZONE_SIGNATURE = (
    "MEQCIAQScnT03MVfmxjYyW5qAmvQ6TSoukPuw0HmSVlMBwYEAiAzGb76cvDb4CHJ+H6tD00bW1Sh1CK6opaRmI2ist4p2A=="
)
DANGERZONE_KEY = """-----BEGIN PUBLIC KEY-----
MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAE3CUlnwh825Z5wQAJV6TekEi6bCK2
YvAg7A+aeerM5hvc4CCCJFBae5AjnsjGHv4V/3xzssck6e51W+b0jU4qVw==
-----END PUBLIC KEY-----
"""

# A private key as cosign encrypts it, from cosign's own tests (pkg/cosign/keys_test.go, Apache-2.0): never used for
# anything else, its password is published with it.
COSIGN_KEY = """-----BEGIN ENCRYPTED SIGSTORE PRIVATE KEY-----
eyJrZGYiOnsibmFtZSI6InNjcnlwdCIsInBhcmFtcyI6eyJOIjozMjc2OCwiciI6
OCwicCI6MX0sInNhbHQiOiI3T3VGd2VsbWZZNXVId2NoaURSc210anNwZ2ZlZjFG
Mk5lOGFDTjVLYVpZPSJ9LCJjaXBoZXIiOnsibmFtZSI6Im5hY2wvc2VjcmV0Ym94
Iiwibm9uY2UiOiJQNHk4OGhCb3ZTa09MbXN0bFVBaGJwdDJ0K2xTNUxQSCJ9LCJj
aXBoZXJ0ZXh0IjoiMnB1QzdyZldJOWh3bnJlQ2s4aUZDRlVwQlRrSzRJNlIvbFBF
cnBDekpXUGpJWXl4eGVIL1A2VW52cFJHdVhla1NNb3JMdGhLamdoQ1JlNy82NDVH
QWtoVm1LRC92eEF0S2EvbE1abENSQ3FlekJGUFd1dzNpeFRtZ2xhb2J1ZFVSbUVs
bmNGOGlZbzBTMVl6Y1ZOMVFwY2J2c0dNcUlYRzVlbmdteGp5dCtBcXlyZTF0Q0Y0
V01tU1BlaEljNlBqd2h1Q2xHaVpJUWRvTGc9PSJ9
-----END ENCRYPTED SIGSTORE PRIVATE KEY-----
"""
COSIGN_PASSWORD = b"hello"


def openssl(*arguments: object, given: bytes = b"") -> bytes:
    ran = subprocess.run(["openssl", *map(str, arguments)], input=given, capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return ran.stdout


def key_by_openssl(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A private key (PKCS #8) and its public key, made by OpenSSL: by default ECDSA on P-256."""
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    chosen = options or ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    openssl("genpkey", *chosen, "-out", private)
    openssl("pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def private_key(path: Path) -> PrivateKey:
    return read_private_key(str(path), lambda: b"")


def bundle_in(store: Store, folder: Path, model: str = "tiny", tag: str = "latest", **fields: str) -> str:
    """Publish a small bundle; its digest. Another `created` makes another bundle of the same artifact."""
    artifact = stored_artifact(store, folder, (1,), model=model)
    return publish(store, model, tag, [artifact], created=fields.get("created", CREATED))


def signed(
    store: Store, digest: str, key: PrivateKey, name: str = "tiny:latest", at: datetime = NOW, days: int | None = None
) -> Claims:
    expires = None if days is None else at + timedelta(days=days)
    claims = Claims(digest, "aotc/tiny", name, at, expires)
    sign(store, claims, key)
    return claims


def trusting(*keys: Path | PrivateKey, after: datetime | None = None, memory: Path | None = None) -> TrustedKeys:
    texts: Sequence[str] = [key.public.pem if isinstance(key, PrivateKey) else key.read_text() for key in keys]
    return TrustedKeys(read_public_keys(texts), after, memory)


def checked(store: Store, digest: str, trust: TrustedKeys, ref: Reference | None = None, now: datetime = NOW) -> Signer:
    reference = ref or Reference(None, "tiny", tag="latest")
    return check_signatures(reader_of(store), store.attachment, digest, reference, trust, now)
