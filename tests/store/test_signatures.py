"""The format of signatures: cosign's own are read, OpenSSL agrees, and they travel as other tools copy them."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signing import (
    DANGERZONE_DIGEST,
    DANGERZONE_KEY,
    DANGERZONE_PAYLOAD,
    DANGERZONE_PAYLOAD_DIGEST,
    DANGERZONE_SIGNATURE,
    NOW,
    bundle_in,
    checked,
    key_by_openssl,
    needs_openssl,
    openssl,
    private_key,
    signed,
    trusting,
)

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, SignatureError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.oci import Descriptor, ImageManifest, read_document
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, parse_reference
from aotc.store.signing.attachments import IMAGE_CONFIG, reader_of
from aotc.store.signing.keys import read_public_keys
from aotc.store.signing.signatures import (
    PAYLOAD,
    PAYLOAD_LIMIT,
    Claims,
    SignedPayload,
    add_signatures,
    decode_payload,
    encode_payload,
    fetch_signatures,
    read_signatures,
    signature_tag,
    signatures_of,
)
from aotc.store.signing.trust import TrustedKeys, check_signatures

# -- what cosign made -------------------------------------------------------------------------------------------------

# The manifest that cosign's documentation shows ("Signing containers", github.com/sigstore/docs), as Docker types.
DOCUMENTED_MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": {
            "mediaType": "application/vnd.docker.container.image.v1+json",
            "size": 342,
            "digest": "sha256:f5de0db6e714055d48b4bb3a374e9630c4923fa704d9311da6a2740cf625aaba",
        },
        "layers": [
            {
                "mediaType": "application/vnd.dev.cosign.simplesigning.v1+json",
                "size": 252,
                "digest": DANGERZONE_PAYLOAD_DIGEST,
                "annotations": {"dev.cosignproject.cosign/signature": DANGERZONE_SIGNATURE},
            },
        ],
    }
).encode()


def from_memory(*documents: bytes) -> tuple[Callable[[str, str, int], bytes], Callable[[str], Descriptor]]:
    """`read` and `resolve` over a few documents; every tag names the first."""
    known = {sha256_bytes(data): data for data in documents}
    first = Descriptor(media_type="m", digest=sha256_bytes(documents[0]), size=len(documents[0]))
    return (lambda media_type, digest, limit: known[digest]), (lambda tag: first)


def test_a_signature_that_cosign_made_is_accepted() -> None:
    """A known answer from outside: the payload, the manifest's form, the key and the signature are cosign's own."""
    assert sha256_bytes(DANGERZONE_PAYLOAD) == DANGERZONE_PAYLOAD_DIGEST
    read, resolve = from_memory(DOCUMENTED_MANIFEST, DANGERZONE_PAYLOAD)
    trust = TrustedKeys(read_public_keys([DANGERZONE_KEY]))
    by_digest = Reference(None, "tiny", digest=DANGERZONE_DIGEST)
    signer = check_signatures(read, resolve, DANGERZONE_DIGEST, by_digest, trust)
    assert signer.claims == Claims(DANGERZONE_DIGEST, "ghcr.io/freedomofpress/dangerzone/v1")


def test_it_names_no_model_so_it_releases_nothing_under_a_tag() -> None:
    read, resolve = from_memory(DOCUMENTED_MANIFEST, DANGERZONE_PAYLOAD)
    trust = TrustedKeys(read_public_keys([DANGERZONE_KEY]))
    with pytest.raises(SignatureError, match="no name") as caught:
        check_signatures(read, resolve, DANGERZONE_DIGEST, Reference(None, "tiny", tag="latest"), trust)
    assert caught.value.reason == "other-name"
    assert str(caught.value).count("signed for no name") == 1 and "hint: sign it for that name" in str(caught.value)


def test_every_changed_byte_of_cosign_s_payload_and_every_changed_bit_of_its_signature_is_noticed() -> None:
    (key,) = read_public_keys([DANGERZONE_KEY])
    signature = base64.b64decode(DANGERZONE_SIGNATURE)
    assert key.verifies(signature, DANGERZONE_PAYLOAD)
    for position in range(len(DANGERZONE_PAYLOAD)):
        changed = bytearray(DANGERZONE_PAYLOAD)
        changed[position] ^= 1
        assert not key.verifies(signature, bytes(changed))
    for position in range(len(signature) * 8):
        bits = bytearray(signature)
        bits[position // 8] ^= 1 << position % 8
        assert not key.verifies(bytes(bits), DANGERZONE_PAYLOAD)


def test_a_payload_with_annotations_as_cosign_writes_them_is_read() -> None:
    """`cosign sign -a dev.aotc.name=tiny:latest -a dev.aotc.signed=… -a team=ml` gives this, in this order."""
    payload = (
        b'{"critical":{"identity":{"docker-reference":"us.gcr.io/user/demo"},"image":{"docker-manifest-digest":'
        b'"sha256:124e1fdee94fe5c5f902bc94da2d6e2fea243934c74e76c2368acdc8d3ac7155"},"type":"cosign container image '
        b'signature"},"optional":{"dev.aotc.name":"tiny:latest","dev.aotc.signed":"2026-05-01T12:00:00Z","team":"ml"}}'
    )
    digest = "sha256:124e1fdee94fe5c5f902bc94da2d6e2fea243934c74e76c2368acdc8d3ac7155"
    assert decode_payload(payload) == Claims(digest, "us.gcr.io/user/demo", "tiny:latest", NOW)


# -- what aotc makes --------------------------------------------------------------------------------------------------


@needs_openssl
def test_openssl_verifies_the_payload_that_lies_in_the_store(store: Store, work: Path) -> None:
    private, public = key_by_openssl(work, "k")
    digest = bundle_in(store, work)
    signed(store, digest, private_key(private), days=30)
    manifest, payload = _first_payload(store, digest)
    (work / "payload").write_bytes(payload)
    (work / "sig").write_bytes(base64.b64decode(manifest.layers[0].annotation("dev.cosignproject.cosign/signature")))
    assert b"Verified OK" in openssl("dgst", "-sha256", "-verify", public, "-signature", work / "sig", work / "payload")


@needs_openssl
def test_the_payload_has_the_fields_of_cosign_s_and_ours_are_optional(store: Store, work: Path) -> None:
    private, _ = key_by_openssl(work, "k")
    digest = bundle_in(store, work)
    signed(store, digest, private_key(private), days=30)
    manifest, payload = _first_payload(store, digest)
    assert json.loads(payload) == {
        "critical": {
            "identity": {"docker-reference": "aotc/tiny"},
            "image": {"docker-manifest-digest": digest},
            "type": "cosign container image signature",
        },
        "optional": {
            "dev.aotc.name": "tiny:latest",
            "dev.aotc.signed": "2026-05-01T12:00:00.000000Z",
            "dev.aotc.expires": "2026-05-31T12:00:00.000000Z",
        },
    }
    assert manifest.layers[0].media_type == "application/vnd.dev.cosign.simplesigning.v1+json"
    assert manifest.config.media_type == "application/vnd.oci.image.config.v1+json"
    config = json.loads(store.blobs.read(manifest.config.digest, 1 << 20))
    assert config["rootfs"] == {"type": "layers", "diff_ids": [manifest.layers[0].digest]}
    entry = next(e for e in json.loads((store.path / "index.json").read_text())["manifests"] if "sig" in str(e))
    assert entry["annotations"] == {"org.opencontainers.image.ref.name": f"sha256-{digest[7:]}.sig"}


@needs_openssl
def test_what_other_tools_wrote_beside_a_signature_stays(store: Store, work: Path) -> None:
    """A certificate, an entry in a transparency log, a layer of another type: cosign verifies by them."""
    private, public = key_by_openssl(work, "k")
    digest = bundle_in(store, work)
    payload = store.blobs.put_bytes(encode_payload(Claims(digest, "ghcr.io/x/tiny")))
    config, other = store.blobs.put_bytes(b"{}"), store.blobs.put_bytes(b"another tool's")
    says = {"dev.cosignproject.cosign/signature": "c2ln", "dev.sigstore.cosign/certificate": "-----BEGIN CERTIFICATE"}
    written = ImageManifest(
        schema_version=2,
        media_type="application/vnd.oci.image.manifest.v1+json",
        config=Descriptor(media_type=IMAGE_CONFIG, digest=config.digest, size=2),
        layers=(
            Descriptor(media_type=PAYLOAD, digest=payload.digest, size=payload.size, annotations=says),
            Descriptor(media_type="application/x-other", digest=other.digest, size=other.size),
        ),
    )
    blob = store.blobs.put_bytes(canonical_json(written))
    place = Descriptor(media_type=written.media_type, digest=blob.digest, size=blob.size)
    store.change_attachment(signature_tag(digest), lambda _: place)
    signed(store, digest, private_key(private))
    add_signatures(
        store, digest, [SignedPayload(encode_payload(Claims(digest, "ghcr.io/x/tiny")), b"sig")]
    )  # without them
    found = signatures_of(store, digest)
    assert found is not None
    layers = read_document(store.blobs, found.digest, ImageManifest).layers
    assert [layer.annotations for layer in layers][0::2] == [says, None]
    assert [layer.media_type for layer in layers] == [PAYLOAD, PAYLOAD, "application/x-other"]
    assert checked(store, digest, trusting(public)).claims.name == "tiny:latest"


@needs_openssl
def test_what_openssl_signed_by_hand_is_accepted(store: Store, work: Path) -> None:
    """As cosign's documentation does it with `cosign generate`, `openssl dgst -sign` and `cosign attach signature`."""
    private, public = key_by_openssl(work, "k")
    digest = bundle_in(store, work)
    payload = encode_payload(Claims(digest, "aotc/tiny", "tiny:latest", NOW))
    signature = openssl("dgst", "-sha256", "-sign", private, given=payload)
    add_signatures(store, digest, [SignedPayload(payload, signature)])
    assert checked(store, digest, trusting(public)).claims.name == "tiny:latest"


