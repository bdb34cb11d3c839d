"""`aotc gc`: what goes, and above all what stays: what a tag reaches, and what somebody may still be using."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from remote_reading import fetch_all
from sample_artifacts import CREATED, PYTHONPATH, finish, python, stored_artifact

from aotc.amounts import parse_age, parse_size
from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.records import Artifact
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle
from aotc.store.layout.oci import INDEX, MANIFEST, PUBLISHED, REF_NAME, SPARSE
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import FOLDERS, Store
from aotc.store.layout.units import UnitRecord, find_unit, put_unit, unit_costs, use_unit
from aotc.store.maintenance import gc
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.reports import Freed
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.push import push

DAY = 86400.0
LONG_AGO = time.time() - 100 * DAY


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where builds leave their work folders."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def age(store: Store, when: float = LONG_AGO) -> None:
    """Let everything in the store have been written, and published in the same order, then."""
    for path in store.path.rglob("*"):
        if path.is_file():
            os.utime(path, (when, when))
    change_entries(store, lambda entries: [publish_at(entry, when + place) for place, entry in enumerate(entries)])


def publish_at(entry: dict[str, Any], when: float) -> dict[str, Any]:
    if PUBLISHED in entry["annotations"]:
        entry["annotations"][PUBLISHED] = datetime.fromtimestamp(when, UTC).isoformat()
    return entry


def change_entries(store: Store, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    path = store.path / "index.json"
    index = json.loads(path.read_bytes())
    index["manifests"] = change(index["manifests"])
    status = path.stat()
    path.write_bytes(canonical_json(index))
    os.utime(path, (status.st_mtime, status.st_mtime))


def blobs_in(store: Store) -> set[str]:
    return {f"sha256:{path.name}" for path in (store.path / "blobs" / "sha256").iterdir()}


def publish_version(store: Store, work: Path, tag: str, version: int, model: str = "tiny") -> str:
    artifact = stored_artifact(store, work, (version,), model=model)
    return publish(store, model, tag, [artifact], created=f"2026-01-{version:02}T00:00:00Z")


def put_unit_of(store: Store, work: Path, batch: int) -> UnitRecord:
    artifact = stored_artifact(store, work, (batch,))
    unit = UnitRecord(sha256_bytes(b"%d" % batch), {}, artifact, 1.0, CREATED)
    put_unit(store, unit)
    return unit


def reached_by(store: Store, name: str) -> set[str]:
    bundle = read_bundle(store, parse_reference(name))
    found = {bundle.digest}
    for entry in bundle.artifacts:
        manifest = json.loads(store.blobs.read(entry.digest, 1 << 20))
        found |= {entry.digest, manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])}
    return found


def loads(store: Store, name: str) -> Artifact:
    """Every byte of the only artifact, checked."""
    (entry,) = read_bundle(store, parse_reference(name)).artifacts
    artifact = read_artifact(store, entry.digest)
    for file in each_file(artifact):
        store.blobs.verify(file)
    return artifact


def removed(freed: Freed, kind: str) -> list[str]:
    return [removal.name for removal in freed.removed if removal.kind == kind]


# -- what nothing names -----------------------------------------------------------------------------------------------


def test_what_a_tag_or_a_unit_reaches_stays_and_the_rest_goes(store: Store, work: Path) -> None:
    publish_version(store, work, "v1", 1)
    unit = put_unit_of(store, work, 2)
    stored_artifact(store, work, (3,))
    age(store)
    wanted = reached_by(store, "tiny:v1") | {file.blob for file in each_file(unit.artifact)}
    garbage = blobs_in(store) - wanted
    sizes = sum(store.blobs.size(digest) or 0 for digest in garbage)
    freed = collect(store, Policy())
    assert blobs_in(store) == wanted
    assert {name.rpartition("/")[2] for name in removed(freed, "blob")} == {digest[7:] for digest in garbage}
    assert freed.freed == sizes > 0
    assert find_unit(store, unit.key) == unit
    loads(store, "tiny:v1")


def test_a_dry_run_says_the_same_and_writes_nothing(store: Store, work: Path) -> None:
    publish_version(store, work, "v1", 1)
    publish_version(store, work, "v2", 2)
    stored_artifact(store, work, (3,))
    age(store)
    before = {path: path.lstat().st_ctime_ns for path in store.path.rglob("*")}
    policy = Policy(untag=True, keep=("tiny:v2",), keep_last=0, older_than=DAY, grace=0.0)
    said = collect(store, policy, dry_run=True)
    assert {path: path.lstat().st_ctime_ns for path in store.path.rglob("*")} == before
    done = collect(store, policy)
    assert said.removed == done.removed
    assert (said.kept, said.waiting, said.dry_run, done.dry_run) == (done.kept, done.waiting, True, False)
    assert [str(entry) for entry in store.tags()] == ["tiny:v2"]


def test_what_was_written_within_the_grace_period_waits(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work, (1,))
    freed = collect(store, Policy())
    assert freed.removed == ()
    assert freed.waiting == sum(file.blob_size for file in each_file(artifact))
    assert collect(store, Policy(grace=0.0)).freed == freed.waiting
    assert blobs_in(store) == set()


def test_a_reader_who_has_just_read_a_tag_has_the_grace_period(store: Store, work: Path) -> None:
    """The tag moves, and all of the old bundle is older than the grace period: its reader must still get every blob."""
    old = publish_version(store, work, "latest", 1)
    age(store)
    publish_version(store, work, "latest", 2)
    collect(store, Policy())
    loads(store, f"tiny@{old}")
    age(store)
    collect(store, Policy())
    with pytest.raises(NotFoundError):
        read_bundle(store, parse_reference(f"tiny@{old}"))


def test_a_reader_of_a_tag_that_gc_removes_has_the_grace_period_too(store: Store, work: Path) -> None:
    old = publish_version(store, work, "v1", 1)
    publish_version(store, work, "v2", 2)
    age(store)
    freed = collect(store, Policy(untag=True, keep_last=1))
    assert removed(freed, "tag") == ["tiny:v1"]
    assert freed.waiting > 0
    loads(store, f"tiny@{old}")
    age(store)
    assert collect(store, Policy()).freed == freed.waiting


def test_wanted_again_a_blob_is_spared_as_if_it_were_new(store: Store, work: Path) -> None:
    stored_artifact(store, work, (1,))
    age(store)
    again = stored_artifact(store, work, (1,))
    assert collect(store, Policy()).removed == ()
    publish(store, "tiny", "v1", [again], created=CREATED)


# -- tags -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def five_tags(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Of two models, published 100 days ago; only looked at."""
    work = tmp_path_factory.mktemp("five tags")
    store = Store.create(work / "store")
    for model, tag, version in (("a", "v1", 1), ("a", "v2", 2), ("a", "v3", 3), ("b", "prod", 1), ("b", "v1", 2)):
        publish_version(store, work, tag, version, model)
    age(store)
    return store


