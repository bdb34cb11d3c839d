"""Bundles: what is published is what is read, and nothing else is believed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote_reading import fetch_all
from sample_artifacts import (
    CREATED,
    library_bytes,
    make_artifact,
    make_variant,
    put_file,
    python,
    stored_artifact,
)

from aotc import load
from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import AotcError, CorruptError, NotFoundError, SchemaVersionError, StoreError
from aotc.provenance import BuiltArtifact, BuiltVariant
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import ARTIFACT_TYPE, CONFIG, FILE, each_file, read_artifact, read_bundle
from aotc.store.layout.check_record import check_artifact
from aotc.store.layout.oci import INDEX, MODEL, TARGET, Descriptor
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.reference import parse_reference
from aotc.store.remote.push import push
from aotc.tools.inspection.artifact_picks import picks_of

TINY = parse_reference("tiny:v1")


def published(store: Store, work: Path, **fields: Any) -> tuple[BuiltArtifact, str]:
    """A stored artifact and the digest of its manifest."""
    artifact = stored_artifact(store, work, **fields)
    publish(store, artifact.model, "v1", [artifact], created=CREATED)
    return artifact, read_bundle(store, TINY).artifacts[0].digest


def forge(store: Store, document: dict[str, Any]) -> str:
    return store.blobs.put_bytes(json.dumps(document).encode()).digest


def retag(store: Store, manifest: str) -> None:
    """Let the tag name a bundle of that artifact instead."""
    bundle = manifest_json(store, read_bundle(store, TINY).digest)
    bundle["manifests"] = [{**bundle["manifests"][0], "digest": manifest, "size": store.blobs.size(manifest)}]
    index = forge(store, bundle)
    store.set_tag("tiny", "v1", Descriptor(INDEX, index, store.blobs.size(index) or 0))


def manifest_json(store: Store, digest: str) -> dict[str, Any]:
    return dict(json.loads(store.blobs.path(digest).read_bytes()))


def config_json(store: Store, digest: str) -> dict[str, Any]:
    return manifest_json(store, manifest_json(store, digest)["config"]["digest"])


def forge_record(store: Store, digest: str, artifact: BuiltArtifact) -> str:
    """A manifest like that one, with the record of another artifact."""
    provenance = read_artifact(store, digest).provenance
    assert provenance is not None
    return forge_config(store, digest, artifact.record(provenance).encode())


def forge_config(store: Store, digest: str, data: bytes) -> str:
    """A manifest like that one with another config."""
    blob = store.blobs.put_bytes(data)
    config = {"mediaType": CONFIG, "digest": blob.digest, "size": blob.size}
    return forge(store, {**manifest_json(store, digest), "config": config})


# -- there and back ---------------------------------------------------------------------------------------------------


def test_what_is_published_is_read_back(store: Store, work: Path) -> None:
    small = stored_artifact(store, work, (1,))
    large = stored_artifact(store, work, (1, 8, 64), target="cuda:sm_90")
    digest = publish(store, "tiny", "v1", [small, large], created=CREATED, annotations={"com.example.git": "abc"})
    bundle = read_bundle(store, TINY)
    assert (bundle.model, bundle.digest, bundle.created) == ("tiny", digest, CREATED)
    assert bundle.annotations == {"com.example.git": "abc"}
    assert [entry.target for entry in bundle.artifacts] == ["cpu:x86-64-v3", "cuda:sm_90"]
    assert [read_built(store, entry.digest) for entry in bundle.artifacts] == [small, large]
    assert read_bundle(store, parse_reference(f"tiny@{digest}")) == bundle
    assert [(str(entry), entry.created) for entry in store.tags()] == [("tiny:v1", CREATED)]


def test_the_layers_are_the_distinct_blobs_under_unique_safe_names(store: Store, work: Path) -> None:
    attributes = put_file(store, work, "attributes.json", b"{}")
    plain = stored_artifact(store, work)
    module = msgspec.structs.replace(plain.module, attributes_file=attributes)
    constants = put_file(store, work, "constants.safetensors", b"values")
    artifact, digest = published(store, work, module=module, constants=constants)
    layers = manifest_json(store, digest)["layers"]
    files = [*each_file(artifact), *each_file(read_artifact(store, digest))]
    assert {layer["digest"] for layer in layers} == {file.blob for file in files}
    # Two libraries, one kernel that they share, two reports, the attributes, the constants, the provenance.
    assert len(layers) == 8
    titles = [layer["annotations"]["org.opencontainers.image.title"] for layer in layers]
    assert len(set(titles)) == 8
    assert all("/" not in title for title in titles)
    assert {layer["mediaType"] for layer in layers} == {FILE}


def test_an_artifact_is_the_same_bytes_whatever_the_time_and_the_annotations(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work)
    first = publish(store, "tiny", "v1", [artifact], created=CREATED)
    second = publish(store, "tiny", "v2", [artifact], created="2027-01-01T00:00:00Z", annotations={"a": "b"})
    assert first != second
    one, two = (read_bundle(store, parse_reference(f"tiny:{tag}")).artifacts for tag in ("v1", "v2"))
    assert one == two


def test_publishing_the_same_again_changes_nothing(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work)
    digests = {publish(store, "tiny", "v1", [artifact], created=CREATED) for _ in range(2)}
    assert len(digests) == 1
    assert len(store.tags()) == 1


def test_the_index_keeps_to_oci_1_0_fields(store: Store, work: Path) -> None:
    published(store, work)
    digest = read_bundle(store, TINY).digest
    for document in (manifest_json(store, digest), json.loads((store.path / "index.json").read_bytes())):
        assert set(document) <= {"schemaVersion", "mediaType", "manifests", "annotations"}
        for descriptor in document["manifests"]:
            assert set(descriptor) <= {"mediaType", "digest", "size", "urls", "annotations", "platform"}


# -- golden bytes -----------------------------------------------------------------------------------------------------

# Written by hand from FORMAT.md and RFC 8878 (magic number; single segment with a one-byte content size of 15; one last
# raw block of 15 bytes); the digests by `sha256sum`.
GOLDEN_LIBRARY = b"golden library\n"
GOLDEN_BLOB = bytes.fromhex("28b52ffd200f790000") + GOLDEN_LIBRARY


def sha256sum(data: bytes) -> str:
    """By coreutils where there is one, so that not our own code says what is right."""
    if not shutil.which("sha256sum"):
        return "sha256:" + hashlib.sha256(data).hexdigest()
    return "sha256:" + subprocess.run(["sha256sum"], input=data, capture_output=True, check=True).stdout[:64].decode()


GOLDEN_CONFIG = (
    '{"ambient":{"autocast":null,"default_dtype":"float32","deterministic":false,"float32_matmul_precision":"highest"},'
    '"environment":{"machine":"x86_64","os":"linux","torch":"2.13.0"},"model":"tiny",'
    '"module":{"attributes":"sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",'
    '"class_name":"m.Tiny","sources":{},"training":false},"provenance":{"blob":"%(made_blob)s","blob_size":'
    '%(made_blob_size)d,"digest":"%(made)s","name":"provenance.json","size":%(made_size)d},"schema":2,'
    '"signature":{"leaves":[{"dtype":'
    '"float32","path":"x","shape":["batch",4],"type":"tensor"}],"parameters":[{"name":"x","tree":0}]},"state":[],'
    '"target":"cpu:x86-64-v3","variants":[{"arguments":[{"leaf":0}],"bucket":{"batch":1},"files":[{"blob":"%(blob)s",'
    '"blob_size":24,"digest":"%(raw)s","name":"model.so","size":15}],"library":"model.so",'
    '"output_tree":0,"outputs":[{"dims":["batch",""],"index":0}]}],"weights":"live"}'
)
GOLDEN_PROVENANCE = '{"aotc":"0.1.0","manifest":{},"options":{},"variants":[{"key":"%(key)s"}]}'
GOLDEN_MANIFEST = (
    '{"artifactType":"application/vnd.aotc.artifact.v2","config":{"digest":"%(config)s","mediaType":'
    '"application/vnd.aotc.artifact.config.v2+json","size":%(config_size)d},"layers":[{"annotations":'
    '{"org.opencontainers.image.title":"%(title)s-model.so.zst"},"digest":"%(blob)s","mediaType":'
    '"application/vnd.aotc.file.v1+zstd","size":24},{"annotations":{"org.opencontainers.image.title":'
    '"%(made_title)s-provenance.json.zst"},"digest":"%(made_blob)s","mediaType":"application/vnd.aotc.file.v1+zstd",'
    '"size":%(made_blob_size)d}],"mediaType":"application/vnd.oci.image.manifest.v1+json",'
    '"schemaVersion":2}'
)
GOLDEN_INDEX = (
    '{"annotations":{"dev.aotc.model":"tiny","org.opencontainers.image.created":"2026-01-02T03:04:05Z"},"manifests":'
    '[{"annotations":{"dev.aotc.model":"tiny","dev.aotc.target":"cpu:x86-64-v3"},"digest":"%(manifest)s","mediaType":'
    '"application/vnd.oci.image.manifest.v1+json","size":%(manifest_size)d}],"mediaType":'
    '"application/vnd.oci.image.index.v1+json","schemaVersion":2}'
)
GOLDEN_INDEX_JSON = (
    '{"manifests":[{"annotations":{"dev.aotc.model":"tiny","org.opencontainers.image.created":"2026-01-02T03:04:05Z",'
    '"org.opencontainers.image.ref.name":"tiny:v1"},"digest":"%(index)s","mediaType":'
    '"application/vnd.oci.image.index.v1+json","size":%(index_size)d}],"mediaType":'
    '"application/vnd.oci.image.index.v1+json","schemaVersion":2}'
)


def raw_frame(data: bytes) -> bytes:
    """A zstd frame that compresses nothing, of fewer than 256 bytes."""
    return bytes.fromhex("28b52ffd20") + bytes([len(data)]) + (len(data) << 3 | 1).to_bytes(3, "little") + data


def golden_files(packed: Callable[[bytes], bytes] = raw_frame) -> dict[str, bytes]:
    """`packed` gives the zstd frame of the provenance, whose bytes depend on the version of zstd."""
    facts: dict[str, Any] = {
        "raw": sha256sum(GOLDEN_LIBRARY),
        "blob": sha256sum(GOLDEN_BLOB),
        "key": sha256sum(b"key of batch 1"),
    }
    facts["title"] = facts["blob"][7:23]
    made = (GOLDEN_PROVENANCE % facts).encode()
    blob = packed(made)
    facts |= {
        "made": sha256sum(made),
        "made_size": len(made),
        "made_blob": sha256sum(blob),
        "made_blob_size": len(blob),
    }
    facts["made_title"] = facts["made_blob"][7:23]
    files = {"blobs/sha256/" + facts["blob"][7:]: GOLDEN_BLOB, "blobs/sha256/" + facts["made_blob"][7:]: blob}
    for name, text in [("config", GOLDEN_CONFIG), ("manifest", GOLDEN_MANIFEST), ("index", GOLDEN_INDEX)]:
        data = (text % facts).encode()
        facts |= {name: sha256sum(data), f"{name}_size": len(data)}
        files["blobs/sha256/" + facts[name][7:]] = data
    files["index.json"] = (GOLDEN_INDEX_JSON % facts).encode()
    files["oci-layout"] = b'{"imageLayoutVersion":"1.0.0"}'
    return files


def test_a_published_store_has_the_bytes_that_the_format_says(store: Store, work: Path) -> None:
    library = put_file(store, work, "model.so", GOLDEN_LIBRARY)
    artifact = make_artifact((make_variant((library,)),))
    publish(store, "tiny", "v1", [artifact], created=CREATED)
    there = {
        str(path.relative_to(store.path)): path.read_bytes()
        for path in store.path.rglob("*")
        if path.is_file() and ".aotc" not in path.parts
    }
    published = store.entries()[0].annotation("dev.aotc.published")
    assert abs(datetime.fromisoformat(published).timestamp() - time.time()) < 60
    there["index.json"] = there["index.json"].replace(b'"dev.aotc.published":"%s",' % published.encode(), b"")
    assert there == golden_files(lambda data: zstandard.ZstdCompressor(level=18).compress(data))


def test_a_store_written_by_hand_is_read(tmp_path: Path) -> None:
    for name, data in golden_files().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    store = Store.open(tmp_path)
    bundle = read_bundle(store, TINY)
    artifact = read_artifact(store, bundle.artifacts[0].digest)
    assert store.blobs.load(artifact.variants[0].files[0], 100) == GOLDEN_LIBRARY
    assert read_built(store, bundle.artifacts[0].digest).variants[0].key == sha256sum(b"key of batch 1")
    assert bundle.digest == "sha256:74c7094543b1f3502918ad6417013de1e2b2dbb3bef4f120ac6ceaea74016364"


# -- what is not published --------------------------------------------------------------------------------------------


def test_missing_blobs_are_all_listed_and_nothing_is_published(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work)
    lost = [variant.files[0] for variant in artifact.variants]
    for file in lost:
        store.blobs.path(file.blob).unlink()
    with pytest.raises(NotFoundError, match="2 of the files to publish") as caught:
        publish(store, "tiny", "v1", [artifact], created=CREATED)
    assert all(file.blob in str(caught.value) for file in lost)
    assert store.tags() == []


def test_a_truncated_blob_is_not_published(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work, (1,))
    file = artifact.variants[0].files[0]
    store.blobs.path(file.blob).write_bytes(b"abc")
    with pytest.raises(NotFoundError) as caught:
        publish(store, "tiny", "v1", [artifact], created=CREATED)
    assert (caught.value.issues[0].expected, caught.value.issues[0].actual) == (f"{file.blob_size} bytes", "3 bytes")


def test_what_makes_no_sense_is_not_published(store: Store, work: Path) -> None:
    artifact = stored_artifact(store, work, (1,))
    bare = msgspec.structs.replace(artifact, variants=())
    cases: list[tuple[list[BuiltArtifact], str, dict[str, str], str]] = [
        ([], "tiny", {}, "without artifacts"),
        ([bare], "tiny", {}, "has no variants"),
        ([artifact, artifact], "tiny", {}, "one artifact for each target"),
        ([artifact], "other", {}, "'tiny' is not published as 'other'"),
        ([artifact], "tiny", {"dev.aotc.model": "x"}, "aotc's own"),
    ]
    for artifacts, model, extra, says in cases:
        with pytest.raises(StoreError, match=says) as caught:
            publish(store, model, "v1", artifacts, created=CREATED, annotations=extra)
        assert caught.value.hint
    assert store.tags() == []


def test_a_publish_that_is_killed_before_the_tag_changes_nothing_that_is_seen(store: Store, work: Path) -> None:
    old = publish(store, "tiny", "v1", [stored_artifact(store, work, (1,))], created=CREATED)
    before = (store.path / "index.json").read_bytes()
    code = """