@given(
    digest=st.binary(min_size=32, max_size=32).map(lambda raw: f"sha256:{raw.hex()}"),
    name=st.from_regex(r"[a-z]{1,9}:[a-z0-9.]{1,9}", fullmatch=True),
    signed_at=st.datetimes(min_value=datetime(2000, 1, 1), timezones=st.just(UTC)),
    expires=st.none() | st.datetimes(min_value=datetime(2000, 1, 1), timezones=st.just(UTC)),
)
def test_what_is_claimed_is_read_back(digest: str, name: str, signed_at: datetime, expires: datetime | None) -> None:
    claims = Claims(digest, "aotc/x", name, signed_at, expires)
    assert decode_payload(encode_payload(claims)) == claims


# -- several signatures -----------------------------------------------------------------------------------------------


@needs_openssl
def test_signatures_of_several_keys_and_names_stand_side_by_side(store: Store, work: Path) -> None:
    first, second = (private_key(key_by_openssl(work, name)[0]) for name in "ab")
    digest = bundle_in(store, work)
    signed(store, digest, first)
    signed(store, digest, second)
    signed(store, digest, second, "tiny:v1")
    assert checked(store, digest, trusting(first)).key.fingerprint == first.public.fingerprint
    assert checked(store, digest, trusting(second)).key.fingerprint == second.public.fingerprint
    checked(store, digest, trusting(second), Reference(None, "tiny", tag="v1"))
    assert len(_signatures(store, digest)) == 3


