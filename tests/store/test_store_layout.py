"""The store's folder, its tags and its lock."""

from __future__ import annotations

import errno
import fcntl
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_artifacts import CREATED, finish, python, stored_artifact

from aotc.compiler.publish.url_store import BuildStore
from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, NotFoundError, ReferenceFormatError, SchemaVersionError, StoreError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.oci import INDEX, Descriptor
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store.tagging import tags_of


def edit_index(store: Store, change: Callable[[dict[str, Any]], None]) -> None:
    path = store.path / "index.json"
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index))


def descriptor(store: Store, data: bytes) -> Descriptor:
    blob = store.blobs.put_bytes(data)
    return Descriptor(media_type=INDEX, digest=blob.digest, size=blob.size)


# -- making and opening -----------------------------------------------------------------------------------------------


def test_a_new_store_is_an_empty_oci_image_layout(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "deep" / "store")
    assert (store.path / "oci-layout").read_bytes() == b'{"imageLayoutVersion":"1.0.0"}'
    assert json.loads((store.path / "index.json").read_bytes()) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [],
    }
    assert (store.path / "blobs" / "sha256").is_dir()
    assert Store.open(str(store.path)).tags() == []


def test_creating_where_a_store_is_opens_it(store: Store) -> None:
    store.set_tag("gpt", "v1", descriptor(store, b"{}"))
    assert [str(entry) for entry in Store.create(store.path).tags()] == ["gpt:v1"]


@pytest.mark.parametrize("done", [[], [".aotc"], [".aotc", "blobs"], [".aotc", "blobs", "index.json"]])
def test_a_creation_that_was_killed_is_finished(tmp_path: Path, done: list[str]) -> None:
    whole = Store.create(tmp_path / "whole").path
    half = tmp_path / "half"
    half.mkdir()
    (half / ".tmp-0123456789abcdef").write_text("half-writ")
    for name in done:
        (whole / name).rename(half / name)
    assert Store.create(half).tags() == []


def test_eight_processes_may_create_one_store(tmp_path: Path) -> None:
    code = "import sys; from aotc.store.layout.store import Store; Store.create(sys.argv[1]).tags()"
    for process in [python(code, tmp_path / "store") for _ in range(8)]:
        finish(process)


def test_a_folder_of_other_things_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"is not empty: it holds notes\.txt"):
        Store.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_store_that_is_not_there_is_told_of_the_one_beside_it_and_who_named_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.create(tmp_path / "aotc-store")
    with pytest.raises(NotFoundError) as raised:
        Store.open(tmp_path / "aotc-stor")
    assert raised.value.hint == f"did you mean {tmp_path / 'aotc-store'}?"
    monkeypatch.setenv("AOTC_STORE", str(tmp_path / "none"))
    with pytest.raises(NotFoundError, match=r"there is no store at .*none, which AOTC_STORE names"):
        Store.open(tmp_path / "none")


def test_a_store_or_a_manifest_in_the_place_of_a_model_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.create("here")
    for name, hint in (("here", "here is a store: write here#MODEL"), ("cnn.yaml", "cnn.yaml is a manifest")):
        for look in (lambda name: store.resolve(parse_reference(name)), lambda name: tags_of(store, "here", name)):
            with pytest.raises(NotFoundError) as raised:
                look(name)
            assert hint in raised.value.hint


def test_a_plan_refuses_the_folder_that_a_build_would_refuse(tmp_path: Path) -> None:
    assert BuildStore(tmp_path / "new").opened() is None and BuildStore(tmp_path).opened() is None
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"is not empty: it holds notes\.txt"):
        BuildStore(tmp_path).opened()


def test_a_foreign_index_json_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"name": "a website"}')
    with pytest.raises(StoreError, match="is not empty"):
        Store.create(tmp_path)


def test_a_missing_store_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no store at"):
        Store.open(tmp_path / "nothing")


def test_what_is_no_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="it has no file oci-layout"):
        Store.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is a file; a store is a folder"):
        Store.open(tmp_path / "file")
    with pytest.raises(StoreError, match="unprintable"):
        Store.open("a\0b")


def test_an_unknown_layout_version_is_refused_before_anything_is_written(store: Store) -> None:
    (store.path / "oci-layout").write_text('{"imageLayoutVersion":"2.0.0"}')
    for use in (Store.open, Store.create):
        with pytest.raises(SchemaVersionError, match=r"'2\.0\.0'; this aotc reads '1\.0\.0'") as caught:
            use(store.path)
        assert (caught.value.found, caught.value.supported) == ("2.0.0", "1.0.0")


@pytest.mark.parametrize("data", [b"", b"garbage", b"[]", b"{}", b'{"imageLayoutVersion":1}', b"\xff"])
def test_a_garbled_oci_layout_is_corrupt(store: Store, data: bytes) -> None:
    (store.path / "oci-layout").write_bytes(data)
    with pytest.raises(CorruptError, match="oci-layout cannot be read"):
        Store.open(store.path)


