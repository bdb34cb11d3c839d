"""Advisories: which units they are of, the signed feed in a store, and `aotc audit`, of records made without torch."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from sample_artifacts import CREATED, library_bytes, make_artifact, make_variant, put_file
from signing import key_by_openssl, needs_openssl, private_key, trusting

from aotc.advisories import (
    FEED_VERSION,
    Advisory,
    Affected,
    Concern,
    Feed,
    UnitFacts,
    Versions,
    decode_feed,
    hits,
    own_feed,
)
from aotc.cli import main
from aotc.digest import canonical_json
from aotc.errors import CorruptError, NotFoundError, SchemaVersionError, SignatureError
from aotc.provenance import Report
from aotc.records import SizeRange
from aotc.store.advisory_feed import FEED_NAME, publish_feed, read_feed
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.signing.attachments import Layer, encode_layers, write_attached

GOLDEN = Path(__file__).parent / "golden" / "v2"

LATER = "2030-01-01T00:00:00Z"

WHOLE = {each.concern.patch for each in own_feed().advisories}
"""Of every patch that an advisory names."""


def advisory(number: int = 1, modified: str = LATER, **concern: Any) -> Advisory:
    fields: dict[str, Any] = {"patch": "a_patch", "effect": "silent", "torch": ">=2.11,<2.15", **concern}
    versions = Versions("ECOSYSTEM", ({"introduced": "0"}, {"fixed": "0.3.0"}))
    affected = (Affected(ranges=(versions,), database_specific=Concern(**fields)),)
    return Advisory(id=f"AOTC-2030-{number:04}", modified=modified, summary="Wrong sums.", affected=affected)


def unit(**fields: Any) -> UnitFacts:
    operators = {"aten.amin.default": ("int8",), "aten.add.Tensor": ("float32",)}
    whole: dict[str, Any] = {"kinds": frozenset(), "patches": frozenset({"others"}), "operators": operators}
    return UnitFacts(**{"torch": "2.13.0+cpu", "device": "cpu", **whole, **fields})


# -- which units ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("concern", "facts", "operators"),
    [
        ({"operators": ("aten.amin",)}, {}, ("aten.amin.default",)),
        ({"operators": ("aten.amin", "aten.add")}, {}, ("aten.amin.default", "aten.add.Tensor")),
        ({"operators": ("aten.amax",)}, {}, None),
        ({"operators": ("aten.amin",), "dtypes": ("int8", "uint8")}, {}, ("aten.amin.default",)),
        ({"operators": ("aten.add",), "dtypes": ("int8", "uint8")}, {}, None),
        ({"dtypes": ("int8",)}, {}, ("aten.amin.default",)),
        ({}, {}, ()),
        ({}, {"patches": frozenset({"a_patch"})}, None),
        ({"torch": ">=2.14"}, {}, None),
        ({"torch": "<2.13"}, {}, None),
        ({"devices": ("cuda",)}, {}, None),
        ({"devices": ("cuda",)}, {"device": "cuda"}, ()),
        ({"only": ("range",)}, {}, None),
        ({"only": ("range",)}, {"kinds": frozenset({"range"})}, ()),
        ({"only": ("range", "frozen")}, {"kinds": frozenset({"range"})}, None),
    ],
)
def test_an_advisory_is_of_the_units_that_it_says(
    concern: dict[str, Any], facts: dict[str, Any], operators: tuple[str, ...] | None
) -> None:
    found = list(hits(Feed(FEED_VERSION, (advisory(**concern),)), unit(**facts)))
    assert [(hit.sure, hit.operators) for hit in found] == ([] if operators is None else [(True, operators)])


@pytest.mark.parametrize(
    ("concern", "facts", "operators"),
    [
        ({"operators": ("aten.amax",)}, {"operators": None}, ()),
        ({"operators": ("aten.amin",)}, {"patches": None}, ("aten.amin.default",)),
        ({}, {"patches": None}, ()),
        ({"only": ("kind of a newer aotc",)}, {}, ()),
    ],
)
def test_what_is_not_known_may_be_so(
    concern: dict[str, Any], facts: dict[str, Any], operators: tuple[str, ...]
) -> None:
    (hit,) = hits(Feed(FEED_VERSION, (advisory(**concern),)), unit(**facts))
    assert not hit.sure and hit.operators == operators


def test_a_withdrawn_advisory_is_of_nothing() -> None:
    withdrawn = msgspec.structs.replace(advisory(), withdrawn=LATER)
    assert list(hits(Feed(FEED_VERSION, (withdrawn,)), unit())) == []


# -- the feed ---------------------------------------------------------------------------------------------------------


def test_of_two_feeds_the_newer_word_counts() -> None:
    own = Feed(FEED_VERSION, (advisory(1, "2026-01-01T00:00:00Z"), advisory(2, "2029-01-01T00:00:00Z", patch="own")))
    theirs = Feed(FEED_VERSION, (advisory(1), advisory(2, "2028-01-01T00:00:00Z"), advisory(3)))
    both = own.with_newer(theirs)
    assert [each.id[-1] for each in both.advisories] == ["1", "2", "3"]
    assert [each.concern.patch for each in both.advisories] == ["a_patch", "own", "a_patch"]
    assert both.advisories[0].modified == LATER


def test_a_feed_of_a_newer_aotc_may_have_further_fields() -> None:
    data = json.loads(Feed(FEED_VERSION, (advisory(),)).encode())
    data["advisories"][0] |= {"severity": [{"type": "CVSS_V4", "score": "…"}], "credits": []}
    data["advisories"][0]["affected"][0]["database_specific"]["more"] = 1
    assert decode_feed(json.dumps(data).encode(), "it") == Feed(FEED_VERSION, (advisory(),))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{", CorruptError),
        (b'{"version": 1, "advisories": [], "more": ' + b"[" * 5000 + b"]" * 5000 + b"}", CorruptError),
        (b'{"version": 1, "advisories": [{"id": "A", "modified": "", "affected": []}]}', CorruptError),
        (Feed(FEED_VERSION, (advisory(torch="new"),)).encode(), CorruptError),
        (Feed(FEED_VERSION + 1, ()).encode(), SchemaVersionError),
    ],
)
def test_what_is_no_feed_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_feed(data, "it")


def test_the_advisories_are_records_of_osv() -> None:
    """The required fields of its schema 1.6, and the forms of those that are used (ossf.github.io/osv-schema)."""
    for each in json.loads(own_feed().encode())["advisories"]:
        assert each["id"] and each["summary"] and each["schema_version"] == "1.6.6"
        assert datetime.fromisoformat(each["modified"]).tzinfo is not None and each["modified"].endswith("Z")
        assert datetime.fromisoformat(each["published"]) <= datetime.fromisoformat(each["modified"])
        for affected in each["affected"]:
            assert affected["package"] == {"ecosystem": "PyPI", "name": "aotc", "purl": "pkg:pypi/aotc"}
            for versions in affected["ranges"]:
                assert versions["type"] == "ECOSYSTEM"
                assert [next(iter(event)) for event in versions["events"]] == ["introduced", "fixed"]
        assert {reference["type"] for reference in each.get("references", ())} <= {"REPORT"}


@needs_openssl
@pytest.mark.parametrize("remote", [False, True])
def test_a_feed_in_a_store_is_read_if_a_trusted_key_signed_it(store: Store, tmp_path: Path, remote: bool) -> None:
    (private, public), (_, other) = (key_by_openssl(tmp_path, name) for name in ("ci", "other"))
    where = f"file://{store.path}" if remote else str(store.path)
    with pytest.raises(NotFoundError, match="has no advisories"):
        read_feed(where, trusting(public))
    publish_feed(where, Feed(FEED_VERSION, (advisory(1),)), private_key(private), lifetime=3600)
    publish_feed(where, Feed(FEED_VERSION, (advisory(1), advisory(2))), private_key(private), lifetime=3600)
    read = read_feed(where, trusting(public))
    own, new = ({each.id for each in some.advisories} for some in (own_feed(), read))
    assert new - own == {"AOTC-2030-0001", "AOTC-2030-0002"} and own <= new
    for trust, reason in ((None, "untrusted"), (trusting(other), "untrusted")):
        with pytest.raises(SignatureError) as caught:
            read_feed(where, trust)
        assert caught.value.reason == reason
    assert [str(tag) for tag in Store.open(store.path).tags()] == []


@needs_openssl
def test_a_feed_that_somebody_changed_or_that_expired_is_refused(store: Store, tmp_path: Path) -> None:
    private, public = key_by_openssl(tmp_path, "ci")
    publish_feed(str(store.path), own_feed(), private_key(private), lifetime=-3600)
    with pytest.raises(SignatureError) as caught:
        read_feed(str(store.path), trusting(public))
    assert caught.value.reason == "expired"
    from aotc.store.advisory_feed import FEED

    emptied = encode_layers(FEED, [Layer(Feed(FEED_VERSION, ()).encode())])
    store.change_attachment(FEED_NAME, lambda _: write_attached(store, emptied))
    with pytest.raises(SignatureError) as caught:
        read_feed(str(store.path), trusting(public))
    assert caught.value.reason == "unsigned"


@needs_openssl
def test_an_older_feed_does_not_come_back(store: Store, tmp_path: Path) -> None:
    """On a host that has read a newer one, as with bundles."""
    private, public = key_by_openssl(tmp_path, "ci")
    trust = trusting(public, memory=tmp_path / "memory")
    publish_feed(str(store.path), Feed(FEED_VERSION, (advisory(1),)), private_key(private))
    old = Path(shutil.copytree(store.path, tmp_path / "old"))
    publish_feed(str(store.path), Feed(FEED_VERSION, (advisory(1), advisory(2))), private_key(private))
    read_feed(str(store.path), trust)
    with pytest.raises(SignatureError) as caught:
        read_feed(str(old), trust)
    assert caught.value.reason == "rolled-back"


@needs_openssl
def test_a_feed_is_no_garbage(store: Store, tmp_path: Path) -> None:
    private, public = key_by_openssl(tmp_path, "ci")
    publish_feed(str(store.path), own_feed(), private_key(private))
    collect(store, Policy(grace=0))
    assert fsck(store.path).errors == []
    assert read_feed(str(store.path), trusting(public)) == own_feed()


# -- the audit --------------------------------------------------------------------------------------------------------


def report(without: str = "", operators: dict[str, tuple[str, ...]] | None = None) -> bytes:
    return canonical_json(Report((), 1, tuple(sorted(WHOLE - {without})), operators))


def put(store: Store, folder: Path, model: str, data: bytes | None, tag: str = "latest", **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    library = put_file(store, folder, "model.so", library_bytes(1) + model.encode())
    variant = make_variant((library,), 1, None if data is None else put_file(store, folder, "report.json", data))
    variant = msgspec.structs.replace(variant, **fields.pop("variant", {}))
    publish(store, model, tag, [make_artifact((variant,), model=model, **fields)], created=CREATED)


@pytest.fixture
def audited(store: Store, tmp_path: Path) -> Store:
    """Of `small`, the patch of `rounded_quotients` is missing; of the others, nothing, or its operators."""
    divides, adds = {"aten.remainder.Scalar": ("float32",)}, {"aten.add.Tensor": ("float32",)}
    put(store, tmp_path / "w", "hit", report("rounded_quotients", divides))
    put(store, tmp_path / "w", "patched", report("", divides))
    put(store, tmp_path / "w", "adds", report("rounded_quotients", adds))
    put(store, tmp_path / "w", "integers", report("rounded_quotients", {"aten.remainder.Scalar": ("int64",)}))
    return store


def audit(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def found_in(*arguments: object) -> list[dict[str, Any]]:
    ran = audit(*arguments, "--json")
    found: list[dict[str, Any]] = json.loads(ran.stdout)["found"]
    assert ran.exit_code == (1 if found else 0), ran.output
    return found


def test_an_audit_names_the_live_tags_with_an_advisory_and_no_others(audited: Store) -> None:
    (found,) = found_in(audited.path)
    known = next(each for each in own_feed().advisories if each.concern.patch == "rounded_quotients")
    assert (found["ref"], found["id"], found["unit"]) == (f"{audited.path}#hit:latest", known.id, "batch=1")
    assert (found["effect"], found.get("sure", True), found["operators"]) == ("silent", True, ["aten.remainder.Scalar"])
    assert found_in(f"{audited.path}#adds", f"file://{audited.path}#patched", f"{audited.path}#integers") == []
    assert [one["ref"] for one in found_in("hit", "--store", f"file://{audited.path}")] == [
        f"file://{audited.path}#hit:latest"
    ]
    assert len(found_in(f"file://{audited.path}")) == 1
    text = audit("--store", audited.path)
    count = len(own_feed().advisories)
    assert f"4 artifacts by {count} advisories: found 1 that apply, 0 that may apply" in text.stdout
    assert text.exit_code == 1
    assert f"{known.id}: {known.summary} (patch `rounded_quotients`; fixed in aotc 0.2.0)" in text.stdout


def test_a_build_that_recorded_no_graph_may_have_each_that_its_facts_allow(store: Store, tmp_path: Path) -> None:
    put(store, tmp_path / "w", "before", report("rounded_quotients"))
    put(
        store,
        tmp_path / "w",
        "ranged",
        report("negative_remainders"),
        variant={"bucket": {"batch": SizeRange(1, 8, tune_at=8)}},
    )
    put(store, tmp_path / "w", "fixed", report("negative_remainders"))
    found = {(one["model"], one["patch"], one.get("sure", True)) for one in found_in(store.path)}
    assert found == {("before", "rounded_quotients", False), ("ranged", "negative_remainders", True)}


def test_the_golden_store_of_an_older_aotc_is_answered_for(tmp_path: Path) -> None:
    """Its report names patches, and no operators."""
    store = shutil.copytree(GOLDEN, tmp_path / "store")
    found = audit(store, "--json")
    assert found.exit_code in (0, 1), found.output
    assert all(not one.get("sure", True) for one in json.loads(found.stdout)["found"])


def test_an_artifact_that_cannot_be_read_is_an_error_and_the_others_are_shown(audited: Store) -> None:
    read = json.loads((audited.path / "index.json").read_text())
    (digest,) = (each["digest"] for each in read["manifests"] if each["annotations"]["dev.aotc.model"] == "adds")
    audited.blobs.path(digest).write_bytes(b"?")
    ran = audit(audited.path)
    assert ran.exit_code == 1 and "#hit:latest" in ran.stdout and "#adds:latest" in ran.stderr
    missing = audit(audited.path / "nothing")
    assert missing.exit_code == 2 and "there is no store" in missing.stderr


@needs_openssl
def test_a_published_feed_serves_an_older_aotc(audited: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is published is the list of the aotc that publishes; an audit with another list takes both."""
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    private, public = key_by_openssl(tmp_path, "ci")
    newer = Feed(FEED_VERSION, (*own_feed().advisories, advisory(operators=("aten.add.",))))
    monkeypatch.setattr("aotc.advisories.own_feed", lambda: newer)
    published = audit("--publish", audited.path, "--sign", private, "--expires", "30d")
    assert published.exit_code == 0 and f"published {len(newer.advisories)} advisories" in published.stdout
    monkeypatch.undo()
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    assert {one["model"] for one in found_in(audited.path)} == {"hit"}
    found = found_in(audited.path, "--advisories", audited.path, "--key", public)
    assert {(one["model"], one["id"][5:9]) for one in found} == {("hit", "2026"), ("adds", "2030")}
    assert "AOTC_TRUSTED_KEYS" not in os.environ, "the keys are those of one command"
    unsigned = audit("--publish", audited.path)
    assert unsigned.exit_code == 2 and "--publish and --sign go together" in unsigned.stderr