import os, signal, sys
from pathlib import Path
from sample_artifacts import CREATED, stored_artifact
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
Store.set_tag = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store = Store.open(sys.argv[1])
publish(store, "tiny", "v1", [stored_artifact(store, Path(sys.argv[2]), (1, 2, 3))], created=CREATED)
"""
    blobs = set((store.path / "blobs" / "sha256").iterdir())
    process = python(code, store.path, work)
    process.communicate()
    assert process.returncode == -9
    assert (store.path / "index.json").read_bytes() == before
    assert read_bundle(store, TINY).digest == old
    new = set((store.path / "blobs" / "sha256").iterdir()) - blobs
    # Two libraries and reports, provenance, config, manifest and index: whole, and named by nothing.
    assert len(new) == 2 * 2 + 4
    assert all(sha256_bytes(path.read_bytes()) == f"sha256:{path.name}" for path in new)
    publish(store, "tiny", "v1", [stored_artifact(store, work, (1, 2, 3))], created=CREATED)
    assert len(read_artifact(store, read_bundle(store, TINY).artifacts[0].digest).variants) == 3


# -- what is not believed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../model.so", "/etc/cron.d/x", "a/b", "a\0b", "..", "", "a\\b", "x\n", "x" * 300])
def test_an_unsafe_name_is_neither_published_nor_read(store: Store, work: Path, name: str) -> None:
    artifact, digest = published(store, work)
    variant = artifact.variants[0]
    bad = msgspec.structs.replace(variant, files=(*variant.files, msgspec.structs.replace(variant.files[0], name=name)))
    reported = msgspec.structs.replace(variant, report=msgspec.structs.replace(variant.files[0], name=name))
    for changed in (bad, reported):
        record = msgspec.structs.replace(artifact, variants=(changed,))
        with pytest.raises(CorruptError, match="not safe"):
            publish(store, "tiny", "v2", [record], created=CREATED)
    record = msgspec.structs.replace(artifact, variants=(bad,))
    with pytest.raises(CorruptError, match="not safe"):
        read_artifact(store, forge_record(store, digest, record))


def changed_variant(variant: BuiltVariant, how: str) -> BuiltVariant:
    first = variant.files[0]
    files: dict[str, dict[str, Any]] = {
        "digest": {"files": (msgspec.structs.replace(first, digest="sha256:../../x"),)},
        "blob": {"files": (msgspec.structs.replace(first, blob="x"),)},
        "size": {"files": (msgspec.structs.replace(first, size=-1),)},
        "layer": {"files": (msgspec.structs.replace(first, blob="sha256:" + "0" * 64),)},
        "layer size": {"files": (msgspec.structs.replace(first, blob_size=first.blob_size + 1),)},
        "library": {"library": "../../usr/lib/evil.so"},
        "names": {"files": (first, first)},
    }
    return msgspec.structs.replace(variant, **files[how])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("digest", "is not a digest"),
        ("blob", "is not a digest"),
        ("size", ">= 0"),
        ("layer", "is not a layer of the manifest"),
        ("layer size", "is not a layer of the manifest"),
        ("library", "is not one of its files"),
        ("names", "two files of one name"),
    ],
)
def test_a_record_that_lies_is_corrupt(store: Store, work: Path, how: str, says: str) -> None:
    artifact, digest = published(store, work)
    record = msgspec.structs.replace(artifact, variants=(changed_variant(artifact.variants[0], how),))
    with pytest.raises(CorruptError, match=says) as caught:
        check_artifact(store, forge_record(store, digest, record))
    if how != "size":  # whose limit is the type's
        assert caught.value.expected
        assert caught.value.actual


def test_every_changed_byte_of_record_manifest_and_bundle_is_seen(store: Store, work: Path) -> None:
    artifact, digest = published(store, work, batches=(1,))
    config = manifest_json(store, digest)["config"]["digest"]
    for changed in (config, digest, read_bundle(store, TINY).digest):
        path = store.blobs.path(changed)
        good = path.read_bytes()
        for position in range(len(good)):
            path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
            with pytest.raises(CorruptError) as caught:
                read_artifact(store, read_bundle(store, TINY).artifacts[0].digest)
            assert caught.value.expected == changed
        path.write_bytes(good)
    assert read_built(store, digest) == artifact


def test_other_versions_are_refused_with_both(store: Store, work: Path) -> None:
    _, digest = published(store, work)
    manifest = manifest_json(store, digest)
    newer = [
        forge(store, {**manifest, "artifactType": "application/vnd.aotc.artifact.v3"}),
        forge(store, {**manifest, "artifactType": "application/vnd.aotc.artifact.v1"}),
        forge(store, {**manifest, "schemaVersion": 3}),
        forge(store, {**manifest, "config": {**manifest["config"], "mediaType": CONFIG.replace("v2", "v3")}}),
        forge_config(store, digest, canonical_json({**config_json(store, digest), "schema": 3, "new field": 1})),
    ]
    for changed in newer:
        with pytest.raises(SchemaVersionError) as caught:
            read_artifact(store, changed)
        assert caught.value.found != caught.value.supported


def test_what_is_no_artifact_is_corrupt(store: Store, work: Path) -> None:
    artifact, digest = published(store, work)
    manifest = manifest_json(store, digest)
    without_type = {key: value for key, value in manifest.items() if key != "artifactType"}
    others = [
        forge(store, without_type),
        forge(store, {**manifest, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}),
        forge(store, {**manifest, "config": {**manifest["config"], "size": 5}}),
        forge(store, {**manifest, "layers": [{**layer, "mediaType": "text/plain"} for layer in manifest["layers"]]}),
        forge_config(store, digest, b"{}"),
        forge_config(store, digest, canonical_json(config_json(store, digest))[:-1]),
        read_bundle(store, TINY).digest,
        artifact.variants[0].files[0].blob,
    ]
    assert manifest["artifactType"] == ARTIFACT_TYPE
    for changed in others:
        with pytest.raises(CorruptError):
            check_artifact(store, changed)
    with pytest.raises(NotFoundError):
        read_artifact(store, "sha256:" + "0" * 64)


def test_a_bundle_under_another_models_name_is_refused(store: Store, work: Path) -> None:
    published(store, work)
    store.set_tag("other", "v1", store.resolve(TINY))
    with pytest.raises(CorruptError, match="is a bundle of the model 'tiny'"):
        read_bundle(store, parse_reference("other:v1"))


@pytest.mark.parametrize("field", ["model", "target"])
def test_a_record_of_another_model_or_target_is_refused_by_every_reader(
    store: Store, work: Path, tmp_path: Path, field: str
) -> None:
    _, digest = published(store, work)
    record = {**config_json(store, digest), field: "cuda:sm_90"}
    changed = forge_config(store, digest, canonical_json(record))
    retag(store, changed)
    (entry,) = read_bundle(store, TINY).artifacts
    remote = f"file://{store.path}#tiny:v1"
    readers: list[Callable[[], object]] = [
        lambda: read_artifact(store, entry),
        lambda: load(f"{store.path}#tiny:v1", device="cpu"),
        lambda: load(remote, device="cpu", cache=tmp_path / "cache"),
        lambda: fetch_all(parse_reference(remote), tmp_path / "fetched"),
        lambda: push(store, TINY, parse_reference(f"file://{tmp_path}/pushed#tiny:v1")),
        lambda: picks_of("tiny:v1", store.path),
    ]
    for reader in readers:
        with pytest.raises(CorruptError, match="its record says that it is one of"):
            reader()
    assert "its record says" in fsck(store.path).errors[0].message


def test_a_record_that_makes_no_sense_enters_no_store(store: Store, work: Path, tmp_path: Path) -> None:
    artifact, digest = published(store, work)
    variants = (msgspec.structs.replace(artifact.variants[0], mutated_leaves=(3,)), *artifact.variants[1:])
    absurd = msgspec.structs.replace(artifact, variants=variants)
    with pytest.raises(CorruptError, match="writes to an input that is not a tensor"):
        publish(store, "tiny", "v2", [absurd], created=CREATED)
    retag(store, forge_record(store, digest, absurd))
    remote = f"file://{store.path}#tiny:v1"
    readers: list[Callable[[], object]] = [
        lambda: load(remote, device="cpu", cache=tmp_path / "cache"),
        lambda: fetch_all(parse_reference(remote), tmp_path / "fetched"),
        lambda: push(store, TINY, parse_reference(f"file://{tmp_path}/pushed#tiny:v1")),
    ]
    for reader in readers:
        with pytest.raises(CorruptError, match="writes to an input that is not a tensor"):
            reader()
    assert "makes no sense" in fsck(store.path).errors[0].message


def test_sizes_that_no_blob_can_have_are_refused_before_it_is_fetched(store: Store, work: Path) -> None:
    _, digest = published(store, work)
    record = msgspec.to_builtins(read_artifact(store, digest))
    for size, blob_size in ((1 << 40, 1 << 20), (1 << 15, 0), (10, 1 << 20), (0, 1 << 20), (1 << 30, 1 << 32)):
        file = {**record["variants"][0]["files"][0], "size": size, "blob_size": blob_size}
        variant = {**record["variants"][0], "files": [file]}
        with pytest.raises(CorruptError, match=f"of {size} bytes cannot be what a blob of {blob_size} bytes holds"):
            check_artifact(store, forge_config(store, digest, canonical_json({**record, "variants": [variant]})))


def test_a_file_that_the_disk_has_no_room_for_is_refused_before_it_is_written(
    store: Store, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bomb: 32 KiB for each byte of the blob."""
    artifact, _ = published(store, work)
    file = artifact.variants[0].files[0]
    little = SimpleNamespace(f_blocks=9, f_bavail=file.size - 1, f_frsize=1)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: little)
    said = f"{file.size} bytes are to be written, and {file.size - 1} are free"
    with pytest.raises(StoreError, match=said) as caught:
        store.blobs.extract(file, tmp_path / "library.so")
    assert "the disk is full" in caught.value.hint and list(tmp_path.rglob("library.so")) == []


