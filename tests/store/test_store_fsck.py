"""`aotc fsck`: every kind of damage is found and named, and repairs touch only what cannot be right."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_artifacts import (
    CREATED,
    finish,
    library_bytes,
    make_artifact,
    make_variant,
    put_file,
    python,
    stored_artifact,
)

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import NotFoundError, StoreError
from aotc.records import Artifact
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, find_unit, put_unit
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.reports import Finding, FsckReport
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import parse_reference

KEY = sha256_bytes(b"a key")


@pytest.fixture
def artifact(store: Store, work: Path) -> Artifact:
    """Published as tiny:v1, and the blobs of a unit beside it."""
    artifact = stored_artifact(store, work)
    publish(store, "tiny", "v1", [artifact], created=CREATED)
    put_unit(store, UnitRecord(KEY, {}, stored_artifact(store, work, (3,)), 1.0, CREATED))
    assert fsck(store.path).findings == ()
    return artifact


def found(report: FsckReport) -> list[tuple[str, str, str]]:
    return [(one.kind, one.severity, one.path) for one in report.findings]


def blob(store: Store, digest: str) -> tuple[Path, str]:
    return store.blobs.path(digest), f"blobs/sha256/{digest[7:]}"


def only(report: FsckReport, kind: str) -> Finding:
    (finding,) = (one for one in report.findings if one.kind == kind)
    return finding


def unit_path(store: Store) -> Path:
    return store.path / ".aotc" / "units" / f"{KEY[7:]}.json"


# -- what is all right ------------------------------------------------------------------------------------------------


def test_a_store_as_it_is_made_is_clean_and_every_byte_is_read(store: Store, artifact: Artifact) -> None:
    report = fsck(store.path)
    paths = list((store.path / "blobs" / "sha256").iterdir())
    assert (report.findings, report.repairs, report.blobs) == ((), (), len(paths))
    assert report.size == sum(path.stat().st_size for path in paths)


def test_an_empty_store_is_clean(store: Store) -> None:
    assert fsck(store.path).findings == ()


def test_what_nothing_names_is_garbage_and_no_error(store: Store, artifact: Artifact) -> None:
    extra = store.blobs.put_bytes(b"nobody wants this")
    report = fsck(store.path)
    assert found(report) == [("unreferenced", "garbage", blob(store, extra.digest)[1])]
    assert report.findings[0].size == 17
    assert report.errors == []
    assert fsck(store.path, repair=True).repairs == ()


def test_entries_of_other_tools_are_no_findings(store: Store, artifact: Artifact) -> None:
    path = store.path / "index.json"
    index = json.loads(path.read_bytes())
    layer = store.blobs.put_bytes(b"no frame of zstd")
    config = store.blobs.put_bytes(b"{}")
    manifest = store.blobs.put_bytes(
        canonical_json(
            {
                "schemaVersion": 2,
                "config": {"mediaType": "x", "digest": config.digest, "size": 2},
                "layers": [{"mediaType": "y", "digest": layer.digest, "size": layer.size}],
            }
        )
    )
    entry = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "digest": manifest.digest,
        "size": manifest.size,
    }
    index["manifests"].append({**entry, "annotations": {"org.opencontainers.image.ref.name": "nginx:latest"}})
    path.write_bytes(canonical_json(index))
    assert fsck(store.path).findings == ()


@pytest.mark.parametrize(
    "left", [(), (".aotc",), (".aotc", "blobs"), (".aotc", "blobs", "blobs/sha256", f".tmp-{16 * '0'}")]
)
def test_a_creation_that_was_killed_is_unfinished_and_no_error(tmp_path: Path, left: tuple[str, ...]) -> None:
    path = tmp_path / "new"
    path.mkdir()
    for name in left:
        (path / name).touch() if name.startswith(".tmp") else (path / name).mkdir()
    if not left:
        with pytest.raises(StoreError):
            fsck(path)
        return
    report = fsck(path)
    assert report.errors == []
    assert "unfinished" in {one.kind for one in report.findings}
    collect(Store.create(path), Policy())
    assert fsck(path).findings == ()


def test_where_there_is_no_store_fsck_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store"):
        fsck(tmp_path / "absent")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(StoreError, match="has no file oci-layout"):
        fsck(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


# -- damaged blobs ----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "changed": ("blob corrupt", flip),
    "truncated": ("blob corrupt", lambda path: os.truncate(path, 5)),
    "emptied": ("blob corrupt", lambda path: os.truncate(path, 0)),
    "grown": ("blob corrupt", lambda path: path.write_bytes(path.read_bytes() + b"x")),
    "missing": ("blob missing", lambda path: path.unlink()),
    "a folder": ("blob missing", lambda path: (path.unlink(), path.mkdir())),
    "a pipe": ("blob missing", lambda path: (path.unlink(), os.mkfifo(path))),
    "a link to nothing": ("blob missing", lambda path: (path.unlink(), path.symlink_to("nothing"))),
}


@pytest.mark.parametrize(
    ("name", "which"),
    [*((name, "file") for name in DAMAGE), *(("changed", one) for one in ("bundle", "manifest", "config"))],
)
def test_a_damaged_blob_is_found_with_who_needs_it(store: Store, artifact: Artifact, name: str, which: str) -> None:
    bundle = read_bundle(store, parse_reference("tiny:v1"))
    manifest = json.loads(store.blobs.read(bundle.artifacts[0].digest, 1 << 20))
    digest = {
        "bundle": bundle.digest,
        "manifest": bundle.artifacts[0].digest,
        "config": manifest["config"]["digest"],
        "file": artifact.variants[0].files[0].blob,
    }[which]
    path, where = blob(store, digest)
    kind, damage = DAMAGE[name]
    damage(path)
    report = fsck(store.path)
    finding = only(report, kind)
    assert (finding.path, finding.digest, finding.severity) == (where, digest, "error")
    assert "tiny:v1" in finding.needed_by
    assert only(report, "tag").path == "tiny:v1"


def test_sizes_and_digests_that_differ_are_both_told(store: Store, artifact: Artifact) -> None:
    file = artifact.variants[0].files[0]
    path, _ = blob(store, file.blob)
    os.truncate(path, 5)
    assert f"(5 instead of {file.blob_size})" in only(fsck(store.path), "blob corrupt").message
    path.write_bytes(b"x" * file.blob_size)
    finding = only(fsck(store.path), "blob corrupt")
    assert (finding.expected, finding.actual) == (file.blob, sha256_bytes(b"x" * file.blob_size))


@pytest.mark.parametrize(
    "lie", [{"digest": sha256_bytes(b"other")}, {"size": 3}, {"size": 10**6}], ids=["digest", "smaller", "larger"]
)
def test_a_blob_that_decompresses_to_other_bytes_is_found(store: Store, work: Path, lie: dict[str, Any]) -> None:
    file = msgspec.structs.replace(put_file(store, work, "model.so", library_bytes(1)), **lie)
    publish(store, "tiny", "v1", [make_artifact((make_variant((file,)),))], created=CREATED)
    finding = only(fsck(store.path), "blob content")
    assert (finding.digest, finding.severity) == (file.blob, "error")
    assert finding.expected != finding.actual
    fsck(store.path, repair=True)
    assert store.blobs.has(file.blob, file.blob_size)  # the blob is what its name says


def test_many_findings_come_at_once(store: Store, artifact: Artifact) -> None:
    first, second = (variant.files[0].blob for variant in artifact.variants)
    flip(blob(store, first)[0])
    blob(store, second)[0].unlink()
    unit_path(store).write_bytes(b"{")
    (store.path / "README").write_text("hello")
    kinds = {one.kind for one in fsck(store.path).findings}
    assert kinds >= {"blob corrupt", "blob missing", "tag", "unit", "foreign file"}


# -- names ------------------------------------------------------------------------------------------------------------


def test_two_bundles_under_one_tag_are_an_error_that_is_not_repaired(store: Store, work: Path) -> None:
    for tag, batch in (("v1", 1), ("v2", 2)):
        publish(store, "tiny", tag, [stored_artifact(store, work, (batch,))], created=CREATED)
    path = store.path / "index.json"
    path.write_bytes(path.read_bytes().replace(b"tiny:v2", b"tiny:v1"))
    assert found(fsck(store.path)) == [("tag", "error", "tiny:v1")]
    report = fsck(store.path, repair=True)
    assert (found(report), report.repairs) == ([("tag", "error", "tiny:v1")], ())
    assert report.findings[0].actual == "2 bundles"


def rewrite_record(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    """Publish a record that only `publish` would have refused: its digests are all right."""
    bundle = json.loads((store.path / "index.json").read_bytes())["manifests"][0]
    index = json.loads(store.blobs.read(bundle["digest"], 1 << 20))
    manifest = json.loads(store.blobs.read(index["manifests"][0]["digest"], 1 << 20))
    record = json.loads(store.blobs.read(manifest["config"]["digest"], 1 << 20))
    change(record)
    config = store.blobs.put_bytes(canonical_json(record))
    manifest["config"].update(digest=config.digest, size=config.size)
    blob = store.blobs.put_bytes(canonical_json(manifest))
    index["manifests"][0].update(digest=blob.digest, size=blob.size)
    blob = store.blobs.put_bytes(canonical_json(index))
    bundle.update(digest=blob.digest, size=blob.size)
    (store.path / "index.json").write_bytes(canonical_json({"schemaVersion": 2, "manifests": [bundle]}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: record.update(unknown=1), "unknown"),
        (lambda record: record.pop("model"), "model"),
        (lambda record: record.update(schema=9), "schema 9"),
        (lambda record: record["variants"][0].update(library="absent.so"), "absent.so"),
        (lambda record: record["variants"][0]["files"][0].update(name="../x"), "not safe"),
        (lambda record: record["variants"][0]["files"][0].update(blob=sha256_bytes(b"x")), "not a layer"),
    ],
)
def test_a_record_that_cannot_be_used_is_found(
    store: Store, artifact: Artifact, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    rewrite_record(store, change)
    (finding,) = (one for one in fsck(store.path).findings if one.path == "tiny:v1")
    assert finding.kind == ("version" if message in ("schema 9", "unknown") else "tag")
    assert message in finding.message
    assert finding.severity == ("warning" if finding.kind == "version" else "error")


@pytest.mark.parametrize("name", ["oci-layout", "index.json"])
@pytest.mark.parametrize("data", [None, b"", b"garbage", b"[]"])
def test_an_unreadable_layout_or_index_is_found(
    store: Store, artifact: Artifact, name: str, data: bytes | None
) -> None:
    path = store.path / name
    path.unlink() if data is None else path.write_bytes(data)
    report = fsck(store.path)
    assert ("layout" if name == "oci-layout" else "index", "error", name) in found(report)
    assert not [one for one in report.findings if one.kind == "unreferenced"]


@pytest.mark.parametrize(
    ("name", "data"),
    [("oci-layout", b'{"imageLayoutVersion":"2.0.0"}'), ("index.json", b'{"schemaVersion":3,"manifests":[]}')],
)
def test_another_version_is_told_and_never_repaired(store: Store, artifact: Artifact, name: str, data: bytes) -> None:
    (store.path / name).write_bytes(data)
    report = fsck(store.path, repair=True)
    finding = only(report, "version")
    assert {finding.expected, finding.actual} & {"1.0.0", "2"}
    assert (store.path / name).read_bytes() == data
    assert report.repairs == ()


# -- units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        lambda good: b"",
        lambda good: good[:-1],
        lambda good: good.replace(KEY.encode(), sha256_bytes(b"another").encode()),
        lambda good: good.replace(b'"model.so"', b'"../x.so"'),
    ],
)
def test_a_unit_that_cannot_be_used_is_found_and_repaired(
    store: Store, artifact: Artifact, data: Callable[[bytes], bytes]
) -> None:
    path = unit_path(store)
    path.write_bytes(data(path.read_bytes()))
    name = str(path.relative_to(store.path))
    assert ("unit", "error", name) in found(fsck(store.path))
    report = fsck(store.path, repair=True)
    assert [one.path for one in report.repairs] == [name]
    assert report.errors == []
    assert not path.exists()


def test_a_unit_of_another_schema_is_left_alone(store: Store, artifact: Artifact) -> None:
    path = unit_path(store)
    record = json.loads(path.read_bytes())
    record["artifact"] = {"schema": 3, "news": True}
    path.write_bytes(canonical_json(record))
    report = fsck(store.path, repair=True)
    assert (only(report, "version").severity, report.errors, report.repairs) == ("warning", [], ())


# -- what else is there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "blobs/sha512",
        "blobs/sha256/short",
        ".aotc/thing",
        ".aotc/units/thing.json",
        f"blobs/sha256/{'F' * 64}",
    ],
)
def test_unknown_files_are_warnings_and_stay(store: Store, artifact: Artifact, name: str) -> None:
    (store.path / name).write_text("?")
    assert found(fsck(store.path, repair=True)) == [("foreign file", "warning", name)]
    assert (store.path / name).exists()


HOLDING = """
import sys, time
from aotc.store.layout.store import Store
from aotc.store.files.writing import draft
store = Store.open(sys.argv[1])
with store.writing("a test"), draft(store.path / "blobs" / "sha256") as temporary, store.lock():
    temporary.stream.write(b"half")
    temporary.stream.flush()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_live_temporaries_and_locks_are_no_findings_and_dead_ones_are_garbage(store: Store) -> None:
    process = python(HOLDING, store.path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        assert fsck(store.path).findings == ()
        assert fsck(store.path, repair=True).repairs == ()
    finally:
        process.kill()
        process.wait()
    report = fsck(store.path)
    assert [one.kind for one in report.findings] == ["leftover", "leftover"]
    assert report.errors == []
    collect(store, Policy(grace=0.0))
    assert fsck(store.path).findings == ()


def test_a_folder_where_a_file_should_be_stays_and_the_rest_is_repaired(store: Store, artifact: Artifact) -> None:
    """Somebody's, whatever it is called; gc goes on beside it, too."""
    odd = [store.path / name for name in (".tmp-mine", ".aotc/.tmp-mine", "blobs/sha256/.tmp-mine")]
    odd += [store.path / ".aotc" / "index.lock.holder", unit_path(store).with_stem("f" * 64)]
    for folder in odd:
        folder.mkdir()
        (folder / "notes").touch()
    flip(blob(store, artifact.variants[0].files[1].blob)[0])
    report = fsck(store.path, repair=True)
    assert "blob corrupt" not in {one.kind for one in report.findings}
    names = {one.path for one in report.findings if one.kind == "foreign file"}
    assert names == {str(folder.relative_to(store.path)) for folder in odd}
    shutil.rmtree(odd.pop(3))
    collect(store, Policy())
    assert all((folder / "notes").exists() for folder in odd)


def test_fsck_reads_a_store_that_it_cannot_lock(
    store: Store, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("fcntl.flock", refuse)
    assert fsck(store.path).errors == []
    with pytest.raises(StoreError, match="Read-only"):
        fsck(store.path, repair=True)


# -- repairs ----------------------------------------------------------------------------------------------------------


def test_a_repaired_blob_is_written_again_by_the_next_build(store: Store, work: Path, artifact: Artifact) -> None:
    """A blob of the right size and other bytes would be taken for the right one."""
    shared = artifact.variants[0].files[1]
    flip(blob(store, shared.blob)[0])
    report = fsck(store.path, repair=True)
    assert blob(store, shared.blob)[1] in {one.path for one in report.repairs}
    assert find_unit(store, KEY) is None
    assert [str(entry) for entry in store.tags()] == ["tiny:v1"]  # it can be mended
    assert {one.kind for one in report.errors} == {"blob missing", "tag"}
    publish(store, "tiny", "v1", [stored_artifact(store, work)], created=CREATED)
    assert fsck(store.path).errors == []


def test_a_tag_goes_only_with_its_bundle_and_that_is_said(store: Store, work: Path, artifact: Artifact) -> None:
    publish(store, "tiny", "v2", [stored_artifact(store, work, (2,))], created=CREATED)
    flip(store.blobs.path(read_bundle(store, parse_reference("tiny:v1")).digest))
    report = fsck(store.path, repair=True)
    assert [str(entry) for entry in store.tags()] == ["tiny:v2"]
    assert "removed the tag" in next(one.action for one in report.repairs if one.path == "tiny:v1")
    assert report.errors == []


def test_a_lost_layout_is_written_again(store: Store, artifact: Artifact) -> None:
    data = (store.path / "oci-layout").read_bytes()
    (store.path / "oci-layout").unlink()
    report = fsck(store.path, repair=True)
    assert ([one.path for one in report.repairs], report.findings) == (["oci-layout"], ())
    assert (store.path / "oci-layout").read_bytes() == data


@pytest.mark.parametrize("data", [None, b"garbage"])
def test_a_lost_index_is_made_from_the_sound_bundles_only(
    store: Store, work: Path, artifact: Artifact, data: bytes | None
) -> None:
    good = read_bundle(store, parse_reference("tiny:v1"))
    publish(store, "tiny", "v2", [stored_artifact(store, work, (2,))], created=CREATED)
    broken = read_bundle(store, parse_reference("tiny:v2"))
    store.blobs.path(broken.artifacts[0].digest).unlink()
    index = store.path / "index.json"
    index.unlink() if data is None else index.write_bytes(data)
    report = fsck(store.path, repair=True)
    assert [(str(entry), entry.digest) for entry in store.tags()] == [
        (f"tiny:recovered-{good.digest[7:19]}", good.digest)
    ]
    assert f"`aotc tag {store.tags()[0]} latest`" in report.repairs[0].action
    kept = [path.read_bytes() for path in (store.path / ".aotc").glob("index.json.damaged-*")]
    assert kept == ([] if data is None else [data])
    assert report.errors == []


def test_a_second_repair_finds_nothing_to_do(store: Store, artifact: Artifact) -> None:
    for path in sorted((store.path / "blobs" / "sha256").iterdir())[::2]:
        flip(path)
    unit_path(store).write_bytes(b"{")
    assert fsck(store.path, repair=True).repairs
    again = fsck(store.path, repair=True)
    assert again.repairs == ()


def test_findings_are_data_that_survives_json(store: Store, artifact: Artifact) -> None:
    flip(store.blobs.path(artifact.variants[0].files[0].blob))
    report = fsck(store.path)
    assert msgspec.json.decode(msgspec.json.encode(report), type=FsckReport) == report
    code = "import aotc.store.maintenance.fsck, aotc.store.maintenance.gc, sys; assert 'torch' not in sys.modules"
    finish(python(code))