@pytest.mark.parametrize(
    ("policy", "left"),
    [
        (Policy(older_than=DAY), "a:v1 a:v2 a:v3 b:prod b:v1"),
        (Policy(max_size=0), "a:v1 a:v2 a:v3 b:prod b:v1"),
        (Policy(untag=True, keep_last=2), "a:v2 a:v3 b:prod b:v1"),
        (Policy(untag=True, keep_last=1), "a:v3 b:v1"),
        (Policy(untag=True, keep=("*:prod", "a:v1")), "a:v1 a:v3 b:prod b:v1"),
        (Policy(untag=True, keep=("*:prod",), keep_last=0), "b:prod"),
        (Policy(untag=True, older_than=DAY), "a:v3 b:v1"),
        (Policy(untag=True, older_than=DAY, keep_last=0), ""),
        (Policy(untag=True, older_than=200 * DAY, keep_last=0), "a:v1 a:v2 a:v3 b:prod b:v1"),
        (Policy(untag=True, max_size=0), "a:v3 b:v1"),
        (Policy(untag=True, max_size=0, keep=("a:*",), keep_last=0), "a:v1 a:v2 a:v3"),
        (Policy(untag=True, max_size=1 << 30), "a:v1 a:v2 a:v3 b:prod b:v1"),
    ],
)
def test_only_the_tags_go_that_a_rule_names(five_tags: Store, policy: Policy, left: str) -> None:
    gone = removed(collect(five_tags, policy, dry_run=True), "tag")
    assert [str(tag) for tag in five_tags.tags() if str(tag) not in gone] == left.split()
    assert len(gone) == 5 - len(left.split())


def test_published_again_a_tag_is_young_whatever_its_content_is(store: Store, work: Path) -> None:
    """An unchanged rebuild gives the same bundle with its old date: a nightly build must not lose its tag."""
    publish_version(store, work, "v1", 1)
    age(store)
    publish_version(store, work, "v1", 1)
    collect(store, Policy(untag=True, older_than=DAY, keep_last=0))
    assert [str(entry) for entry in store.tags()] == ["tiny:v1"]