def test_zeros_and_noise_have_sizes_that_are_taken(store: Store, work: Path) -> None:
    for data in (b"", bytes(1 << 24), os.urandom(1 << 20), b"a"):
        artifact = make_artifact((make_variant((put_file(store, work, "model.so", data),)),))
        publish(store, "tiny", "v1", [artifact], created=CREATED)
        (entry,) = read_bundle(store, TINY).artifacts
        assert store.blobs.load(read_artifact(store, entry).variants[0].files[0], 1 << 25) == data


def test_a_module_s_attributes_have_the_limit_of_every_json(store: Store, work: Path) -> None:
    artifact, _ = published(store, work)
    file = put_file(store, work, "attributes.json", b'{"":{"a":[' + b"{}," * (6 << 20) + b"0]}}")
    module = msgspec.structs.replace(artifact.module, attributes_file=file)
    with pytest.raises(CorruptError, match=f"attributes have {file.size} bytes; at most 16777216 are read"):
        publish(store, "tiny", "v2", [msgspec.structs.replace(artifact, module=module)], created=CREATED)


def test_an_image_of_another_tool_is_no_bundle(store: Store, work: Path) -> None:
    _, digest = published(store, work)
    index = manifest_json(store, read_bundle(store, TINY).digest)
    foreign: list[dict[str, Any]] = [
        {**index, "annotations": {}},
        {**index, "manifests": [{**index["manifests"][0], "annotations": {}}]},
        {**index, "manifests": [{**index["manifests"][0], "mediaType": "application/octet-stream"}]},
        {**index, "manifests": [{**index["manifests"][0], "digest": "sha256:../../x"}]},
        {**index, "manifests": [{**index["manifests"][0], "annotations": {MODEL: "other", TARGET: "cpu:x86-64-v3"}}]},
        {**index, "manifests": index["manifests"] * 2},
    ]
    for document in foreign:
        data = json.dumps(document).encode()
        blob = store.blobs.put_bytes(data)
        descriptor = msgspec.structs.replace(store.resolve(TINY), digest=blob.digest, size=blob.size)
        store.set_tag("tiny", "forged", descriptor)
        with pytest.raises(CorruptError):
            read_bundle(store, parse_reference("tiny:forged"))
    assert digest