@needs_openssl
def test_signing_again_replaces_only_the_same_key_s_signature_for_the_same_name(store: Store, work: Path) -> None:
    first, second = (private_key(key_by_openssl(work, name)[0]) for name in "ab")
    digest = bundle_in(store, work)
    for key in (first, second, first):
        signed(store, digest, key)
    signed(store, digest, first, at=NOW + timedelta(seconds=1))
    times = {decode_payload(one.payload).signed for one in _signatures(store, digest)}
    assert (len(_signatures(store, digest)), times) == (2, {NOW, NOW + timedelta(seconds=1)})


@needs_openssl
def test_signers_at_the_same_time_lose_no_signature(store: Store, work: Path) -> None:
    keys = [private_key(key_by_openssl(work, f"k{n}")[0]) for n in range(8)]
    digest = bundle_in(store, work)
    threads = [threading.Thread(target=signed, args=(store, digest, key)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(_signatures(store, digest)) == 8


@needs_openssl
def test_signing_changes_no_tag_and_no_bundle(store: Store, work: Path) -> None:
    digest = bundle_in(store, work)
    before = store.tags(), read_bundle(store, parse_reference("tiny"))
    signed(store, digest, private_key(key_by_openssl(work, "k")[0]))
    assert (store.tags(), read_bundle(store, parse_reference("tiny"))) == before


# -- travelling -------------------------------------------------------------------------------------------------------


@needs_openssl
@pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo")
def test_skopeo_copies_a_signature_as_any_other_image(store: Store, work: Path, tmp_path: Path) -> None:
    private, public = key_by_openssl(work, "k")
    digest = bundle_in(store, work)
    signed(store, digest, private_key(private))
    other = tmp_path / "other"
    for name in ("tiny:latest", signature_tag(digest)):
        _skopeo(f"oci:{store.path}:{name}", f"oci:{other}:{name}")
    copied = Store.open(other)
    assert signatures_of(copied, digest) == signatures_of(store, digest)
    assert checked(copied, digest, trusting(public)).claims.name == "tiny:latest"


@needs_openssl
def test_signatures_are_taken_over_beside_those_that_are_there(store: Store, work: Path, tmp_path: Path) -> None:
    first, second = (private_key(key_by_openssl(work, name)[0]) for name in "ab")
    other = Store.create(tmp_path / "other")
    digest = bundle_in(store, work)
    assert bundle_in(other, work) == digest
    signed(store, digest, first)
    signed(other, digest, second)
    for _ in range(2):
        fetch_signatures(reader_of(store), store.attachment, other, digest)
    assert len(_signatures(other, digest)) == 2
    checked(other, digest, trusting(first))
    checked(other, digest, trusting(second))
    assert fetch_signatures(reader_of(store), store.attachment, other, sha256_bytes(b"")) is None


@needs_openssl
def test_expired_signatures_do_not_pile_up_where_newer_ones_are_taken_over(
    store: Store, work: Path, tmp_path: Path
) -> None:
    first, second = (private_key(key_by_openssl(work, name)[0]) for name in "ab")
    mirror = Store.create(tmp_path / "mirror")
    digest = bundle_in(store, work)
    assert bundle_in(mirror, work) == digest
    signed(mirror, digest, second)  # for ever
    for year in (2001, 2002, 2003):
        claims = signed(store, digest, first, at=NOW.replace(year=year), days=7)
        fetch_signatures(reader_of(store), store.attachment, mirror, digest)
        assert decode_payload(_signatures(mirror, digest)[-1].payload) == claims
    assert len(_signatures(mirror, digest)) == 2
    checked(mirror, digest, trusting(second))


# -- malformed --------------------------------------------------------------------------------------------------------

CRITICAL = json.loads(DANGERZONE_PAYLOAD)["critical"]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps({"critical": CRITICAL, "optional": None, "more": 1}).encode(),
        json.dumps({"critical": {**CRITICAL, "more": 1}, "optional": None}).encode(),
        json.dumps({"critical": {**CRITICAL, "type": "atomic container signature"}}).encode(),
        json.dumps({"critical": {**CRITICAL, "image": {"docker-manifest-digest": "sha256:../x"}}}).encode(),
        json.dumps({"critical": CRITICAL, "optional": {"dev.aotc.name": 1}}).encode(),
        json.dumps({"critical": CRITICAL, "optional": {"dev.aotc.name": "\x1b[2J"}}).encode(),
        json.dumps({"critical": CRITICAL, "optional": {"dev.aotc.signed": "yesterday"}}).encode(),
        json.dumps({"critical": CRITICAL, "optional": {"dev.aotc.signed": "2026-05-01T12:00:00"}}).encode(),
        json.dumps({"critical": CRITICAL, "optional": {"dev.aotc.expires": None}}).encode(),
    ],
)
def test_a_payload_of_another_form_is_corrupt(payload: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_payload(payload)


@given(st.binary(max_size=400))
def test_any_bytes_as_payload_are_read_or_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode_payload(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(
                ["critical", "optional", "image", "type", "dev.aotc.name", "layers", "annotations", "digest"]
            )
            | st.text(max_size=9),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(json_values, st.sampled_from(["critical", "optional", "identity", "image", "type"]))
def test_any_json_in_a_payload_is_read_or_corrupt(value: object, where: str) -> None:
    document = json.loads(DANGERZONE_PAYLOAD)
    (document if where in document else document["critical"])[where] = value
    try:
        claims = decode_payload(json.dumps(document).encode())
    except CorruptError:
        return
    assert claims.name.isprintable() and claims.digest.startswith("sha256:")


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_as_manifest_are_refused(data: bytes) -> None:
    read, resolve = from_memory(data)
    with pytest.raises((CorruptError, SignatureError)):
        read_signatures(read, resolve("t"))


@given(json_values, st.sampled_from(["mediaType", "digest", "size", "annotations"]))
def test_any_json_in_a_layer_gives_no_signature_or_an_error(value: object, field: str) -> None:
    document = json.loads(DOCUMENTED_MANIFEST)
    document["layers"][0][field] = value
    read, resolve = from_memory(json.dumps(document).encode(), DANGERZONE_PAYLOAD)
    by_digest = Reference(None, "tiny", digest=sha256_bytes(b"another bundle"))
    trust = TrustedKeys(read_public_keys([DANGERZONE_KEY]))
    with pytest.raises((CorruptError, SignatureError)):
        check_signatures(read, resolve, sha256_bytes(b"another bundle"), by_digest, trust)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schemaVersion": 1}, "schema version 1"),
        ({"mediaType": "application/vnd.oci.image.index.v1+json"}, "index"),
        ({"layers": None}, "layers"),
    ],
)
def test_a_manifest_of_another_kind_is_refused(change: dict[str, object], message: str) -> None:
    data = json.dumps({**json.loads(DOCUMENTED_MANIFEST), **change}).encode()
    read, resolve = from_memory(data, DANGERZONE_PAYLOAD)
    with pytest.raises(CorruptError, match=message):
        read_signatures(read, resolve("t"))


