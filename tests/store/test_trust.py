"""What somebody who can write the store tries, and what a host with trusted keys answers."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sample_artifacts import finish, python
from signing import NOW, bundle_in, checked, key_by_openssl, needs_openssl, private_key, signed, trusting

from aotc.errors import CorruptError, SignatureError, StoreError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, parse_reference
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.keys import PrivateKey, read_private_key
from aotc.store.signing.release import sign_release
from aotc.store.signing.signatures import (
    Claims,
    SignedPayload,
    add_signatures,
    read_signatures,
    sign,
    signature_tag,
    signatures_of,
)
from aotc.store.signing.trust import (
    CLOCK_SKEW,
    Accepted,
    _memory_path,
    _recall,
    _remember,
    look_at_signatures,
    read_trust,
    signed_names,
)

pytestmark = needs_openssl

OLD, NEW = NOW - timedelta(days=10), NOW - timedelta(days=1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[PrivateKey, PrivateKey]:
    """Ours, and somebody else's."""
    folder = tmp_path_factory.mktemp("keys")
    return private_key(key_by_openssl(folder, "ours")[0]), private_key(key_by_openssl(folder, "theirs")[0])


@pytest.fixture
def ours(pair: tuple[PrivateKey, PrivateKey]) -> PrivateKey:
    return pair[0]


@pytest.fixture
def theirs(pair: tuple[PrivateKey, PrivateKey]) -> PrivateKey:
    return pair[1]


def refused(reason: str, store: Store, digest: str, *arguments: object, **fields: object) -> SignatureError:
    with pytest.raises(SignatureError) as caught:
        checked(store, digest, *arguments, **fields)  # type: ignore[arg-type]
    error = caught.value
    assert (error.reason, error.digest) == (reason, digest)
    assert error.expected and error.actual and error.hint + "".join(issue.hint for issue in error.issues)
    return error


def set_tag(store: Store, digest: str, tag: str = "latest") -> None:
    """What anybody who can write index.json can do."""
    size = store.blobs.size(digest)
    assert size is not None
    store.set_tag(
        "tiny", tag, Descriptor(media_type="application/vnd.oci.image.index.v1+json", digest=digest, size=size)
    )


# -- one bundle -------------------------------------------------------------------------------------------------------


def test_a_bundle_signed_by_a_trusted_key_for_that_name_is_accepted(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    claims = signed(store, digest, ours, days=30)
    signer = checked(store, digest, trusting(ours))
    assert (signer.claims, signer.key.fingerprint) == (claims, ours.public.fingerprint)


def test_an_unsigned_bundle_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    error = refused("unsigned", store, bundle_in(store, work), trusting(ours))
    assert ours.public.fingerprint[:23] in error.expected
    assert "aotc sign tiny:latest --key" in error.hint


def test_a_bundle_signed_by_another_key_is_refused(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, theirs)
    refused("untrusted", store, digest, trusting(ours))


def test_a_changed_payload_under_an_honest_signature_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, ours)
    descriptor = signatures_of(store, digest)
    assert descriptor is not None
    (one,) = read_signatures(reader_of(store), descriptor).signatures
    forged = store.change_attachment(
        signature_tag(sha := bundle_in(store, work, created="2027-01-01T00:00:00Z")), lambda _: descriptor
    )
    assert forged == descriptor
    add_signatures(store, sha, [SignedPayload(one.payload.replace(digest.encode(), sha.encode()), one.signature)])
    assert refused("other-bundle", store, sha, trusting(ours)).issues[1].message.startswith("untrusted")


def test_a_signature_moved_from_another_bundle_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    good = bundle_in(store, work)
    signed(store, good, ours)
    evil = bundle_in(store, work, created="2027-01-01T00:00:00Z")
    descriptor = signatures_of(store, good)
    assert descriptor is not None
    store.change_attachment(signature_tag(evil), lambda _: descriptor)
    error = refused("other-bundle", store, evil, trusting(ours))
    assert (good in error.actual, evil in error.expected) == (True, True)


def test_a_bundle_under_another_tag_of_its_model_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work, tag="canary")
    signed(store, digest, ours, "tiny:canary")
    set_tag(store, digest, "latest")
    error = refused("other-name", store, digest, trusting(ours))
    assert ("tiny:latest" in error.expected, "tiny:canary" in error.actual) == (True, True)


