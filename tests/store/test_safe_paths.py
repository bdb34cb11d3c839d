"""No name or path that a record, a manifest, an index or a link in a folder holds leads out of where it belongs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_artifacts import make_artifact, make_variant, put_file, stored_artifact

from aotc.errors import AotcError, CorruptError, ReferenceFormatError, StoreError
from aotc.records import Artifact, File
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.check_record import check_record
from aotc.store.layout.names import file_name_flaw
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import find_unit
from aotc.store.reference import Reference, parse_reference

HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "..\\x",
    "a\0b",
    "a\nb",
    "\x1b[2Jx",
    "x" * 201,
    "é" * 101,
    "\u202eos.ledom",  # shown backwards
    "model\u200b.so",  # a space of no width
    "\ud800",
    ".tmp-0123456789abcdef",
]


@given(st.text(max_size=300))
def test_a_name_that_is_let_through_is_one_component_that_any_system_can_write(name: str) -> None:
    if file_name_flaw(name):
        return
    folder = Path("/folder")
    assert (folder / name).parent == folder and os.path.normpath(folder / name) == str(folder / name)
    assert 0 < len(os.fsencode(name)) <= 200 and "\0" not in name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_name_is_refused_in_every_field(name: str, store: Store, work: Path) -> None:
    good = put_file(store, work, "model.so", b"library")
    bad = msgspec.structs.replace(good, name=name)
    variant = make_variant((good,))
    for artifact in (
        make_artifact((make_variant((bad,)),)),
        make_artifact((make_variant((good, bad)),)),
        make_artifact((msgspec.structs.replace(variant, report=bad),)),
        make_artifact((msgspec.structs.replace(variant, picks=bad),)),
        make_artifact((msgspec.structs.replace(variant, library=name),)),
        _with_attributes(make_artifact((variant,)), bad),
        msgspec.structs.replace(make_artifact((variant,)), constants=bad),
    ):
        with pytest.raises(CorruptError):
            check_record(artifact)


def _with_attributes(artifact: Artifact, file: File) -> Artifact:
    return msgspec.structs.replace(artifact, module=msgspec.structs.replace(artifact.module, attributes_file=file))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Model.so", "model.so"),
        ("\u00e9.so", "e\u0301.so"),  # é as one character, and as two
        ("stra\u00dfe.so", "STRASSE.so"),
        ("\ufb01.so", "fi.so"),  # a ligature
        ("\u212a.so", "k.so"),  # the sign of kelvin
    ],
)
def test_names_that_some_file_systems_take_for_one_do_not_stand_together(
    one: str, other: str, store: Store, work: Path
) -> None:
    first, second = put_file(store, work, "a", b"1"), put_file(store, work, "b", b"2")
    files = (msgspec.structs.replace(first, name=one), msgspec.structs.replace(second, name=other))
    with pytest.raises(CorruptError, match="two files of one name"):
        check_record(make_artifact((make_variant(files),)))


BAD_DIGESTS = [
    "sha256:../../../etc/passwd",
    "sha256:" + "A" * 64,
    "sha256:" + "a" * 63,
    "sha256:" + "a" * 64 + "\n",
    "sha256:" + "\uff11" * 64,  # digits, but not of ASCII
    "sha512:" + "a" * 128,
    "",
]


@pytest.mark.parametrize("digest", BAD_DIGESTS)
def test_what_is_no_digest_never_becomes_a_path(digest: str, store: Store, work: Path) -> None:
    good = put_file(store, work, "model.so", b"library")
    for field in ("digest", "blob"):
        bad = msgspec.structs.replace(good, **{field: digest})
        with pytest.raises(CorruptError):
            check_record(make_artifact((make_variant((bad,)),)))
        with pytest.raises(CorruptError):
            store.blobs.load(bad, 1 << 20)
    for use in (store.blobs.path, store.blobs.size, lambda text: find_unit(store, text)):
        with pytest.raises(CorruptError):
            use(digest)
    with pytest.raises(ReferenceFormatError):
        parse_reference(f"tiny@{digest}")


@pytest.mark.parametrize("digest", BAD_DIGESTS)
def test_digests_in_documents_never_become_paths(digest: str, store: Store, work: Path) -> None:
    """A bundle, a manifest and an index that were written with a wrong digest in them, their own digests all right."""
    bundle = publish(store, "tiny", "latest", [stored_artifact(store, work)], created="2026-01-01T00:00:00Z")
    document = json.loads(store.blobs.read(bundle, 1 << 20))
    manifest_digest = document["manifests"][0]["digest"]
    manifest = json.loads(store.blobs.read(manifest_digest, 1 << 20))

    document["manifests"][0]["digest"] = digest
    changed = store.blobs.put_bytes(json.dumps(document).encode())
    with pytest.raises(CorruptError):
        read_bundle(store, Reference(None, "tiny", digest=changed.digest))
    manifest["config"]["digest"] = digest
    with pytest.raises(CorruptError):
        read_artifact(store, store.blobs.put_bytes(json.dumps(manifest).encode()).digest)
    index = json.loads((store.path / "index.json").read_text())
    index["manifests"][0]["digest"] = digest
    (store.path / "index.json").write_text(json.dumps(index))
    with pytest.raises(AotcError):
        read_bundle(store, parse_reference("tiny"))


@pytest.mark.parametrize("name", [*HOSTILE, "-rf", ".hidden", "a..b", "a b", "ａ", "x" * 129])
def test_a_hostile_model_or_tag_is_no_reference(name: str, store: Store) -> None:
    for fields in ({"model": name, "tag": "latest"}, {"model": "tiny", "tag": name}):
        with pytest.raises(ReferenceFormatError):
            Reference(None, **fields)
    index = json.loads((store.path / "index.json").read_text())
    annotations = {"org.opencontainers.image.ref.name": f"{name}:latest"}
    kind = "application/vnd.oci.image.index.v1+json"
    entry: dict[str, Any] = {"mediaType": kind, "digest": "sha256:" + "0" * 64, "size": 1, "annotations": annotations}
    (store.path / "index.json").write_text(json.dumps({**index, "manifests": [entry]}))
    try:
        assert store.tags() == []  # not offered, and so nothing to load
    except CorruptError:
        assert name == "\ud800"  # no JSON can say that


def test_models_whose_names_differ_by_case_only_share_nothing(store: Store, work: Path) -> None:
    digests = {
        model: publish(
            store, model, "latest", [stored_artifact(store, work, model=model)], created="2026-01-01T00:00:00Z"
        )
        for model in ("tiny", "Tiny")
    }
    assert {model: read_bundle(store, parse_reference(model)).digest for model in digests} == digests


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.mkdir()
    (path / "file").write_text("precious")
    return path


def test_a_lock_that_is_a_link_is_not_followed(store: Store, victim: Path) -> None:
    (store.path / ".aotc").mkdir(exist_ok=True)
    (store.path / ".aotc" / "index.lock").unlink(missing_ok=True)
    (store.path / ".aotc" / "index.lock").symlink_to(victim / "file")
    with pytest.raises(StoreError), store.lock():
        pass
    (store.path / ".aotc" / "index.lock").unlink()
    (store.path / ".aotc" / "index.lock").symlink_to(victim / "made")
    with pytest.raises(StoreError), store.lock():
        pass
    assert ((victim / "file").read_text(), (victim / "made").exists()) == ("precious", False)


def test_what_says_who_holds_a_lock_is_not_written_or_read_through_a_link(store: Store, victim: Path) -> None:
    holder = store.path / ".aotc" / "index.lock.holder"
    holder.parent.mkdir(exist_ok=True)
    holder.symlink_to(victim / "file")
    with store.lock():
        assert (victim / "file").read_text() == "precious"
        holder.unlink(missing_ok=True)
        holder.symlink_to(victim / "file")
        impatient = Store(store.path, lock_timeout=0.05)
        with pytest.raises(StoreError, match="not free") as caught, impatient.lock():
            pass
        assert "precious" not in str(caught.value)


def test_a_pipe_in_the_place_of_a_lock_s_holder_blocks_nobody(store: Store) -> None:
    holder = store.path / ".aotc" / "index.lock.holder"
    holder.parent.mkdir(exist_ok=True)
    os.mkfifo(holder)
    with store.lock():
        pass


@pytest.mark.parametrize("place", ["index.json", "blob", "unit"])
def test_a_file_of_the_store_that_is_a_link_is_replaced_and_not_written_through(
    place: str, store: Store, work: Path, victim: Path
) -> None:
    data = b"the bytes of a blob"
    if place == "index.json":
        index = (store.path / "index.json").read_bytes()
        (victim / "file").write_bytes(index)
        (store.path / "index.json").unlink()
        (store.path / "index.json").symlink_to(victim / "file")
        publish(store, "tiny", "latest", [stored_artifact(store, work)], created="2026-01-01T00:00:00Z")
        assert (victim / "file").read_bytes() == index and not (store.path / "index.json").is_symlink()
    elif place == "blob":
        from aotc.digest import sha256_bytes

        path = store.blobs.path(sha256_bytes(data))
        path.symlink_to(victim / "file")
        store.blobs.put_bytes(data)
        assert path.read_bytes() == data and not path.is_symlink()
        assert (victim / "file").read_text() == "precious"
    else:
        path = store.path / ".aotc" / "units" / ("0" * 64 + ".json")
        path.parent.mkdir(parents=True)
        path.symlink_to(victim / "file")
        assert find_unit(store, "sha256:" + "0" * 64) is None


def test_a_blob_that_is_a_link_or_no_file_gives_only_bytes_of_its_digest(
    store: Store, work: Path, victim: Path
) -> None:
    file = put_file(store, work, "model.so", b"library")
    path = store.blobs.path(file.blob)
    path.unlink()
    path.symlink_to(victim / "file")
    with pytest.raises(CorruptError) as caught:
        store.blobs.load(file, 1 << 20)
    assert "precious" not in str(caught.value)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(CorruptError):
        store.blobs.read(file.blob, 1 << 20)