def test_layers_of_other_types_and_broken_ones_are_passed_over_and_said() -> None:
    layer = json.loads(DOCUMENTED_MANIFEST)["layers"][0]
    others = [
        {**layer, "mediaType": "application/vnd.dsse.envelope.v1+json"},
        {**layer, "annotations": {}},
        {**layer, "annotations": {"dev.cosignproject.cosign/signature": "no base64!"}},
        {**layer, "digest": "sha256:../../etc/passwd"},
        {**layer, "digest": "sha512:" + "0" * 128},
    ]
    manifest = {**json.loads(DOCUMENTED_MANIFEST), "layers": [*others, layer]}
    read, resolve = from_memory(json.dumps(manifest).encode(), DANGERZONE_PAYLOAD)
    found = read_signatures(read, resolve("t"))
    assert (len(found.signatures), len(found.issues)) == (1, len(others))


def test_a_store_that_gives_other_bytes_than_asked_for_is_noticed() -> None:
    _, resolve = from_memory(DOCUMENTED_MANIFEST)
    with pytest.raises(CorruptError, match="other bytes"):
        read_signatures(lambda media_type, digest, limit: b"{}", resolve("t"))

    def read(media_type: str, digest: str, limit: int) -> bytes:
        return b"another payload" if media_type == PAYLOAD else DOCUMENTED_MANIFEST

    found = read_signatures(read, resolve("t"))
    assert not found.signatures and "other bytes" in found.issues[0].message


