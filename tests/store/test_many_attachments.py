"""Signatures and attestations by foreign keys, more than a bundle keeps: nobody is kept out, and they can be pruned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from remote_reading import QUICK
from signing import bundle_in, checked, key_by_openssl, needs_openssl, private_key, signed, trusting
from test_attestations import LOCAL, verification, verified

from aotc.cli import main
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.push import push
from aotc.store.signing.attachments import (
    COUNT_LIMIT,
    READ_LIMIT,
    DocumentKind,
    Layer,
    ReadLayers,
    attached_name,
    read_layers,
    reader_of,
)
from aotc.store.signing.attestations import ATTESTATIONS, add_envelopes, attest, encode_envelope
from aotc.store.signing.keys import PrivateKey
from aotc.store.signing.signatures import SIGNATURES, Claims, SignedPayload, add_signatures, encode_payload

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[PrivateKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [private_key(key_by_openssl(folder, name, "-algorithm", "ed25519")[0]) for name in ("mine", "foreign")]


@pytest.fixture
def bundle(store: Store, work: Path) -> Bundle:
    bundle_in(store, work)
    return read_bundle(store, LOCAL)


def foreign_signatures(store: Store, bundle: Bundle, key: PrivateKey, count: int) -> None:
    payloads = [encode_payload(Claims(bundle.digest, "elsewhere", f"tiny:{number}")) for number in range(count)]
    add_signatures(store, bundle.digest, [SignedPayload(payload, key.sign(payload)) for payload in payloads])


def foreign_attestations(store: Store, bundle: Bundle, key: PrivateKey, count: int) -> None:
    envelopes = (encode_envelope(bundle.digest, verification(bundle, minutes=each), key) for each in range(count))
    add_envelopes(store, bundle.digest, [Layer(data) for data in envelopes])


def add_mine(store: Store, bundle: Bundle, key: PrivateKey, kind: DocumentKind) -> None:
    if kind is SIGNATURES:
        signed(store, bundle.digest, key)
    else:
        attest(store, bundle, verification(bundle), key)


def check_mine(store: Store, bundle: Bundle, key: PrivateKey, kind: DocumentKind) -> None:
    if kind is SIGNATURES:
        checked(store, bundle.digest, trusting(key))
    else:
        verified(store, bundle, trusting(key))


class Case(NamedTuple):
    kind: DocumentKind
    add_foreign: Callable[[Store, Bundle, PrivateKey, int], None]


CASES = [Case(SIGNATURES, foreign_signatures), Case(ATTESTATIONS, foreign_attestations)]


def layers_of(store: object, bundle: Bundle, kind: DocumentKind) -> ReadLayers:
    found = store.attachment(attached_name(bundle.digest, kind))  # type: ignore[attr-defined]
    assert found is not None
    return read_layers(reader_of(store), found, kind)  # type: ignore[arg-type]


def as_other_tools_do() -> object:
    """They know no bound."""
    return patch("aotc.store.signing.attachments.COUNT_LIMIT", 1 << 20)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.called)
@pytest.mark.parametrize("count", [COUNT_LIMIT, COUNT_LIMIT + 50])
def test_a_trusted_key_s_is_added_beside_as_many_foreign_ones_as_there_are(
    store: Store, bundle: Bundle, keys: Sequence[PrivateKey], case: Case, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    mine, foreign = keys
    with as_other_tools_do():  # type: ignore[attr-defined]
        case.add_foreign(store, bundle, foreign, count)
    add_mine(store, bundle, mine, case.kind)
    check_mine(store, bundle, mine, case.kind)
    assert layers_of(store, bundle, case.kind).total == COUNT_LIMIT
    assert f"{count + 1 - COUNT_LIMIT} {case.kind.called} of a bundle are left out" in caplog.text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.called)
def test_foreign_ones_that_are_added_later_push_none_of_a_trusted_key_out(
    store: Store, bundle: Bundle, keys: Sequence[PrivateKey], case: Case
) -> None:
    mine, foreign = keys
    add_mine(store, bundle, mine, case.kind)
    with as_other_tools_do():  # type: ignore[attr-defined]
        case.add_foreign(store, bundle, foreign, READ_LIMIT + 1)
    check_mine(store, bundle, mine, case.kind)
    found = layers_of(store, bundle, case.kind)
    assert (found.total, len(found.layers)) == (READ_LIMIT + 2, READ_LIMIT)
    (issue,) = found.issues
    assert (issue.expected, issue.actual) == (f"at most {READ_LIMIT}", str(READ_LIMIT + 2))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.called)
def test_a_bundle_is_pushed_and_fetched_though_there_are_150_foreign_ones(
    store: Store, bundle: Bundle, keys: Sequence[PrivateKey], case: Case, work: Path, tmp_path: Path
) -> None:
    mine, foreign = keys
    there = parse_reference(f"{Store.create(tmp_path / 'remote').path.as_uri()}#tiny")
    with as_other_tools_do():  # type: ignore[attr-defined]
        others = Store.create(tmp_path / "others")
        bundle_in(others, work)
        case.add_foreign(others, bundle, foreign, 150)
        push(others, LOCAL, there, limits=QUICK)
    signed(store, bundle.digest, mine)
    add_mine(store, bundle, mine, case.kind)
    for _ in range(2):
        push(store, LOCAL, there, limits=QUICK)
        assert layers_of(open_readable(str(there.store)), bundle, case.kind).total == COUNT_LIMIT
    fetch(there, tmp_path / "copy", of_targets(), trust=trusting(mine), limits=QUICK)
    check_mine(Store.open(tmp_path / "copy"), bundle, mine, case.kind)


@pytest.mark.parametrize("remote", [False, True])
def test_prune_removes_what_no_trusted_key_signed(
    store: Store,
    bundle: Bundle,
    keys: Sequence[PrivateKey],
    remote: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, foreign = keys
    (tmp_path / "mine.pub").write_text(mine.public.pem)
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(tmp_path / "mine.pub"))
    for case in CASES:
        case.add_foreign(store, bundle, foreign, 3)
        add_mine(store, bundle, mine, case.kind)
    where = Reference(str(store.path), "tiny", tag="latest")
    if remote:
        where = parse_reference(f"{Store.create(tmp_path / 'remote').path.as_uri()}#tiny")
        push(store, LOCAL, where, limits=QUICK)
    ran = CliRunner().invoke(main, ["prune", str(where)])
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines() == ["signatures: 3 removed, 1 kept", "attestations: 3 removed, 1 kept"]
    for case in CASES:
        assert layers_of(open_readable(str(where.store)), bundle, case.kind).total == 1
    assert "0 removed, 1 kept" in CliRunner().invoke(main, ["prune", str(where)]).output


def test_prune_without_a_trusted_key_removes_nothing(
    store: Store, bundle: Bundle, keys: Sequence[PrivateKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AOTC_TRUSTED_KEYS", raising=False)
    foreign_signatures(store, bundle, keys[0], 1)
    ran = CliRunner().invoke(main, ["prune", f"{store.path}#tiny"])
    assert ran.exit_code == 2 and "AOTC_TRUSTED_KEYS" in ran.output
    assert layers_of(store, bundle, SIGNATURES).total == 1