def test_a_store_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "store", Path("/proc/store"), tmp_path / ("x" * 300)):
        with pytest.raises(StoreError):
            Store.create(path)


# -- tags -------------------------------------------------------------------------------------------------------------


def test_a_tag_names_a_bundle_and_moves(store: Store) -> None:
    old, new = descriptor(store, b"{}"), descriptor(store, b"{ }")
    store.set_tag("gpt", "latest", old)
    store.set_tag("gpt", "v1", old)
    store.set_tag("gpt", "latest", new)
    assert store.resolve(parse_reference("gpt")) == new
    assert store.resolve(parse_reference("gpt:v1")) == old
    assert [(entry.model, entry.tag, entry.digest) for entry in store.tags()] == [
        ("gpt", "latest", new.digest),
        ("gpt", "v1", old.digest),
    ]


def test_an_unknown_tag_lists_the_known_ones_nearest_first(store: Store) -> None:
    for name in ("zebra", "gpt", "gpt-large", "a", "b", "c", "d"):
        store.set_tag(name, "v1", descriptor(store, b"{}"))
    with pytest.raises(NotFoundError, match="gpt-larg:v1 is not in the store") as caught:
        store.resolve(parse_reference("gpt-larg:v1"))
    assert caught.value.known[:2] == ("gpt-large:v1", "gpt:v1")
    assert len(caught.value.known) == 7
    assert "gpt-large:v1" in caught.value.hint
    assert "and 2 more" in caught.value.hint


def test_an_empty_store_says_so(store: Store) -> None:
    with pytest.raises(NotFoundError) as caught:
        store.resolve(parse_reference("gpt"))
    assert "the store holds no bundle" in caught.value.hint


def test_entries_of_other_tools_are_preserved_and_are_no_tags(store: Store) -> None:
    foreign: list[dict[str, Any]] = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": "sha512:" + "0" * 128,
            "size": 7,
            "platform": {"os": "linux", "architecture": "amd64"},
            "annotations": {"org.opencontainers.image.ref.name": "nginx:latest"},
            "x-number": 123456789012345678901234567890,
        },
        {"mediaType": INDEX, "digest": "sha256:" + "0" * 64, "size": 7},
    ]
    edit_index(store, lambda index: index.update(manifests=foreign, annotations={"a": "b"}))
    store.set_tag("gpt", "v1", descriptor(store, b"{}"))
    store.set_tag("gpt", "v1", descriptor(store, b"{ }"))
    index = json.loads((store.path / "index.json").read_bytes())
    assert index["manifests"][:2] == foreign
    assert len(index["manifests"]) == 3
    assert index["annotations"] == {"a": "b"}
    assert [str(entry) for entry in store.tags()] == ["gpt:v1"]


def test_a_tag_never_names_what_is_not_there(store: Store) -> None:
    absent = Descriptor(media_type=INDEX, digest=sha256_bytes(b"absent"), size=6)
    with pytest.raises(NotFoundError, match="no such blob of 6 bytes"):
        store.set_tag("gpt", "v1", absent)
    assert store.tags() == []


@pytest.mark.parametrize(("model", "tag"), [("../x", "v1"), ("gpt", "a/b"), ("gpt", ""), ("g:pt", "v1")])
def test_a_tag_with_a_bad_name_is_not_set(store: Store, model: str, tag: str) -> None:
    with pytest.raises(ReferenceFormatError):
        store.set_tag(model, tag, descriptor(store, b"{}"))