def test_tags_of_one_bundle_count_as_one_version(store: Store, work: Path) -> None:
    for version in (1, 2):
        publish_version(store, work, f"v{version}", version)
    publish_version(store, work, "latest", 2)
    collect(store, Policy(untag=True, keep_last=2))
    assert [entry.tag for entry in store.tags()] == ["latest", "v1", "v2"]


def test_what_was_published_last_stays_however_old_it_is(store: Store, work: Path) -> None:
    """A release that was rolled back to is the newest one, whichever way it came."""
    old, other = publish_version(store, work, "v1", 1), Store.create(work / "other")
    publish_version(other, work, "v1", 1)
    bundle = store.resolve(parse_reference(f"tiny@{old}"))
    ways: dict[str, Callable[[], Any]] = {
        "built": lambda: publish_version(store, work, "built", 1),
        "tagged": lambda: store.set_tag("tiny", "tagged", bundle),
        "pushed": lambda: push(other, parse_reference("tiny:v1"), parse_reference(f"file://{store.path}#tiny:pushed")),
        "fetched": lambda: fetch_all(parse_reference(f"file://{other.path}#tiny:v1"), store.path, tag="fetched"),
    }
    for number, bring_back in enumerate(ways.values(), 1):
        publish_version(store, work, "v2", 2)
        assert tags_left(store, 1) == ["v2"]
        bring_back()
        assert tags_left(store, 1) == sorted(["v1", *list(ways)[:number]])
        age(store)
        assert tags_left(store, 1) == sorted(["v1", *list(ways)[:number]])


def tags_left(store: Store, count: int) -> list[str]:
    """Those that `--keep-last COUNT` would leave."""
    gone = removed(collect(store, Policy(untag=True, keep_last=count), dry_run=True), "tag")
    return [entry.tag for entry in store.tags() if str(entry) not in gone]


@pytest.mark.parametrize("says_when", [True, False])
def test_what_counts_is_when_a_tag_was_set_and_not_when_its_bundle_was_made(
    store: Store, work: Path, says_when: bool
) -> None:
    """As of a release whose units were all cached. Other tools write entries in any order and do not say when: then it
    is when the bundle came here."""
    for version in (3, 1, 2):
        digest = publish_version(store, work, f"v{version}", version)
        os.utime(store.blobs.path(digest), (LONG_AGO, LONG_AGO + (0 if says_when else version)))
    kept = [REF_NAME, PUBLISHED] if says_when else [REF_NAME]

    def copied(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**one, "annotations": {name: one["annotations"][name] for name in kept}} for one in entries[::-1]]

    change_entries(store, copied)
    last = ["v2", "v1", "v3"] if says_when else ["v3", "v2", "v1"]
    assert [tags_left(store, count) for count in (1, 2)] == [last[:1], sorted(last[:2])]


@pytest.mark.parametrize(
    "policy", [Policy(untag=True), Policy(keep=("a:*",)), Policy(keep_last=1), Policy(keep=("a:*",), older_than=1.0)]
)
def test_rules_that_nobody_can_mean_are_refused(store: Store, work: Path, policy: Policy) -> None:
    publish_version(store, work, "v1", 1)
    with pytest.raises(StoreError, match="--untag") as caught:
        collect(store, policy)
    assert caught.value.hint
    assert len(store.tags()) == 1


# -- units ------------------------------------------------------------------------------------------------------------


def test_units_go_by_when_they_were_last_used(store: Store, work: Path) -> None:
    old, used = put_unit_of(store, work, 1), put_unit_of(store, work, 2)
    age(store)
    assert use_unit(store, used.key) == used
    freed = collect(store, Policy(older_than=30 * DAY))
    assert removed(freed, "unit") == [f".aotc/units/{old.key[7:]}.json"]
    assert find_unit(store, old.key) is None
    assert find_unit(store, used.key) == used
    gone = {file.blob for file in each_file(old.artifact)} - {file.blob for file in each_file(used.artifact)}
    assert not gone & blobs_in(store)
    assert fsck(store.path).findings == ()


def test_a_size_limit_takes_the_least_recently_used_units_and_no_more_than_it_must(store: Store, work: Path) -> None:
    units = [put_unit_of(store, work, batch) for batch in (1, 2, 3)]
    for number, unit in enumerate(units):
        path = store.path / ".aotc" / "units" / f"{unit.key[7:]}.json"
        os.utime(path, (LONG_AGO + number, LONG_AGO + number))
    whole = collect(store, Policy(), dry_run=True).kept
    freed = collect(store, Policy(max_size=whole - 1, grace=0.0))
    assert removed(freed, "unit") == [f".aotc/units/{units[0].key[7:]}.json"]
    assert freed.over == 0
    assert freed.kept == collect(store, Policy(), dry_run=True).kept < whole


