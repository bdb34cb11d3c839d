"""Signatures in a real registry: pushed and pulled along, checked where they lie, by whoever put them there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from registry_server import RegistryServer, needs
from remote_reading import QUICK, fetch_all
from signing import NOW, bundle_in, checked, key_by_openssl, needs_openssl, private_key, signed, trusting

from aotc.errors import SignatureError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable
from aotc.store.reference import parse_reference
from aotc.store.remote import push as push_module
from aotc.store.remote.push import push
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.keys import PrivateKey
from aotc.store.signing.signatures import read_signatures, signature_tag, signatures_of
from aotc.store.signing.trust import Signer, TrustedKeys, check_signatures

pytestmark = [needs_openssl, needs("docker-registry")]

LOCAL = parse_reference("tiny")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[PrivateKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [private_key(key_by_openssl(folder, name)[0]) for name in "ab"]


@pytest.fixture
def where(
    registry: RegistryServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> str:
    """A repository of this test's own, called tiny."""
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    return f"oci://{registry.host}/{request.node.name.partition('[')[0].lower()}/tiny"


def checked_there(where: str, trust: TrustedKeys, tag: str = "latest") -> Signer:
    """As `aotc.load` does it."""
    reference = parse_reference(f"{where}:{tag}")
    remote = open_readable(where)
    bundle = read_bundle(remote, reference)
    return check_signatures(reader_of(remote), remote.attachment, bundle.digest, reference, trust, NOW)


def test_a_bundle_is_pushed_pulled_and_checked_with_its_signatures(
    where: str, store: Store, work: Path, keys: list[PrivateKey], tmp_path: Path
) -> None:
    digest = bundle_in(store, work)
    push(store, LOCAL, parse_reference(where), limits=QUICK)
    with pytest.raises(SignatureError, match="is not signed") as caught:
        checked_there(where, trusting(keys[0]))
    assert caught.value.reason == "unsigned"
    signed(store, digest, keys[0])
    push(store, LOCAL, parse_reference(where), limits=QUICK)
    assert checked_there(where, trusting(keys[0])).claims.name == "tiny:latest"
    fetch_all(parse_reference(where), tmp_path / "copy", limits=QUICK)
    assert checked(Store.open(tmp_path / "copy"), digest, trusting(keys[0])).claims.name == "tiny:latest"


def test_another_tag_of_the_repository_is_another_name(
    where: str, store: Store, work: Path, keys: list[PrivateKey]
) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, keys[0])
    push(store, LOCAL, parse_reference(f"{where}:stable"), limits=QUICK)
    with pytest.raises(SignatureError) as caught:
        checked_there(where, trusting(keys[0]), "stable")
    assert caught.value.reason == "other-name"
    name = f"{where.removeprefix('oci://')}:stable"
    assert name in caught.value.expected
    signed(store, digest, keys[0], name)
    push(store, LOCAL, parse_reference(f"{where}:stable"), limits=QUICK)
    assert checked_there(where, trusting(keys[0]), "stable").claims.name == name


def test_another_model_pushed_into_the_repository_is_refused(
    where: str, store: Store, work: Path, keys: list[PrivateKey]
) -> None:
    digest = bundle_in(store, work, model="other")
    signed(store, digest, keys[0], "other:latest")
    push(store, parse_reference("other"), parse_reference(where), limits=QUICK)
    with pytest.raises(SignatureError) as caught:
        checked_there(where, trusting(keys[0]))
    assert caught.value.reason == "other-name"


def signed_by_two(store: Store, work: Path, keys: list[PrivateKey], tmp_path: Path) -> tuple[Store, str]:
    """Another store with the same bundle, which each store's owner has signed, and the bundle's digest."""
    other = Store.create(tmp_path / "other")
    digest = bundle_in(store, work)
    bundle_in(other, work)
    signed(store, digest, keys[0])
    signed(other, digest, keys[1])
    return other, digest


def test_two_who_sign_and_push_keep_each_other_s_signatures(
    where: str, store: Store, work: Path, keys: list[PrivateKey], tmp_path: Path
) -> None:
    other, digest = signed_by_two(store, work, keys, tmp_path)
    for one in (store, other, store):
        push(one, LOCAL, parse_reference(where), limits=QUICK)
    for key in keys:
        checked_there(where, trusting(key))
    remote = open_readable(where)
    descriptor = remote.attachment(signature_tag(digest))
    assert descriptor is not None
    assert len(read_signatures(reader_of(remote), descriptor).signatures) == 2


def test_two_pushes_at_once_keep_each_other_s_signatures(
    where: str, store: Store, work: Path, keys: list[PrivateKey], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is done between what the first one reads and what it writes."""
    other, _ = signed_by_two(store, work, keys, tmp_path)
    encode, pushed = push_module.encode_signatures, []

    def encode_late(*arguments: Any) -> Any:
        if not pushed:
            pushed.append(store)
            push(store, LOCAL, parse_reference(where), limits=QUICK)
        return encode(*arguments)

    monkeypatch.setattr(push_module, "encode_signatures", encode_late)
    push(other, LOCAL, parse_reference(where), limits=QUICK)
    for key in keys:
        checked_there(where, trusting(key))


@needs("skopeo")
def test_what_skopeo_copied_is_checked_there(where: str, store: Store, work: Path, keys: list[PrivateKey]) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, keys[0])
    for name, tag in (("tiny:latest", "latest"), (signature_tag(digest), signature_tag(digest))):
        command = ["skopeo", "--insecure-policy", "copy", "--all", "--preserve-digests", "--dest-tls-verify=false"]
        destination = f"docker://{where.removeprefix('oci://')}:{tag}"
        ran = subprocess.run([*command, f"oci:{store.path}:{name}", destination], capture_output=True, check=False)
        assert ran.returncode == 0, ran.stderr.decode()
    assert checked_there(where, trusting(keys[0])).claims.digest == digest
    assert open_readable(where).attachment(signature_tag(digest)) == signatures_of(store, digest)
