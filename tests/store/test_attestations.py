"""Attestations of `aotc verify`: the standards' bytes, which of several counts, and how they travel with a bundle."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from registry_server import RegistryServer, needs
from remote_reading import QUICK, fetch_all
from signing import bundle_in, key_by_openssl, needs_openssl, openssl, private_key, trusting
from test_store_gc import age

from aotc.cli import main
from aotc.digest import sha256_bytes
from aotc.errors import Issue, UnverifiedError
from aotc.records import Environment
from aotc.store.layout import oci
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.opening import open_readable
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.push import push
from aotc.store.signing.attachments import Layer, reader_of
from aotc.store.signing.attestations import (
    PAYLOAD_TYPE,
    VERIFICATION,
    Attestation,
    add_envelopes,
    attest,
    decode_envelope,
    encode_envelope,
    fetch_attestations,
    read_attestations,
    signed_bytes,
)
from aotc.store.signing.keys import PrivateKey
from aotc.store.signing.trust import TrustedKeys
from aotc.store.signing.verified import check_verified
from aotc.verification import Limit, Verification

LOCAL = parse_reference("tiny")
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
HERE = Environment(os="linux", machine="x86_64", torch="2.13.0", gpu="a GPU")


@pytest.fixture
def bundle(store: Store, work: Path) -> Bundle:
    bundle_in(store, work)
    return read_bundle(store, LOCAL)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[PrivateKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [private_key(key_by_openssl(folder, name)[0]) for name in "ab"]


def verification(bundle: Bundle, minutes: int = 0, **fields: Any) -> Verification:
    (entry,) = bundle.artifacts
    facts = {"target": entry.target, "artifact": entry.digest, "passed": True, "aotc": "0.2.0", "environment": HERE}
    created = NOON + timedelta(minutes=minutes)
    return Verification(model="tiny", created=created, **{**facts, **fields})  # type: ignore[arg-type]


def attached_to(store: Any, bundle: Bundle, keys: Sequence[PrivateKey] = ()) -> list[Attestation]:
    found, issues = read_attestations(reader_of(store), store.attachment, bundle.digest, [key.public for key in keys])
    assert issues == []
    return found


def verified(store: Store, bundle: Bundle, trust: TrustedKeys | None = None) -> Attestation:
    return check_verified(store, bundle.digest, bundle.artifacts[0], "tiny", trust)


# -- the bytes --------------------------------------------------------------------------------------------------------


def test_what_is_signed_is_dsse_s_encoding() -> None:
    """The example of DSSE's specification (secure-systems-lab/dsse, protocol.md)."""
    encoded = signed_bytes("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


@needs_openssl
def test_an_envelope_holds_an_in_toto_statement_whose_signature_openssl_verifies(
    store: Store, bundle: Bundle, work: Path
) -> None:
    private, public = key_by_openssl(work, "ci")
    attest(store, bundle, verification(bundle), private_key(private))
    descriptor = store.attachment(f"sha256-{bundle.digest[7:]}.att")
    assert descriptor is not None
    manifest = json.loads(store.blobs.read(descriptor.digest, 1 << 20))
    assert manifest["subject"]["digest"] == bundle.digest and manifest["subject"]["mediaType"] == oci.INDEX
    assert manifest["artifactType"] == "application/vnd.dsse.envelope.v1+json"
    (layer,) = manifest["layers"]
    assert layer["mediaType"] == "application/vnd.dsse.envelope.v1+json"
    assert layer["annotations"] == {"dev.cosignproject.cosign/signature": "", "predicateType": VERIFICATION}
    envelope = json.loads(store.blobs.read(layer["digest"], 1 << 20))
    payload = base64.b64decode(envelope["payload"])
    statement = json.loads(payload)
    assert envelope["payloadType"] == "application/vnd.in-toto+json"
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [{"name": "tiny", "digest": {"sha256": bundle.digest[7:]}}]
    (signature,) = envelope["signatures"]
    (work / "signature").write_bytes(base64.b64decode(signature["sig"]))
    checking = ("dgst", "-sha256", "-verify", public, "-signature", work / "signature")
    assert b"Verified OK" in openssl(*checking, given=signed_bytes(PAYLOAD_TYPE, payload))


def test_what_was_verified_is_read_back(store: Store, bundle: Bundle) -> None:
    said = verification(bundle, compared=3, buckets=("batch=1",), limits=(Limit("startup", "1 s", "0.5 s", True),))
    attest(store, bundle, said)
    assert [one.verification for one in attached_to(store, bundle)] == [said]


def test_attestations_of_other_predicates_are_kept_and_passed_over(store: Store, bundle: Bundle) -> None:
    """As `cosign attest --predicate sbom.json` attaches them."""
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [],
        "predicateType": "https://spdx.dev/Document",
    }
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    sbom = json.dumps({"payloadType": PAYLOAD_TYPE, "payload": payload, "signatures": [{"sig": "AA=="}]}).encode()
    add_envelopes(store, bundle.digest, [Layer(sbom, (("predicateType", "https://spdx.dev/Document"),))])
    attest(store, bundle, verification(bundle))
    assert len(attached_to(store, bundle)) == 1
    descriptor = store.attachment(f"sha256-{bundle.digest[7:]}.att")
    assert descriptor and sha256_bytes(sbom) in store.blobs.read(descriptor.digest, 1 << 20).decode()