def test_a_limit_that_tags_exceed_says_by_how_much(store: Store, work: Path) -> None:
    publish_version(store, work, "v1", 1)
    size = sum(store.blobs.size(digest) or 0 for digest in blobs_in(store))
    freed = collect(store, Policy(max_size=100))
    assert (freed.kept, freed.over) == (size, size - 100)


def test_a_unit_whose_blobs_a_tag_needs_frees_nothing_and_stays(store: Store, work: Path) -> None:
    unit = put_unit_of(store, work, 1)
    publish(store, "tiny", "v1", [unit.artifact], created=CREATED)
    age(store)
    assert removed(collect(store, Policy(max_size=0)), "unit") == []
    assert find_unit(store, unit.key) == unit


# -- what cannot be followed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "corrupt"])
@pytest.mark.parametrize("which", ["bundle", "manifest"])
def test_a_tag_that_cannot_be_followed_stops_gc_before_anything_is_removed(
    store: Store, work: Path, which: str, damage: str
) -> None:
    digest = publish_version(store, work, "v1", 1)
    if which == "manifest":
        digest = read_bundle(store, parse_reference("tiny:v1")).artifacts[0].digest
    path = store.blobs.path(digest)
    path.unlink() if damage == "missing" else path.write_bytes(b"{}")
    age(store)
    before = blobs_in(store)
    with pytest.raises((NotFoundError, CorruptError)) as caught:
        collect(store, Policy())
    assert "aotc fsck" in caught.value.hint
    assert blobs_in(store) == before


def test_a_tag_that_cannot_be_followed_may_be_removed(store: Store, work: Path) -> None:
    store.blobs.path(publish_version(store, work, "v1", 1)).write_bytes(b"{}")
    publish_version(store, work, "v2", 2)
    assert removed(collect(store, Policy(untag=True, keep_last=1)), "tag") == ["tiny:v1"]


def test_without_its_index_nothing_of_a_store_is_garbage(store: Store, work: Path) -> None:
    publish_version(store, work, "v1", 1)
    age(store)
    (store.path / "index.json").unlink()
    before = blobs_in(store)
    with pytest.raises(CorruptError, match=r"no index\.json"):
        collect(store, Policy(grace=0.0))
    assert blobs_in(store) == before


# -- other tools' entries ---------------------------------------------------------------------------------------------


def put_manifest(store: Store, payload: bytes) -> dict[str, Any]:
    """An image manifest with a config and a layer, as other tools write them; its descriptor."""
    config, layer = store.blobs.put_bytes(b"config of " + payload), store.blobs.put_bytes(payload)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": "application/x.config", "digest": config.digest, "size": config.size},
        "layers": [{"mediaType": "application/x.layer", "digest": layer.digest, "size": layer.size}],
    }
    blob = store.blobs.put_bytes(canonical_json(manifest))
    return {"mediaType": MANIFEST, "digest": blob.digest, "size": blob.size}


def add_entry(store: Store, descriptor: dict[str, Any], name: str) -> None:
    change_entries(store, lambda entries: [*entries, {**descriptor, "annotations": {REF_NAME: name}}])


def names_in(store: Store) -> list[str]:
    return [entry.annotation(REF_NAME) for entry in store.entries()]


def test_entries_of_other_tools_keep_what_they_reach(store: Store) -> None:
    add_entry(store, put_manifest(store, b"an image"), "image:latest")
    nested = canonical_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": [put_manifest(store, b"nested")]})
    blob = store.blobs.put_bytes(nested)
    add_entry(store, {"mediaType": INDEX, "digest": blob.digest, "size": blob.size}, "some-index")
    store.blobs.put_bytes(b"garbage")
    age(store)
    freed = collect(store, Policy(untag=True, keep_last=0, older_than=0.0))
    assert removed(freed, "tag") == []
    assert [name[-64:] for name in removed(freed, "blob")] == [sha256_bytes(b"garbage")[7:]]


@pytest.mark.parametrize("name", ["sha256-{hex}.sig", "tiny:sha256-{hex}.sig", "sha256-{hex}.att", "sha256-{hex}"])
def test_a_signature_lives_as_long_as_what_it_signs(store: Store, work: Path, name: str) -> None:
    signed = publish_version(store, work, "v1", 1)
    publish_version(store, work, "v2", 2)
    signature = put_manifest(store, b"signature")
    add_entry(store, signature, name.format(hex=signed[7:]))
    of_signature = put_manifest(store, b"signature of the signature")
    add_entry(store, of_signature, f"sha256-{signature['digest'][7:]}.sig")
    age(store)
    assert collect(store, Policy()).removed == ()
    collect(store, Policy(untag=True, keep=("tiny:v2",), keep_last=0))
    assert len(names_in(store)) == 3  # the bundle waits for its readers, and its signatures with it
    age(store)
    freed = collect(store, Policy(grace=0.0))
    assert len(removed(freed, "attachment")) == 2
    assert names_in(store) == ["tiny:v2"]
    assert fsck(store.path).findings == ()