# -- mutations --------------------------------------------------------------------------------------------------------


def use_everything(store: Store, out: Path) -> None:
    for entry in store.tags():
        bundle = read_bundle(store, parse_reference(str(entry)))
        for artifact in bundle.artifacts:
            for file in each_file(read_artifact(store, artifact.digest)):
                store.blobs.load(file, 1 << 20)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=5,
)


def mutate(data: st.DataObject, value: Any) -> Any:
    """Replace one random part of a JSON value."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        return {**value, key: mutate(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(value) - 1))
        return [*value[:position], mutate(data, value[position]), *value[position + 1 :]]
    return data.draw(values)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_records_and_indexes_give_only_typed_errors(store: Store, work: Path, data: st.DataObject) -> None:
    """The mutated document is given a right digest, all the way up: what a malicious writer could do."""
    _, digest = published(store, work)
    what = data.draw(st.sampled_from(["record", "manifest", "index", "index.json"]))
    manifest = manifest_json(store, digest)
    bundle = manifest_json(store, store.resolve(TINY).digest)

    def document(level: str, value: Any) -> Any:
        return mutate(data, value) if what == level else value

    def described(old: dict[str, Any], value: Any) -> dict[str, Any]:
        blob = store.blobs.put_bytes(json.dumps(value).encode())
        return {**old, "digest": blob.digest, "size": blob.size}

    manifest["config"] = described(manifest["config"], document("record", config_json(store, digest)))
    bundle["manifests"] = [described(bundle["manifests"][0], document("manifest", manifest))]
    index = json.loads((store.path / "index.json").read_bytes())
    good = json.dumps(index)
    index["manifests"] = [described(index["manifests"][0], document("index", bundle))]
    try:
        (store.path / "index.json").write_text(json.dumps(document("index.json", index)))
        use_everything(store, work)
    except AotcError:
        pass
    finally:
        (store.path / "index.json").write_text(good)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=200))
def test_random_bytes_anywhere_give_only_typed_errors(store: Store, garbage: bytes) -> None:
    digest = store.blobs.put_bytes(garbage).digest
    for use in (
        lambda: read_artifact(store, digest),
        lambda: read_bundle(store, parse_reference(f"tiny@{digest}")),
    ):
        with pytest.raises(AotcError):
            use()


# -- other tools ------------------------------------------------------------------------------------------------------

needs_skopeo = pytest.mark.skipif(not shutil.which("skopeo"), reason="needs skopeo")


def skopeo(*arguments: str) -> bytes:
    done = subprocess.run(["skopeo", "--insecure-policy", *arguments], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@needs_skopeo
def test_skopeo_inspects_a_store(store: Store, work: Path) -> None:
    published(store, work)
    raw = skopeo("inspect", "--raw", f"oci:{store.path}:tiny:v1")
    assert sha256_bytes(raw) == read_bundle(store, TINY).digest


@needs_skopeo
def test_skopeo_copies_a_store_and_keeps_every_digest(store: Store, work: Path, tmp_path: Path) -> None:
    artifact, digest = published(store, work)
    bundle = read_bundle(store, TINY)
    source = f"oci:{store.path}:tiny:v1"
    skopeo("copy", "--all", "--preserve-digests", source, f"dir:{tmp_path / 'dir'}")
    skopeo("copy", "--all", "--preserve-digests", source, f"oci:{tmp_path / 'copy'}:tiny:v1")
    copy = Store.open(tmp_path / "copy")
    copied = read_bundle(copy, TINY)
    assert copied == bundle
    assert read_built(copy, digest) == artifact
    files = [copy.blobs.load(file, 1 << 20) for file in each_file(artifact)]
    assert library_bytes(8) in files
    back = Store.create(tmp_path / "back")
    skopeo("copy", "--all", "--preserve-digests", f"dir:{tmp_path / 'dir'}", f"oci:{back.path}:tiny:v1")
    assert read_bundle(back, TINY) == bundle
    publish(copy, "tiny", "v2", [artifact], created=CREATED)  # and we write where skopeo wrote
    assert [str(entry) for entry in copy.tags()] == ["tiny:v1", "tiny:v2"]