@pytest.mark.parametrize(
    "change",
    [
        {"payload": "no base64"},
        {"payload": base64.b64encode(b"{}").decode()},
        {"signatures": [{"sig": "no base64"}]},
        {"signatures": 1},
    ],
)
def test_an_envelope_that_cannot_be_read_is_an_issue(store: Store, bundle: Bundle, change: dict[str, Any]) -> None:
    envelope = json.loads(encode_envelope(bundle.digest, verification(bundle)))
    add_envelopes(store, bundle.digest, [Layer(json.dumps({**envelope, **change}).encode())])
    found, issues = read_attestations(reader_of(store), store.attachment, bundle.digest)
    assert found == [] and len(issues) == 1
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle)
    assert (caught.value.reason, len(caught.value.issues)) == ("unverified", 1)


# -- which one counts -------------------------------------------------------------------------------------------------


def test_an_artifact_without_an_attestation_is_not_verified(store: Store, bundle: Bundle) -> None:
    with pytest.raises(UnverifiedError, match="no attestation") as caught:
        verified(store, bundle)
    assert caught.value.reason == "unverified" and "aotc verify tiny --attest" in caught.value.hint


def test_an_attestation_of_another_artifact_or_bundle_does_not_count(store: Store, bundle: Bundle) -> None:
    attest(store, bundle, verification(bundle, artifact=sha256_bytes(b"another"), target="cuda:sm_90"))
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle)
    assert (caught.value.reason, caught.value.actual) == ("unverified", "attestations for cuda:sm_90")
    moved = encode_envelope(sha256_bytes(b"another bundle"), verification(bundle))
    add_envelopes(store, bundle.digest, [Layer(moved)])
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle)
    assert "it is about sha256" in caught.value.issues[0].message


def test_the_newest_counts_and_replaces_the_older_ones(store: Store, bundle: Bundle) -> None:
    failed = verification(bundle, passed=False, issues=(Issue("off by 2", where="batch=1"),))
    attest(store, bundle, failed)
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle)
    assert caught.value.reason == "failed" and caught.value.issues == (Issue("off by 2", where="batch=1"),)
    attest(store, bundle, verification(bundle, minutes=1))
    attest(store, bundle, failed)  # an older run that ends later
    assert verified(store, bundle).verification.passed and len(attached_to(store, bundle)) == 1


def test_limits_that_are_not_kept_are_said_until_they_are_kept(store: Store, bundle: Bundle) -> None:
    limits = (Limit("startup", "1 s", "2 s", False), Limit("latency", "+5 %", "+1 %", True))
    attest(store, bundle, verification(bundle, passed=False, limits=limits))
    attest(store, bundle, verification(bundle, minutes=1))  # without a gate
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle)
    assert [issue.message for issue in caught.value.issues] == ["startup is 2 s, the limit is 1 s"]
    listed = CliRunner().invoke(main, ["ls", "tiny", "--store", str(store.path), "--json"])
    assert [row["verified"] for row in json.loads(listed.stdout)] == [{"cpu:x86-64-v3": "failed"}]
    shown = CliRunner().invoke(main, ["inspect", "tiny", "--store", str(store.path)]).stdout
    assert "verified     failed `aotc verify` at 2026-05-01T12:00:00Z on a GPU" in shown
    assert "not kept: startup 2 s, 1 s" in shown
    assert "`aotc verify tiny --gate FILE --attest`" in caught.value.hint
    noisy = (Limit("latency", "+5 %", "+1 %; noise is ±900 %", False, measured=False),)
    attest(store, bundle, verification(bundle, minutes=1, passed=False, limits=noisy))
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle)
    assert "latency could not be measured" in caught.value.issues[0].message
    assert verification(bundle, passed=False, limits=noisy).verdict == "unmeasured"
    assert verification(bundle, passed=False, limits=(*noisy, *limits)).verdict == "failed"
    attest(store, bundle, verification(bundle, minutes=2, limits=limits[1:]))
    assert verified(store, bundle).verification.limits == limits[1:]
    attest(store, bundle, verification(bundle, minutes=3, passed=False))  # wrong numbers count without a gate, too
    with pytest.raises(UnverifiedError, match="did not pass"):
        verified(store, bundle)