def test_a_bundle_s_tag_may_look_like_a_signature_s_name(store: Store, work: Path) -> None:
    for tag in ("sha256-" + "0" * 64, "sha256-" + "1" * 64 + ".v1"):
        publish_version(store, work, tag, 1)
    age(store)
    assert [removal.name for removal in collect(store, Policy()).removed if removal.kind == "attachment"] == []
    assert len(loads(store, "tiny:sha256-" + "1" * 64 + ".v1").variants) == 1


def test_a_signature_that_came_before_its_bundle_waits_for_it(store: Store) -> None:
    add_entry(store, put_manifest(store, b"signature"), f"sha256-{'0' * 64}.sig")
    assert collect(store, Policy()).removed == ()
    age(store)
    assert len(removed(collect(store, Policy()), "attachment")) == 1


# -- bundles of which a store has a part -------------------------------------------------------------------------------


def publish_part(store: Store, work: Path) -> tuple[str, str]:
    """A bundle of two artifacts of which the store lacks one; the digests of the two manifests."""
    artifacts = [stored_artifact(store, work, (batch,), target=target) for batch, target in ((1, "a"), (2, "b"))]
    publish(store, "tiny", "v1", artifacts, created=CREATED)
    here, absent = (entry.digest for entry in read_bundle(store, parse_reference("tiny:v1")).artifacts)
    manifest = json.loads(store.blobs.read(absent, 1 << 20))
    for digest in (absent, manifest["config"]["digest"], manifest["layers"][0]["digest"]):
        store.blobs.path(digest).unlink()
    change_entries(store, lambda entries: [{**e, "annotations": {**e["annotations"], SPARSE: "true"}} for e in entries])
    age(store)
    return here, absent


def test_of_a_sparse_bundle_artifacts_may_be_absent_but_not_in_part(store: Store, work: Path) -> None:
    here, absent = publish_part(store, work)
    assert [one for one in fsck(store.path).findings if one.kind != "unreferenced"] == []
    wanted = {file.blob for file in each_file(read_artifact(store, here))}
    collect(store, Policy())
    assert wanted < blobs_in(store)
    assert fsck(store.path).findings == ()
    store.blobs.path(min(wanted)).unlink()
    assert {one.kind for one in fsck(store.path).errors} == {"blob missing", "tag"}
    (store.path / "index.json").unlink()
    fsck(store.path, repair=True)
    assert [entry.annotation(SPARSE) for entry in store.entries()] == ["true"]
    (entry,) = store.tags()
    store.set_tag("tiny", "whole", store.resolve(parse_reference(f"tiny@{entry.digest}")))
    assert absent in {one.digest for one in fsck(store.path).errors}


# -- running writers --------------------------------------------------------------------------------------------------


WRITER = """
import os, sys, time
from pathlib import Path
from sample_artifacts import CREATED, stored_artifact
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import use_unit
store = Store.open(sys.argv[1])
with store.writing("a test"):
    artifact = stored_artifact(store, Path(sys.argv[2]), (7,))
    if len(sys.argv) > 3:
        artifact = use_unit(store, sys.argv[3]).artifact
    print("written", flush=True)
    sys.stdin.readline()
    publish(store, "tiny", "slow", [artifact], created=CREATED)
"""


class Writer:
    """A process that has written its blobs and waits before it publishes them."""

    def __init__(self, store: Store, work: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store.path), str(work), *arguments],
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "written\n"

    def finish(self) -> int:
        self.process.communicate("\n", timeout=60)
        return self.process.returncode


@pytest.fixture
def writers(store: Store, work: Path) -> Iterator[list[Writer]]:
    started: list[Writer] = []
    yield started
    for writer in started:
        writer.process.kill()
        writer.process.communicate()


def test_what_a_running_writer_has_written_stays_whatever_the_grace_period(
    store: Store, work: Path, writers: list[Writer]
) -> None:
    writers.append(Writer(store, work))
    freed = collect(store, Policy(grace=0.0, older_than=0.0))
    assert removed(freed, "blob") == []
    assert freed.waiting > 0
    assert len(freed.writers) == 1
    assert f"a test, process {writers[0].process.pid} on " in freed.writers[0]
    assert writers[0].finish() == 0
    loads(store, "tiny:slow")