def test_a_bundle_of_another_model_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work, model="other")
    signed(store, digest, ours, "other:latest")
    refused("other-name", store, digest, trusting(ours))


def test_a_signature_for_no_name_is_good_for_its_digest_only(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    sign_release(store, Reference(None, "tiny", digest=digest), ours, now=NOW)
    refused("other-name", store, digest, trusting(ours))
    checked(store, digest, trusting(ours), Reference(None, "tiny", digest=digest))


def test_a_signature_without_a_time_releases_nothing_under_a_tag(store: Store, work: Path, ours: PrivateKey) -> None:
    """It could never be told from an older one."""
    digest = bundle_in(store, work)
    sign(store, Claims(digest, "aotc/tiny", "tiny:latest"), ours)
    assert "at an unknown time" in refused("other-name", store, digest, trusting(ours)).actual


def test_a_digest_pins_the_bundle_and_still_wants_a_trusted_key(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    by_digest = Reference(None, "tiny", digest=digest)
    refused("unsigned", store, digest, trusting(ours), by_digest)
    signed(store, digest, theirs, "tiny:v1")
    refused("untrusted", store, digest, trusting(ours), by_digest)
    signed(store, digest, ours, "tiny:v1", days=1)
    checked(store, digest, trusting(ours), by_digest)
    refused("expired", store, digest, trusting(ours), by_digest, now=NOW + timedelta(days=2))


def test_junk_beside_a_good_signature_harms_nobody(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    add_signatures(store, digest, [SignedPayload(b"{}", b"x"), SignedPayload(b"", b"y")])
    signed(store, digest, theirs)
    signed(store, digest, ours)
    checked(store, digest, trusting(ours))


def test_every_signature_s_flaw_is_listed_and_the_nearest_one_leads(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, theirs)
    signed(store, digest, ours, "tiny:other")
    signed(store, digest, ours, "tiny:latest", OLD, days=1)
    error = refused("expired", store, digest, trusting(ours))
    assert [issue.message.partition(":")[0] for issue in error.issues] == ["untrusted", "other-name", "expired"]


# -- time -------------------------------------------------------------------------------------------------------------


def test_an_expired_signature_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, ours, days=30)
    ends = NOW + timedelta(days=30)
    checked(store, digest, trusting(ours), now=ends + CLOCK_SKEW - timedelta(seconds=1))
    error = refused("expired", store, digest, trusting(ours), now=ends + CLOCK_SKEW)
    assert "2026-05-31T12:00:00Z" in error.actual and "2026-05-31T12:05:00Z" in error.expected


def test_a_signature_from_the_future_is_refused_beyond_the_skew_of_clocks(
    store: Store, work: Path, ours: PrivateKey
) -> None:
    """Otherwise one signer with a fast clock would make every later release look like a rollback."""
    digest = bundle_in(store, work)
    signed(store, digest, ours)
    checked(store, digest, trusting(ours), now=NOW - CLOCK_SKEW)
    refused("not-yet-valid", store, digest, trusting(ours), now=NOW - CLOCK_SKEW - timedelta(seconds=1))


def test_what_was_signed_before_the_time_asked_for_is_refused(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, ours, at=OLD)
    checked(store, digest, trusting(ours, after=OLD))
    for reference in (None, Reference(None, "tiny", digest=digest)):
        refused("too-old", store, digest, trusting(ours, after=OLD + timedelta(seconds=1)), reference)


# -- rollback ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def releases(store: Store, work: Path, ours: PrivateKey) -> tuple[str, str]:
    """An old release and the new one, both honestly signed for the same name."""
    old = bundle_in(store, work)
    signed(store, old, ours, at=OLD)
    new = bundle_in(store, work, created="2026-02-02T00:00:00Z")
    signed(store, new, ours, at=NEW)
    return old, new


def test_an_old_bundle_put_back_is_refused_on_a_host_that_has_loaded_the_new_one(
    store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path
) -> None:
    old, new = releases
    trust = trusting(ours, memory=tmp_path / "memory")
    checked(store, old, trust)
    checked(store, new, trust)
    checked(store, new, trust)
    set_tag(store, old)
    error = refused("rolled-back", store, old, trust)
    assert (new in error.message, "2026-04-30" in error.expected, "2026-04-21" in error.actual) == (True, True, True)


def test_signing_the_old_bundle_again_is_how_one_goes_back_on_purpose(
    store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path
) -> None:
    old, new = releases
    trust = trusting(ours, memory=tmp_path / "memory")
    checked(store, new, trust)
    signed(store, old, ours, at=NOW)
    checked(store, old, trust)
    refused("rolled-back", store, new, trust)


def test_the_error_names_the_file_that_remembers_and_without_it_the_host_is_as_new(
    store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path
) -> None:
    old, new = releases
    trust = trusting(ours, memory=tmp_path / "memory")
    checked(store, new, trust)
    path = Path(refused("rolled-back", store, old, trust).hint.rpartition(" remove ")[2])
    assert path.parent == tmp_path / "memory"
    path.unlink()
    checked(store, old, trust)  # the promise ends here: a host without a memory cannot know


def test_a_fresh_host_is_bounded_by_expiry_and_by_the_time_it_is_told(
    store: Store, work: Path, ours: PrivateKey
) -> None:
    old = bundle_in(store, work)
    signed(store, old, ours, at=OLD, days=7)
    refused("expired", store, old, trusting(ours))
    refused("too-old", store, old, trusting(ours, after=NEW), now=OLD)


def test_an_old_bundle_does_not_come_back_by_an_old_key_that_is_still_trusted(
    store: Store, releases: tuple[str, str], work: Path, ours: PrivateKey, theirs: PrivateKey, tmp_path: Path
) -> None:
    """Keys are being rotated from ours to theirs: the memory of both counts."""
    old, _ = releases
    newest = bundle_in(store, work, created="2026-03-03T00:00:00Z")
    signed(store, newest, theirs, at=NOW)
    memory = tmp_path / "memory"
    checked(store, newest, trusting(ours, theirs, memory=memory))
    refused("rolled-back", store, old, trusting(ours, theirs, memory=memory))


def test_an_old_bundle_of_a_repository_does_not_come_back_by_the_shorter_of_its_names(
    store: Store, work: Path, ours: PrivateKey, tmp_path: Path
) -> None:
    """Both names do for a load; nobody signs which signatures are there, so an old one can be left alone."""
    there = Reference("oci://registry.example/team/tiny", "", tag="latest")
    other = Reference("oci://registry.example/other/tiny", "", tag="latest")
    trust = trusting(ours, memory=tmp_path / "memory")
    old, new = bundle_in(store, work), bundle_in(store, work, created="2026-02-02T00:00:00Z")
    signed(store, old, ours, "tiny:latest", at=OLD)
    signed(store, new, ours, "registry.example/team/tiny:latest", at=NEW)
    checked(store, old, trust, there)
    checked(store, new, trust, there)
    error = refused("rolled-back", store, old, trust, there)
    checked(store, old, trust, other)  # another repository's releases are its own
    signed(store, new, ours, "tiny:latest", at=NOW)
    checked(store, new, trust, there)  # by the newer of its signatures, which both names now remember
    error = refused("rolled-back", store, old, trust, there)
    remembering = error.hint.rpartition(" remove ")[2].split(" and ")
    assert len(remembering) == 2
    for path in remembering:
        Path(path).unlink()
    checked(store, old, trust, there)


def test_names_and_strangers_keys_do_not_disturb_one_another(
    store: Store, releases: tuple[str, str], ours: PrivateKey, theirs: PrivateKey, tmp_path: Path
) -> None:
    old, new = releases
    memory = tmp_path / "memory"
    checked(store, new, trusting(ours, memory=memory))
    signed(store, old, theirs, at=OLD)
    signed(store, old, ours, "tiny:stable", at=OLD)
    checked(store, old, trusting(theirs, memory=memory))
    checked(store, old, trusting(ours, memory=memory), Reference(None, "tiny", tag="stable"))


def test_a_digest_is_not_remembered(store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path) -> None:
    old, new = releases
    trust = trusting(ours, memory=tmp_path / "memory")
    checked(store, new, trust, Reference(None, "tiny", digest=new))
    checked(store, old, trust)


def test_a_refused_bundle_is_not_remembered(
    store: Store, releases: tuple[str, str], work: Path, ours: PrivateKey, theirs: PrivateKey, tmp_path: Path
) -> None:
    old, new = releases
    trust = trusting(ours, memory=tmp_path / "memory")
    checked(store, old, trust)
    evil = bundle_in(store, work, created="2028-01-01T00:00:00Z")
    signed(store, evil, theirs, at=NOW)
    refused("untrusted", store, evil, trust)
    checked(store, new, trust)


def test_hosts_with_many_processes_remember_the_newest(
    store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path
) -> None:
    old, new = releases
    trust = trusting(ours, memory=tmp_path / "memory")
    outcomes: list[str] = []

    def load(digest: str) -> None:
        try:
            checked(store, digest, trust)
            outcomes.append("accepted")
        except SignatureError as error:
            outcomes.append(error.reason)

    threads = [threading.Thread(target=load, args=(digest,)) for digest in [old, new] * 8]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(outcomes) <= {"accepted", "rolled-back"} and len(outcomes) == 16
    refused("rolled-back", store, old, trust)


def test_a_process_that_is_late_does_not_make_the_host_forget_the_newest(tmp_path: Path) -> None:
    old, new = (Accepted("sha256:k", "tiny:latest", f"sha256:{at.day}", at) for at in (OLD, NEW))
    for one in (new, old):
        _remember(tmp_path, one)
    assert _recall(_memory_path(tmp_path, "sha256:k", "tiny:latest")) == new


def test_a_process_killed_while_it_remembers_leaves_the_memory_whole(
    store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path
) -> None:
    """It is written as all files are: a sibling, then a rename."""
    old, new = releases
    (tmp_path / "ours.pub").write_text(ours.public.pem)
    code = (
        "import os, sys, pathlib; from signing import *\n"
        "store = Store.open(sys.argv[1])\n"
        "trust = trusting(pathlib.Path(sys.argv[2]), memory=pathlib.Path(sys.argv[3]))\n"
        "pathlib.Path.replace = lambda *a: os._exit(9)\n"
        "checked(store, sys.argv[4], trust)"
    )
    memory = tmp_path / "memory"
    process = python(code, store.path, tmp_path / "ours.pub", memory, new)
    process.communicate(timeout=120)
    assert process.returncode == 9
    trust = trusting(ours, memory=memory)
    checked(store, old, trust)
    checked(store, new, trust)
    refused("rolled-back", store, old, trust)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 10_000])