@needs_openssl
def test_with_trusted_keys_only_what_they_signed_counts(store: Store, bundle: Bundle, keys: list[PrivateKey]) -> None:
    mine, other = keys
    attest(store, bundle, verification(bundle))
    attest(store, bundle, verification(bundle, minutes=1), other)
    with pytest.raises(UnverifiedError) as caught:
        verified(store, bundle, trusting(mine))
    assert caught.value.reason == "untrusted" and other.public.fingerprint[:23] in caught.value.actual
    attest(store, bundle, verification(bundle, minutes=2, passed=False), mine)
    with pytest.raises(UnverifiedError, match="did not pass"):
        verified(store, bundle, trusting(mine, other))
    assert verified(store, bundle, trusting(other)).signers == (other.public.fingerprint,)
    assert len(attached_to(store, bundle)) == 3  # none replaces another signer's


@needs_openssl
def test_a_changed_payload_is_signed_by_nobody(bundle: Bundle, keys: list[PrivateKey]) -> None:
    envelope = json.loads(encode_envelope(bundle.digest, verification(bundle, passed=False), keys[0]))
    payload = base64.b64decode(envelope["payload"]).replace(b'"passed":false', b'"passed":true ')
    changed = json.dumps({**envelope, "payload": base64.b64encode(payload).decode()}).encode()
    attestation = decode_envelope(changed, [keys[0].public])
    assert attestation is not None and attestation.verification.passed and attestation.signers == ()


@needs_openssl
def test_a_forgery_that_names_a_trusted_key_pushes_nothing_out(
    store: Store, bundle: Bundle, keys: list[PrivateKey]
) -> None:
    """Whoever writes to the store from which a bundle is fetched can name any key and any time."""
    (mine, other), genuine = keys, verification(bundle)
    attest(store, bundle, genuine, mine)
    forged = []
    for said in (verification(bundle, minutes=60, passed=False), verification(bundle, minutes=61)):
        envelope = json.loads(encode_envelope(bundle.digest, said, other))
        envelope["signatures"][0]["keyid"] = mine.public.fingerprint
        forged.append(Layer(json.dumps(envelope).encode()))
    for trusted in ((), (mine.public,), (mine.public,)):
        add_envelopes(store, bundle.digest, forged, trusted)
        assert verified(store, bundle, trusting(mine)).verification == genuine
        assert len(attached_to(store, bundle)) == 3
    later = verification(bundle, minutes=1)
    attest(store, bundle, later, mine)
    assert verified(store, bundle, trusting(mine)).verification == later
    assert len(attached_to(store, bundle)) == 3, "by a key that is known, the newest replaces the older ones"


# -- with the bundle --------------------------------------------------------------------------------------------------


def test_they_live_as_long_as_the_bundle_and_fsck_checks_their_bytes(store: Store, bundle: Bundle) -> None:
    attest(store, bundle, verification(bundle))
    age(store)
    removed = collect(store, Policy(grace=0.0)).removed  # also work folders of builds that other tests have killed
    assert {one.kind for one in removed} <= {"work folder"} and fsck(store.path).findings == ()
    descriptor = store.attachment(f"sha256-{bundle.digest[7:]}.att")
    assert descriptor is not None
    store.blobs.path(descriptor.digest).write_bytes(b"damaged")
    assert {finding.kind for finding in fsck(store.path).findings} >= {"blob corrupt", "tag"}


def test_a_copy_takes_them_over_beside_its_own(store: Store, bundle: Bundle, work: Path, tmp_path: Path) -> None:
    """Two machines verify the artifacts for their own targets, and one store collects both."""
    other = Store.create(tmp_path / "other")
    assert bundle_in(other, work) == bundle.digest
    attest(store, bundle, verification(bundle))
    attest(other, bundle, verification(bundle, target="cuda:sm_90", artifact=sha256_bytes(b"another")))
    for _ in range(2):
        fetch_attestations(reader_of(store), store.attachment, other, bundle.digest)
    assert {one.verification.target for one in attached_to(other, bundle)} == {"cpu:x86-64-v3", "cuda:sm_90"}


@pytest.fixture(params=["folder", "registry"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    if request.param == "folder":
        Store.create(tmp_path / "remote")
        return parse_reference(f"{(tmp_path / 'remote').as_uri()}#tiny")
    server: RegistryServer = request.getfixturevalue("registry")
    return parse_reference(f"oci://{server.host}/attested/tiny")


@needs("docker-registry")
def test_they_are_pushed_and_fetched_with_the_bundle(
    store: Store, bundle: Bundle, where: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    attest(store, bundle, verification(bundle))
    push(store, LOCAL, where, limits=QUICK)
    attest(store, bundle, verification(bundle, minutes=1))
    push(store, LOCAL, where, limits=QUICK)  # the bundle is there, and the newer attestation is not
    assert attached_to(open_readable(str(where.store)), bundle) == attached_to(store, bundle)
    fetch_all(where, tmp_path / "copy", limits=QUICK)
    assert verified(Store.open(tmp_path / "copy"), bundle).verification.created == NOON + timedelta(minutes=1)