def test_a_unit_that_a_running_build_uses_stays(store: Store, work: Path, writers: list[Writer]) -> None:
    unit, other = put_unit_of(store, work, 1), put_unit_of(store, work, 2)
    age(store)
    writers.append(Writer(store, work, unit.key))
    freed = collect(store, Policy(grace=0.0, older_than=0.0, max_size=0))
    assert removed(freed, "unit") == [f".aotc/units/{other.key[7:]}.json"]
    assert writers[0].finish() == 0
    assert loads(store, "tiny:slow").variants[0].files == unit.artifact.variants[0].files


def test_a_killed_writer_is_no_writer(store: Store, work: Path, writers: list[Writer]) -> None:
    writers.append(Writer(store, work))
    writers[0].process.kill()
    writers[0].process.wait()
    freed = collect(store, Policy(grace=0.0))
    assert freed.writers == ()
    assert len(removed(freed, "lock")) == 1
    assert removed(freed, "blob")
    assert list((store.path / ".aotc" / "writers").iterdir()) == []


def test_a_lease_that_cannot_be_read_is_a_running_writer_s(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another user's, of whose process nobody can tell whether it runs."""
    with store.writing("aotc build"):
        artifact = stored_artifact(store, work, (1,))
        (lease,) = (store.path / ".aotc" / "writers").iterdir()
        opened = os.open

        def refuse(path: Any, *arguments: Any, **options: Any) -> int:
            if Path(path) == lease:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return opened(path, *arguments, **options)

        monkeypatch.setattr(os, "open", refuse)
        freed = collect(store, Policy(grace=0.0))
        monkeypatch.undo()
    assert freed.removed == ()
    assert freed.writers == ("another aotc process",)
    assert {file.blob for file in each_file(artifact)} <= blobs_in(store)


def test_what_a_writer_writes_after_the_clock_was_set_back_stays(store: Store, work: Path) -> None:
    with store.writing("aotc build"):
        (lease,) = (store.path / ".aotc" / "writers").iterdir()
        artifact = stored_artifact(store, work, (1,))
        age(store, time.time() - DAY / 2)
        os.utime(lease, (time.time() + DAY, time.time() + DAY))
        assert collect(store, Policy()).removed == ()
        assert {file.blob for file in each_file(artifact)} <= blobs_in(store)
    assert removed(collect(store, Policy()), "blob")


ODD: dict[str, Callable[[Path], Any]] = {
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to a folder": lambda path: path.symlink_to("/usr"),
    "a folder": lambda path: (path.mkdir(), (path / "his").write_text("his own")),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_file_where_files_are_expected_stops_nothing(store: Store, work: Path, odd: str) -> None:
    publish_version(store, work, "v1", 1)
    places = [
        f"blobs/sha256/{64 * '0'}",
        "blobs/sha256/.tmp-0123456789abcdef",
        f".aotc/units/{64 * '0'}.json",
        f".aotc/units/{64 * '0'}.lock",
        ".aotc/writers/0123456789abcdef",
        ".aotc/logs/old.log",
        ".tmp-0123456789abcdef",
    ]
    for path in (store.path / place for place in places):
        path.parent.mkdir(exist_ok=True)
        ODD[odd](path)
    for policy in (Policy(), Policy(grace=0.0, older_than=0.0)):
        within_seconds(lambda policy=policy: collect(store, policy))  # type: ignore[misc]
    within_seconds(lambda: fsck(store.path))
    within_seconds(lambda: unit_costs(store))
    assert find_unit(store, "sha256:" + 64 * "0") is None
    assert odd != "a folder" or all((store.path / place / "his").read_text() == "his own" for place in places)
    assert Path("/usr/bin").is_dir()
    loads(store, "tiny:v1")


TEMPORARIES = {f".tmp-{'0' * 16}", f".tmp-{'0' * 64}"}
OURS = {
    "": TEMPORARIES,
    "blobs": TEMPORARIES,
    "blobs/sha256": {"0" * 64, *TEMPORARIES},
    ".aotc": TEMPORARIES,
    ".aotc/writers": {"0" * 16, *TEMPORARIES},
    ".aotc/units": {f"{'0' * 64}.json", f"{'0' * 64}.lock", *TEMPORARIES},
    ".aotc/plans": TEMPORARIES,
    ".aotc/logs": {"old.log", *TEMPORARIES},
}
"""The names in each folder under which aotc leaves something that may go."""
OTHERS = {"thesis.txt", "notes.lock", ".tmp-mine", "0" * 15, f"{'0' * 63}g.json"}
NAMES = OTHERS.union(*OURS.values())


def test_what_has_another_name_than_aotc_gives_there_stays(store: Store) -> None:
    for folder in (store.path / inner for inner in OURS):
        folder.mkdir(exist_ok=True)
        for path in (folder / name for name in NAMES):
            path.write_text("precious")
            os.utime(path, (LONG_AGO, LONG_AGO))
    fsck(store.path, repair=True)
    collect(store, Policy(grace=0.0, older_than=0.0))
    left = {inner: {name for name in NAMES if (store.path / inner / name).exists()} for inner in OURS}
    assert left == {inner: NAMES - ours for inner, ours in OURS.items()}


def test_a_folder_that_becomes_a_link_while_gc_runs_is_not_followed(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stray = store.blobs.put_bytes(b"nobody's")
    his = work / "his"
    his.mkdir()
    (his / stray.digest[7:]).write_text("precious")
    folder = store.blobs.folder / "sha256"

    def swap() -> None:
        folder.rename(work / "moved")
        folder.symlink_to(his)

    remove_file = gc.remove_file
    monkeypatch.setattr(gc, "remove_file", lambda root, path: (swap(), remove_file(root, path)))
    with pytest.raises(StoreError, match="cannot remove"):
        collect(store, Policy(grace=0.0))
    assert (his / stray.digest[7:]).read_text() == "precious"


def within_seconds(function: Callable[[], Any]) -> None:
    """A process that opens a pipe with no writer waits for ever."""

    def give_up(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    try:
        function()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_blob_or_unit_that_is_a_link_is_as_young_as_what_it_leads_to(store: Store, work: Path) -> None:
    """Using one again sets the time of what the link leads to."""
    unit = put_unit_of(store, work, 1)
    blob = store.blobs.path(next(each_file(unit.artifact)).blob)
    record = store.path / ".aotc" / "units" / f"{unit.key[7:]}.json"
    for path in (blob, record):
        elsewhere = path.rename(work / path.name)
        path.symlink_to(elsewhere)
        os.utime(path, (LONG_AGO, LONG_AGO), follow_symlinks=False)
    assert removed(collect(store, Policy(older_than=DAY)), "unit") == []
    age(store)
    assert use_unit(store, unit.key) == unit
    assert removed(collect(store, Policy(older_than=DAY)), "unit") == []
    record.unlink()
    assert store.blobs.keep(f"sha256:{blob.name}", blob.stat().st_size)
    collect(store, Policy())
    assert blob.exists()


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_removed_behind_a_link(store: Store, work: Path, folder: str) -> None:
    """Files that have the names of aotc's own, in a folder that is another store's, or no store's."""
    publish_version(store, work, "v1", 1)
    other = Store.create(work / "other")
    shutil.rmtree(other.path / folder, ignore_errors=True)
    (store.path / folder).mkdir(exist_ok=True)
    (other.path / folder).parent.mkdir(exist_ok=True)
    (other.path / folder).symlink_to(store.path / folder)
    his = [(store.path / folder / name) for name in NAMES]
    for path in his:
        path.write_text("{}")
        os.utime(path, (LONG_AGO, LONG_AGO))
    for policy in (Policy(grace=0.0), Policy(grace=0.0, older_than=0.0)):
        with pytest.raises(StoreError, match=f"{folder} is a link to {store.path / folder}"):
            collect(other, policy)
    with pytest.raises(StoreError, match=f"{folder} is a link to {store.path / folder}"):
        fsck(other.path, repair=True)
    assert folder in {one.path for one in fsck(other.path).findings if one.kind == "foreign file"}
    assert all(path.exists() for path in his)
    for path in his:
        path.unlink()
    loads(store, "tiny:v1")
    linked = work / "linked"
    linked.symlink_to(store.path)
    collect(Store.open(linked), Policy(grace=0.0))
    loads(store, "tiny:v1")


def test_gc_waits_for_who_is_just_naming_blobs_and_says_who(store: Store) -> None:
    with store.writing("a slow one"), store.sharing(), pytest.raises(StoreError, match="not free within 0") as caught:
        collect(store, Policy(), timeout=0.0)
    assert f"a slow one, process {os.getpid()} on " in str(caught.value)


def test_publishing_waits_for_gc(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotc.store.layout.store.GC_TIMEOUT", 0.1)
    artifact = stored_artifact(store, work, (1,))
    with store.alone(1.0), pytest.raises(StoreError, match=rf"not free within 0\.1 s; process {os.getpid()}"):
        publish(store, "tiny", "v1", [artifact], created=CREATED)
    publish(store, "tiny", "v1", [artifact], created=CREATED)


STRESS = """
import random, sys, time
from pathlib import Path
from sample_artifacts import CREATED, stored_artifact
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
store, work, end = Store.open(sys.argv[1]), Path(sys.argv[2]), time.monotonic() + 1.5
work.mkdir()
count = 0
while time.monotonic() < end:
    with store.writing("stress"):
        artifact = stored_artifact(store, work, (random.randrange(5), 5 + random.randrange(5)))
        time.sleep(random.random() / 100)
        publish(store, "tiny", work.name, [artifact], created=CREATED)
    (entry,) = read_bundle(store, Reference(None, "tiny", tag=work.name)).artifacts
    for file in each_file(read_artifact(store, entry.digest)):
        store.blobs.verify(file)
    count += 1
print(count)
"""


def test_writers_and_gc_at_once_lose_nothing(store: Store, tmp_path: Path) -> None:
    """Four writers that share blobs, and gc without a grace period over and over: every publication is whole."""
    processes = [python(STRESS, store.path, tmp_path / f"w{number}") for number in range(4)]
    freed = 0
    while any(process.poll() is None for process in processes):
        freed += collect(store, Policy(grace=0.0)).freed
        report = fsck(store.path)
        assert report.errors == []
    counts = [int(finish(process)) for process in processes]
    assert min(counts) > 1
    assert freed > 0
    for number in range(4):
        loads(store, f"tiny:w{number}")


# -- what killed processes leave --------------------------------------------------------------------------------------


def test_temporaries_go_when_their_writer_is_dead(store: Store) -> None:
    dead = store.path / "blobs" / "sha256" / ".tmp-0000000000000000"
    alive = store.path / ".tmp-0101010101010101"
    for path in (dead, alive):
        path.write_bytes(b"half")
    with alive.open("rb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        freed = collect(store, Policy())
        assert removed(freed, "temporary") == ["blobs/sha256/.tmp-0000000000000000"]
        assert alive.exists()
    assert removed(collect(store, Policy()), "temporary") == [".tmp-0101010101010101"]


def test_work_folders_go_when_their_build_is_dead(store: Store, temporary: Path) -> None:
    dead, alive, young, foreign = (
        temporary / name
        for name in ("aotc-build-abcdefgh", "aotc-build-01234567", "aotc-build-zzzzzzzz", "aotc-build-x")
    )
    for path in (dead, alive, young, foreign):
        path.mkdir()
        (path / "file").write_bytes(b"x" * 100)
        if path != young:
            os.utime(path, (LONG_AGO, LONG_AGO))
    descriptor = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        freed = collect(store, Policy())
    finally:
        os.close(descriptor)
    assert [(one.kind, one.name, one.size) for one in freed.removed] == [("work folder", str(dead), 100)]
    assert {path.name for path in temporary.iterdir()} == {alive.name, young.name, foreign.name}


def test_logs_and_locks_of_units_go_with_age(store: Store, work: Path) -> None:
    unit = put_unit_of(store, work, 1)
    units, logs = store.path / ".aotc" / "units", store.path / ".aotc" / "logs"
    lock, log = units / f"{unit.key[7:]}.lock", logs / "a.log"
    logs.mkdir()
    lock.touch()
    log.write_text("old")
    age(store)
    assert collect(store, Policy()).removed == ()
    freed = collect(store, Policy(older_than=DAY))
    assert removed(freed, "log") == [".aotc/logs/a.log"]
    assert removed(freed, "lock") == [f".aotc/units/{lock.name}"]
    assert list(units.iterdir()) == list(logs.iterdir()) == []


# -- amounts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"), [("0", 0), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("30d", 2592000), ("2 w", 1209600)]
)
def test_ages(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096B", 4096), ("5B", 5), ("1KiB", 1024), ("20gib", 20 << 30), ("2.5GB", 25 * 10**8)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_without_a_unit_is_refused() -> None:
    with pytest.raises(StoreError, match="'20' is not a size"):
        parse_size("20")


@pytest.mark.parametrize("text", ["", "x", "30", "-1d", "1y", "1 d d", "1e3d"])
def test_what_is_no_age_is_refused_with_examples(text: str) -> None:
    with pytest.raises(StoreError, match="is not an age") as caught:
        parse_age(text)
    assert "30d" in caught.value.hint


def test_a_bundle_by_its_digest_can_be_tagged_again_until_it_is_gone(store: Store, work: Path) -> None:
    old = publish_version(store, work, "v1", 1)
    publish_version(store, work, "v1", 2)
    age(store)
    store.set_tag("tiny", "again", store.resolve(Reference(None, "tiny", digest=old)))
    collect(store, Policy())
    loads(store, "tiny:again")