def test_the_commands_of_a_rebuild_are_those_of_the_manifest(audited: Store, tmp_path: Path) -> None:
    manifest = tmp_path / "my models.yaml"
    model = {"factory": "m.py:f", "inputs": {}}
    manifest.write_text(json.dumps({"version": 1, "models": {"hit": model, "adds": model}}))
    *comments, command = audit(audited.path, "--rebuild", manifest).stdout.splitlines()
    known = next(each for each in own_feed().advisories if each.concern.patch == "rounded_quotients")
    assert comments == [f"# hit for cpu:x86-64-v3: batch=1 ({known.id})"]
    words = ["aotc", "build", str(manifest), "--store", str(audited.path), "--tag", "latest", "--model", "hit"]
    assert shlex.split(command) == words
    model["patches"] = {"rounded_quotients": False}
    manifest.write_text(json.dumps({"version": 1, "models": {"hit": model}}))
    expected = f"# {manifest} switches `rounded_quotients` off for `hit`: remove that first"
    assert expected in audit(audited.path, "--rebuild", manifest).stdout


def test_sarif_and_metrics_have_what_was_found(audited: Store, tmp_path: Path) -> None:
    scan, metrics = tmp_path / "a.sarif", tmp_path / "aotc.prom"
    assert audit(audited.path, "--sarif", scan, "--metrics", metrics).exit_code == 1
    written = json.loads(scan.read_text())
    (run,) = written["runs"]
    (rule,), (result,) = run["tool"]["driver"]["rules"], run["results"]
    assert written["version"] == "2.1.0" and rule["id"] == result["ruleId"] and result["level"] == "error"
    assert f"{audited.path}#hit:latest" in result["message"]["text"]
    parser = pytest.importorskip("prometheus_client.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics.read_text())}
    (sample,) = families["aotc_advisories"].samples
    assert (sample.labels["ref"], sample.labels["sure"], sample.value) == (f"{audited.path}#hit:latest", "true", 1)
    assert families["aotc_audited_artifacts"].samples[0].value == 4