def test_a_damaged_memory_is_no_empty_memory(
    content: bytes, store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path
) -> None:
    trust = trusting(ours, memory=tmp_path / "memory")
    checked(store, releases[1], trust)
    (path,) = (tmp_path / "memory").glob("*.json")
    path.write_bytes(content)
    with pytest.raises(CorruptError, match="a rollback could not be detected"):
        checked(store, releases[1], trust)


def test_a_host_that_cannot_remember_says_so_and_goes_on(
    store: Store, releases: tuple[str, str], ours: PrivateKey, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "aotc"):
        checked(store, releases[1], trusting(ours, memory=tmp_path / "file" / "memory"))
    assert "cannot be remembered" in caplog.text


# -- keys -------------------------------------------------------------------------------------------------------------


def test_while_keys_are_rotated_both_are_good_and_then_only_the_new_one(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    signed(store, digest, ours)
    checked(store, digest, trusting(ours, theirs))
    signed(store, digest, theirs)
    checked(store, digest, trusting(ours, theirs))
    checked(store, digest, trusting(theirs))


def test_keys_come_from_the_environment_as_files_or_a_folder(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "trusted"
    folder.mkdir()
    (folder / "a.pub").write_text(ours.public.pem)
    (tmp_path / "b.pub").write_text(theirs.public.pem)
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", f"{folder}{os.pathsep}{tmp_path / 'b.pub'}")
    monkeypatch.setenv("AOTC_SIGNED_AFTER", "2026-01-01T00:00:00Z")
    trust = read_trust(cache=tmp_path / "cache")
    assert trust is not None and len(trust.keys) == 2
    assert trust.signed_after == datetime(2026, 1, 1, tzinfo=UTC)
    assert trust.memory == tmp_path / "cache" / "trust-v1"


def test_a_caller_s_keys_take_the_place_of_the_environment_s(
    ours: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(tmp_path / "missing"))
    with pytest.raises(StoreError, match=r"^AOTC_TRUSTED_KEYS: cannot read .*missing"):
        read_trust()
    for given in ([ours.public.pem], ours.public.pem):
        trust = read_trust(given, cache=tmp_path)
        assert trust is not None and [key.fingerprint for key in trust.keys] == [ours.public.fingerprint]


@pytest.mark.parametrize("value", ["", os.pathsep])
def test_a_variable_that_is_set_and_empty_does_not_turn_trust_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", value)
    with pytest.raises(SignatureError, match="no trusted key"):
        read_trust()


def test_no_keys_means_no_check_but_not_with_a_time() -> None:
    assert read_trust() is None
    with pytest.raises(SignatureError, match="no trusted keys are set"):
        read_trust(signed_after="2026-01-01T00:00:00Z")
    with pytest.raises(SignatureError, match="is not a time"):
        read_trust(signed_after="soon")
    with pytest.raises(SignatureError, match="no trusted key"):
        read_trust([])


def test_nothing_of_cryptography_is_imported_without_keys(store: Store, work: Path) -> None:
    bundle_in(store, work)
    code = (
        "import sys; from aotc.store.layout.bundle import *; from aotc.store.layout.store import *\n"
        "from aotc.store.reference import *; from aotc.store.signing.trust import read_trust\n"
        "store = Store.open(sys.argv[1]); assert read_trust() is None\n"
        "read_bundle(store, parse_reference('tiny')); print(*sys.modules)"
    )
    names = finish(python(code, store.path)).split()
    assert not [name for name in names if name.partition(".")[0] in ("cryptography", "nacl")]


def test_where_the_package_is_missing_the_error_says_what_to_install(tmp_path: Path, ours: PrivateKey) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from aotc.store.signing.trust import *; from aotc.errors import SignatureError\n"
        "try: read_trust([sys.argv[1]])\nexcept SignatureError as error: print(error)"
    )
    assert "pip install 'aotc[sign]'" in finish(python(code, ours.public.pem))


# -- names, looking, releasing ----------------------------------------------------------------------------------------


def test_in_a_registry_the_repository_stands_for_the_model() -> None:
    assert signed_names(None, "tiny", "v1") == signed_names("s3://bucket/store", "tiny", "v1") == ("tiny:v1",)
    names = ("host:5000/team/tiny:v1", "tiny:v1")
    assert signed_names("oci://host:5000/team/tiny", "", "v1") == names


def test_looking_says_who_signed_and_never_vouches_for_strangers(
    store: Store, work: Path, ours: PrivateKey, theirs: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    reference = parse_reference("tiny")
    at = datetime.now(UTC)
    signed(store, digest, ours, at=at)
    signed(store, digest, theirs, at=at)
    seen = look_at_signatures(reader_of(store), store.attachment, digest, reference, trusting(ours))
    assert [(one.key, one.flaw) for one in seen] == [(ours.public.fingerprint, ""), ("", "untrusted")]
    unknown = look_at_signatures(reader_of(store), store.attachment, digest, reference, None)
    assert [one.key for one in unknown] == ["", ""]


def test_a_release_is_signed_for_each_name_and_for_so_long(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    reference = Reference(None, "tiny", digest=digest)
    claims = sign_release(
        store, reference, ours, names=["tiny:latest", "host:5000/ml/tiny:v1"], lifetime=30 * 86400.0, now=NOW
    )
    assert [claim.name for claim in claims] == ["tiny:latest", "host:5000/ml/tiny:v1"]
    assert {claim.expires for claim in claims} == {NOW + timedelta(days=30)}
    checked(store, digest, trusting(ours))


@pytest.mark.parametrize(
    ("field", "value"), [("lifetime", 1e10), ("lifetime", 0.0), ("names", ["tiny"]), ("names", ["a b:c"])]
)
def test_what_cannot_be_signed_for_is_an_error_and_signs_nothing(
    field: str, value: object, store: Store, work: Path, ours: PrivateKey
) -> None:
    digest = bundle_in(store, work)
    with pytest.raises(SignatureError, match=r"lasts more than 0 and less than .* s were asked|is not a name"):
        sign_release(store, parse_reference("tiny"), ours, **{field: value})  # type: ignore[arg-type]
    assert signatures_of(store, digest) is None


def test_a_bundle_that_is_damaged_is_not_signed(store: Store, work: Path, ours: PrivateKey) -> None:
    digest = bundle_in(store, work)
    path = store.blobs.path(digest)
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tinz"))
    with pytest.raises(CorruptError):
        sign_release(store, parse_reference("tiny"), ours)


def test_errors_of_signatures_cross_processes(store: Store, work: Path, ours: PrivateKey) -> None:
    import pickle

    error = refused("unsigned", store, bundle_in(store, work), trusting(ours))
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.reason, copy.digest, str(copy)) == (error.reason, error.digest, str(error))


def test_after_the_check_every_byte_is_named_by_the_signed_digest(store: Store, work: Path, ours: PrivateKey) -> None:
    """The bundle names manifests, they name record and blobs: a change below the signed digest is found as one."""
    digest = bundle_in(store, work)
    signed(store, digest, ours)
    bundle = read_bundle(store, parse_reference("tiny"))
    assert bundle.digest == digest
    reached = {digest}
    pending = [digest]
    while pending:
        data = json.loads(store.blobs.read(pending.pop(), 1 << 22))
        for below in [
            *data.get("manifests", ()),
            *data.get("layers", ()),
            *([data["config"]] if "config" in data else ()),
        ]:
            reached.add(below["digest"])
            if below["mediaType"].endswith("manifest.v1+json"):
                pending.append(below["digest"])
    signature = signatures_of(store, digest)
    assert signature is not None
    own = {signature.digest} | {layer["digest"] for layer in _layers(store, signature)}
    assert reached | own == {f"sha256:{path.name}" for path in (store.path / "blobs" / "sha256").iterdir()}


def _layers(store: Store, descriptor: Descriptor) -> list[dict[str, str]]:
    manifest = json.loads(store.blobs.read(descriptor.digest, 1 << 22))
    return [manifest["config"], *manifest["layers"]]


def test_the_key_of_a_pair_that_aotc_made_signs_and_is_trusted(store: Store, work: Path) -> None:
    from aotc.store.signing.keys import generate_key_pair

    private, public = generate_key_pair(str(work / "ci"), b"pw")
    digest = bundle_in(store, work)
    signed(store, digest, read_private_key(str(private), lambda: b"pw"))
    checked(store, digest, trusting(public))


# -- rotation ----------------------------------------------------------------------------------------------------------


@needs_openssl
def test_a_key_is_rotated_and_no_load_is_refused_meanwhile(store: Store, work: Path, tmp_path: Path) -> None:
    """The steps of SECURITY.md. Each replica is asked after each step, also those that a step has not reached yet."""
    (old_key, old), (new_key, new) = (key_by_openssl(work, name) for name in ("old", "new"))
    digest, memory = bundle_in(store, work), tmp_path / "memory"
    replicas = {
        name: trusting(*keys, memory=memory / name)
        for name, keys in {"before": (old,), "both": (old, new), "after": (new,)}.items()
    }

    def served(*names: str) -> None:
        for name in names:
            assert checked(store, digest, replicas[name]).claims.name == "tiny:latest"

    signed(store, digest, private_key(old_key))
    served("before", "both")
    signed(store, digest, private_key(new_key), at=NOW + timedelta(minutes=1))
    served("before", "both", "after")
    digest = bundle_in(store, work, created="2026-06-01T00:00:00Z")  # the next release, by the new key alone
    signed(store, digest, private_key(new_key), at=NOW + timedelta(minutes=2))
    served("both", "after")
    with pytest.raises(SignatureError) as caught:
        served("before")
    assert caught.value.reason == "untrusted"


@needs_openssl
def test_after_a_rotation_the_old_key_releases_nothing_and_brings_nothing_back(
    store: Store, work: Path, tmp_path: Path
) -> None:
    (old_key, old), (new_key, new) = (key_by_openssl(work, name) for name in ("old", "new"))
    both, after = (trusting(*keys, memory=tmp_path / "memory") for keys in ((old, new), (new,)))
    first = bundle_in(store, work)
    signed(store, first, private_key(old_key))
    second = bundle_in(store, work, created="2026-06-01T00:00:00Z")
    signed(store, second, private_key(new_key), at=NOW + timedelta(minutes=1))
    checked(store, second, both)
    for trust, reason in ((both, "rolled-back"), (after, "untrusted")):
        with pytest.raises(SignatureError) as caught:
            checked(store, first, trust)
        assert caught.value.reason == reason