def test_a_huge_payload_is_not_read(store: Store) -> None:
    blob = store.blobs.put_bytes(b" " * (PAYLOAD_LIMIT + 1))
    manifest = json.loads(DOCUMENTED_MANIFEST)
    manifest["layers"][0] |= {"digest": blob.digest, "size": blob.size}
    written = store.blobs.put_bytes(json.dumps(manifest).encode())
    found = read_signatures(reader_of(store), Descriptor(media_type="m", digest=written.digest, size=written.size))
    assert not found.signatures and f"{PAYLOAD_LIMIT} bytes" in found.issues[0].message


def test_two_manifests_under_one_signature_tag_are_an_error(store: Store, work: Path) -> None:
    digest = bundle_in(store, work)
    index = json.loads((store.path / "index.json").read_text())
    for data in (b"1", b"2"):
        blob = store.blobs.put_bytes(data)
        annotations = {"org.opencontainers.image.ref.name": signature_tag(digest)}
        manifest = "application/vnd.oci.image.manifest.v1+json"
        entry = {"mediaType": manifest, "digest": blob.digest, "size": 1, "annotations": annotations}
        index["manifests"].append(entry)
    (store.path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="2 manifests"):
        signatures_of(store, digest)


def _signatures(store: Store, digest: str) -> list[SignedPayload]:
    descriptor = signatures_of(store, digest)
    assert descriptor is not None
    return read_signatures(reader_of(store), descriptor).signatures


def _first_payload(store: Store, digest: str):  # type: ignore[no-untyped-def]
    descriptor = signatures_of(store, digest)
    assert descriptor is not None
    manifest = read_document(store.blobs, descriptor.digest, ImageManifest)
    return manifest, store.blobs.read(manifest.layers[0].digest, 1 << 20)


def _skopeo(source: str, destination: str) -> None:
    command = ["skopeo", "--insecure-policy", "copy", "--all", "--preserve-digests", source, destination]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