def test_a_tag_with_two_bundles_is_ambiguous(store: Store) -> None:
    store.set_tag("gpt", "v1", descriptor(store, b"{}"))
    store.set_tag("gpt", "v2", descriptor(store, b"{ }"))

    def rename(index: dict[str, Any]) -> None:
        for entry in index["manifests"]:
            entry["annotations"]["org.opencontainers.image.ref.name"] = "gpt:v1"

    edit_index(store, rename)
    with pytest.raises(CorruptError, match="names 2 bundles"):
        store.resolve(parse_reference("gpt:v1"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"[]",
        b"{}",
        b'{"schemaVersion":2}',
        b'{"schemaVersion":2,"manifests":[7]}',
        b'{"schemaVersion":2,"manifests":[{"mediaType":"x","digest":"y","size":-1}]}',
        b'{"schemaVersion":2,"manifests":[{"mediaType":"x","digest":"y","size":"1"}]}',
        b'{"schemaVersion":2,"manifests":[],"x":' + b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_a_garbled_index_is_corrupt_and_never_overwritten(store: Store, data: bytes) -> None:
    (store.path / "index.json").write_bytes(data)
    new = descriptor(store, b"{}")
    for use in (store.tags, lambda: store.resolve(parse_reference("a")), lambda: store.set_tag("gpt", "v1", new)):
        with pytest.raises(CorruptError, match=r"index\.json"):
            use()
    assert (store.path / "index.json").read_bytes() == data


def test_an_index_of_another_version_is_refused(store: Store) -> None:
    edit_index(store, lambda index: index.update(schemaVersion=3))
    with pytest.raises(SchemaVersionError, match="schemaVersion 3; this aotc reads 2"):
        store.tags()


def test_a_lost_index_is_corrupt_and_not_an_empty_store(store: Store) -> None:
    (store.path / "index.json").unlink()
    with pytest.raises(CorruptError, match=r"no index\.json"):
        store.tags()
    with pytest.raises(CorruptError, match=r"no index\.json"):
        store.set_tag("gpt", "v1", descriptor(store, b"{}"))


# -- digests ----------------------------------------------------------------------------------------------------------


def test_a_bundle_is_found_by_its_digest_after_its_tag_moved(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work)
    first = publish(store, "tiny", "latest", [artifact], created=CREATED)
    publish(store, "tiny", "latest", [artifact], created="2026-02-02T00:00:00Z")
    assert read_bundle(store, parse_reference(f"tiny@{first}")).created == CREATED


def test_a_digest_of_another_model_or_another_blob_is_not_found(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work)
    digest = publish(store, "tiny", "v1", [artifact], created=CREATED)
    library = artifact.variants[0].files[0].blob
    for text in (f"other@{digest}", f"tiny@{library}", "tiny@sha256:" + "0" * 64):
        with pytest.raises(NotFoundError) as caught:
            store.resolve(parse_reference(text))
        assert caught.value.known == (f"tiny@{digest}",)


def test_a_changed_bundle_is_corrupt_and_not_unknown(store: Store, work: Path) -> None:
    digest = publish(store, "tiny", "v1", [stored_artifact(store, work)], created=CREATED)
    path = store.blobs.path(digest)
    path.write_bytes(path.read_bytes().replace(b"tiny", b"tony"))
    for text in (f"tiny@{digest}", "tiny:v1"):
        with pytest.raises(CorruptError) as caught:
            read_bundle(store, parse_reference(text))
        assert caught.value.expected == digest


# -- the lock ---------------------------------------------------------------------------------------------------------


def test_two_processes_publishing_different_tags_lose_none(store: Store) -> None:
    code = """
import sys
from aotc.store.layout.store import Store
from aotc.store.layout.oci import INDEX, Descriptor
store, who = Store.open(sys.argv[1]), sys.argv[2]
for number in range(40):
    blob = store.blobs.put_bytes(f"{who} {number}".encode())
    store.set_tag("gpt", f"{who}-{number}", Descriptor(media_type=INDEX, digest=blob.digest, size=blob.size))
"""
    for process in [python(code, store.path, who) for who in ("ann", "bob", "eve")]:
        finish(process)
    assert {entry.tag for entry in store.tags()} == {f"{w}-{n}" for w in ("ann", "bob", "eve") for n in range(40)}


def test_a_lock_that_stays_held_says_who_may_hold_it(store: Store) -> None:
    code = """
import sys
from aotc.store.layout.store import Store
with Store.open(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(Path(sys.modules["aotc.errors"].__file__ or "").parents[1])},
    )
    assert holder.stdout is not None
    holder.stdout.readline()
    try:
        hurried = Store.open(store.path, lock_timeout=0.1)
        with pytest.raises(StoreError, match=rf"not free within 0\.1 s; process {holder.pid} on .* may hold it"):
            hurried.set_tag("gpt", "v1", descriptor(store, b"{}"))
        assert store.tags() == []  # readers do not wait
    finally:
        holder.kill()
        holder.communicate()
    hurried.set_tag("gpt", "v1", descriptor(store, b"{}"))  # a killed holder's lock is free


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EROFS, errno.EACCES])
def test_a_lock_that_cannot_be_had_is_a_store_error(store: Store, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, "no")

    new = descriptor(store, b"{}")
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(StoreError, match=r"cannot lock .*\.lock") as caught:
        store.set_tag("gpt", "v1", new)
    assert caught.value.hint


def test_a_full_disk_leaves_the_old_tags(store: Store, failing_os: Callable[[str, int], None]) -> None:
    new = descriptor(store, b"{}")
    before = (store.path / "index.json").read_bytes()
    failing_os("fsync", errno.ENOSPC)
    with pytest.raises(StoreError, match="No space left") as caught:
        store.set_tag("gpt", "v1", new)
    assert "disk is full" in caught.value.hint
    assert (store.path / "index.json").read_bytes() == before
    assert {path.name for path in store.path.iterdir()} == {"oci-layout", "index.json", "blobs", ".aotc"}


# -- layers -----------------------------------------------------------------------------------------------------------


def test_the_store_imports_neither_torch_nor_yaml() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys(["torch", "yaml", "aotc.compiler", "aotc.runtime", "aotc.manifest"]))  # import fails
import aotc.store, aotc.store.layout.units, aotc.store.remote.fetching
"""
    finish(python(code))
