"""What a store promises, wherever it is: one suite over a folder, a registry, object storage and a web server."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from remote_reading import libraries, local_artifact
from sample_artifacts import CREATED, finish, library_bytes, make_artifact, make_variant, put_file, python
from sample_artifacts import stored_artifact as stored
from store_backends import QUICK, REMOTE, STARTS, WRITTEN_OVER_A_NETWORK, Backend

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import AotcError, CorruptError, NotFoundError, RemoteError, SchemaVersionError, StoreError
from aotc.records import Artifact, File, Variant
from aotc.store.layout import oci
from aotc.store.layout.bundle import ARTIFACT_TYPE, CONFIG, FILE, read_artifact, read_bundle
from aotc.store.layout.check_record import check_artifact
from aotc.store.layout.oci import Descriptor, ImageIndex, ImageManifest
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.opening import open_readable, open_remote
from aotc.store.reference import Reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.push import push
from aotc.store.tagging import remove_tag, set_tags

LOCAL = Reference(None, "tiny", tag="v1")


def backends(*names: str) -> Any:
    chosen = names or tuple(STARTS)
    return pytest.mark.parametrize(
        "backend", [pytest.param(name, marks=STARTS[name][1]) for name in chosen], indirect=True
    )


@pytest.fixture
def backend(
    request: pytest.FixtureRequest,
    backends_started: Mapping[str, Backend],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Iterator[Backend]:
    for name in ("HOME", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "AOTC_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("REGISTRY_AUTH_FILE", "DOCKER_CONFIG", "SSL_CERT_FILE", "AOTC_SINGLE_WRITER"):
        monkeypatch.delenv(name, raising=False)
    backend = backends_started[request.param]
    for name, value in backend.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AOTC_REMOTE_BACKOFF", "0.02")
    yield backend
    backend.restore()


@pytest.fixture
def where(backend: Backend, tmp_path: Path) -> str:
    """A place for a new store."""
    return backend.new(tmp_path)


@pytest.fixture
def local(tmp_path: Path) -> Store:
    """Where artifacts are put together, before they go to the backend."""
    return Store.create(tmp_path / "local")


@pytest.fixture
def published(backend: Backend, where: str, local: Store, work: Path) -> str:
    """The digest of tiny:v1 in the store."""
    return backend.publish(where, local, "v1", [stored(local, work)], CREATED)


def read(backend: Backend, where: str, name: str) -> Artifact:
    """The record of a bundle's one artifact, from where it is."""
    store = backend.readable(where)
    (entry,) = read_bundle(store, backend.ref(where, name)).artifacts
    return read_artifact(store, entry.digest)


def load(backend: Backend, where: str, name: str, cache: Path) -> list[bytes]:
    """As load gets them: every variant's library, of a remote from what was fetched into `cache`."""
    store, artifact = local_artifact(backend.ref(where, name), cache, QUICK)
    return libraries(store, artifact.variants)


# -- what is there ----------------------------------------------------------------------------------------------------


@backends()
def test_what_was_published_is_read_under_the_same_digest(
    backend: Backend, where: str, published: str, local: Store, tmp_path: Path
) -> None:
    store = backend.readable(where)
    bundle = read_bundle(store, backend.ref(where, "tiny:v1"))
    expected = read_bundle(local, LOCAL)
    assert bundle == expected and bundle.digest == published
    assert read_artifact(store, bundle.artifacts[0].digest) == read_artifact(local, expected.artifacts[0].digest)


@backends()
def test_libraries_are_the_bytes_that_were_built(backend: Backend, where: str, published: str, tmp_path: Path) -> None:
    assert load(backend, where, "tiny:v1", tmp_path / "cache") == [library_bytes(1), library_bytes(8)]


@backends()
def test_a_digest_finds_a_bundle_whose_tag_has_moved(
    backend: Backend, where: str, published: str, local: Store, work: Path, tmp_path: Path
) -> None:
    backend.publish(where, local, "v1", [stored(local, work, (32,))], CREATED)
    assert load(backend, where, "tiny:v1", tmp_path / "cache") == [library_bytes(32)]
    assert load(backend, where, f"tiny@{published}", tmp_path / "cache") == [library_bytes(1), library_bytes(8)]


@backends()
def test_a_tag_that_moves_is_seen_by_who_has_everything_cached(
    backend: Backend, where: str, published: str, local: Store, work: Path, tmp_path: Path
) -> None:
    load(backend, where, "tiny:v1", tmp_path / "cache")
    backend.publish(where, local, "v1", [stored(local, work, (2,))], CREATED)
    assert load(backend, where, "tiny:v1", tmp_path / "cache") == [library_bytes(2)]


@backends()
def test_a_missing_tag_is_answered_with_the_nearest_names(
    backend: Backend, where: str, published: str, local: Store, tmp_path: Path
) -> None:
    for tag in ("release-1", "v2"):
        backend.put(where, local, LOCAL, tag)
    with pytest.raises(NotFoundError) as caught:
        read(backend, where, "tiny:release-2")
    assert caught.value.known[0].endswith("tiny:release-1") or caught.value.known[0].endswith(":release-1")
    assert len(caught.value.known) == 3
    assert "release-1" in caught.value.hint


@backends()
def test_a_missing_digest_is_not_found(backend: Backend, where: str, published: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read(backend, where, f"tiny@{sha256_bytes(b'nothing')}")


@backends()
def test_where_no_store_is_nothing_is_found(backend: Backend, where: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read(backend, where, "tiny:v1")


@backends(*REMOTE)
def test_a_warm_start_asks_only_what_the_tag_names(
    backend: Backend, where: str, published: str, tmp_path: Path
) -> None:
    for _ in range(2):
        copied = fetch(backend.ref(where, "tiny:v1"), tmp_path / "cache", of_targets(), limits=QUICK)
    assert copied.moved == 0
    assert copied.requests <= 2  # oci-layout and index.json; a registry takes one


@backends(*REMOTE)
def test_a_download_goes_on_in_the_middle(backend: Backend, where: str, published: str, local: Store) -> None:
    from aotc.store.opening import open_remote

    artifact = read_artifact(local, read_bundle(local, LOCAL).artifacts[0].digest)
    file = artifact.variants[0].files[0]
    whole = local.blobs.path(file.blob).read_bytes()
    remote = open_remote(where, QUICK)
    for offset in (0, 1, len(whole) - 1):
        with remote.open_blob(file.blob, file.blob_size, offset) as chunks:
            assert b"".join(chunks) == whole[offset:]


# -- damage and lies --------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGE = {
    "flipped": flipped,
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
}


@backends()
@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_blob_is_refused_and_not_kept(
    backend: Backend, where: str, published: str, how: str, tmp_path: Path
) -> None:
    damaged = read(backend, where, "tiny:v1").variants[0].files[0].blob
    backend.change(where, damaged, DAMAGE[how])
    with pytest.raises(StoreError) as caught:  # a server may notice that an object is not as long as it says
        load(backend, where, "tiny:v1", tmp_path / "cache")
    assert isinstance(caught.value, CorruptError) or how == "cut"
    assert not Store(tmp_path / "cache" / "store").blobs.path(damaged).exists()


@backends()
@pytest.mark.parametrize("which", ["bundle", "manifest", "record"])
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_damaged_document_is_refused(
    backend: Backend, where: str, published: str, local: Store, which: str, how: str, tmp_path: Path
) -> None:
    manifest = read_bundle(local, LOCAL).artifacts[0].digest
    record = oci.read_document(local.blobs, manifest, ImageManifest).config.digest
    backend.change(where, {"bundle": published, "manifest": manifest, "record": record}[which], DAMAGE[how])
    with pytest.raises(StoreError):
        read(backend, where, "tiny:v1")


@backends()
def test_a_missing_blob_is_named(backend: Backend, where: str, published: str, tmp_path: Path) -> None:
    blob = read(backend, where, "tiny:v1").variants[0].files[0].blob
    backend.change(where, blob, lambda data: None)
    with pytest.raises(NotFoundError, match=blob):
        load(backend, where, "tiny:v1", tmp_path / "cache")


def document(artifact: dict[str, Any] | Artifact, local: Store, **manifest: Any) -> tuple[Any, bytes]:
    """The documents of a bundle with that record, whatever it says; fields of its manifest may be others."""
    record = canonical_json(artifact)
    files = [File(**file) if isinstance(file, dict) else file for file in each_file_of(artifact)]
    layers = tuple(Descriptor(media_type=FILE, digest=file.blob, size=file.blob_size) for file in files)
    described = ImageManifest(
        **{
            "schema_version": 2,
            "media_type": oci.MANIFEST,
            "artifact_type": ARTIFACT_TYPE,
            "config": Descriptor(media_type=CONFIG, digest=sha256_bytes(record), size=len(record)),
            "layers": layers,
            **manifest,
        }
    )
    data = canonical_json(described)
    named = {oci.MODEL: "tiny", oci.TARGET: "cpu:x86-64-v3"}
    entry = Descriptor(media_type=oci.MANIFEST, digest=sha256_bytes(data), size=len(data), annotations=named)
    annotations = {oci.MODEL: "tiny", oci.CREATED: CREATED}
    index = ImageIndex(schema_version=2, media_type=oci.INDEX, manifests=(entry,), annotations=annotations)
    blobs = [("application/octet-stream", local.blobs.read(file.blob, 1 << 20)) for file in files]
    return [*blobs, (CONFIG, record), (oci.MANIFEST, data)], canonical_json(index)


def as_loaded(artifact: Artifact) -> dict[str, Any]:
    """The fields that a load knows: a build's own record has more."""
    fields = msgspec.to_builtins(artifact)
    variants = [
        {name: each[name] for name in each.keys() & {*Variant.__struct_fields__}} for each in fields["variants"]
    ]
    return {name: fields[name] for name in fields.keys() & {*Artifact.__struct_fields__}} | {"variants": variants}


def each_file_of(artifact: dict[str, Any] | Artifact) -> list[Any]:
    fields = artifact if isinstance(artifact, dict) else msgspec.to_builtins(artifact)
    return [file for variant in fields["variants"] for file in variant["files"]]


@backends()
@pytest.mark.parametrize("name", ["../../../escaped", "/tmp/escaped", ".tmp-1234"])
def test_a_record_whose_names_leave_their_folder_is_refused(
    backend: Backend, where: str, local: Store, work: Path, name: str, tmp_path: Path
) -> None:
    file = put_file(local, work, "model.so", b"a library")
    fields = json.loads(canonical_json(make_artifact((make_variant((file,)),)).record(file)))
    fields["variants"][0] |= {"library": name, "files": [{**msgspec.to_builtins(file), "name": name}]}
    backend.put_raw(where, *document(fields, local), "v1")
    with pytest.raises(CorruptError, match="not safe"):
        read(backend, where, "tiny:v1")


@backends()
@pytest.mark.parametrize("digest", ["sha256:../../../../etc/passwd", "md5:1234", "sha256:" + "G" * 64])
def test_a_record_whose_digest_is_a_path_is_refused(
    backend: Backend, where: str, local: Store, work: Path, digest: str, tmp_path: Path
) -> None:
    file = put_file(local, work, "model.so", b"a library")
    fields = msgspec.to_builtins(make_artifact((make_variant((file,)),)))
    documents, index = document(fields, local)
    bad = index.replace(sha256_bytes(documents[-1][1]).encode(), digest.encode())
    try:
        backend.put_raw(where, documents, bad, "v1")
    except AotcError:
        return  # a registry refuses it already
    with pytest.raises(CorruptError):
        read(backend, where, "tiny:v1")


@backends()
@pytest.mark.parametrize(
    ("manifest", "error"),
    [
        ({"artifact_type": "application/vnd.aotc.artifact.v3"}, SchemaVersionError),
        ({"artifact_type": "application/vnd.other"}, CorruptError),
        ({"layers": ()}, CorruptError),
    ],
)
def test_an_artifact_of_another_kind_or_version_is_refused(
    backend: Backend, where: str, local: Store, work: Path, manifest: Any, error: type[AotcError], tmp_path: Path
) -> None:
    artifact = make_artifact((make_variant((put_file(local, work, "model.so", b"a library"),)),))
    backend.put_raw(where, *document(as_loaded(artifact), local, **manifest), "v1")
    store = backend.readable(where)
    with pytest.raises(error, match="layer" if "layers" in manifest else ""):
        check_artifact(store, *read_bundle(store, backend.ref(where, "tiny:v1")).artifacts)  # as what enters a store


@backends()
def test_a_record_of_a_later_schema_is_refused(
    backend: Backend, where: str, local: Store, work: Path, tmp_path: Path
) -> None:
    artifact = make_artifact((make_variant((put_file(local, work, "model.so", b"a library"),)),), schema=99)
    backend.put_raw(where, *document(artifact, local), "v1")
    with pytest.raises(SchemaVersionError) as caught:
        read(backend, where, "tiny:v1")
    assert caught.value.found == 99


@backends("folder", "s3-ceph", "s3-rclone", "azure", "hub", "https", "file")  # registries take no such bundle
def test_a_bundle_larger_than_its_limit_is_not_read(
    backend: Backend, where: str, local: Store, work: Path, tmp_path: Path
) -> None:
    artifact = make_artifact((make_variant((put_file(local, work, "model.so", b"a library"),)),))
    documents, index = document(artifact, local)
    filled = json.loads(index)
    filled["annotations"]["filler"] = "x" * oci.MANIFEST_LIMIT
    backend.put_raw(where, documents, canonical_json(filled), "v1")
    with pytest.raises(CorruptError, match=str(oci.MANIFEST_LIMIT)):
        read(backend, where, "tiny:v1")


@backends()
def test_a_bundle_of_another_model_is_refused(
    backend: Backend, where: str, local: Store, work: Path, tmp_path: Path
) -> None:
    artifact = make_artifact((make_variant((put_file(local, work, "model.so", b"a library"),)),))
    documents, index = document(artifact, local)
    fields = json.loads(index)
    fields["annotations"] = {}
    backend.put_raw(where, documents, canonical_json(fields), "v1")
    with pytest.raises(CorruptError, match="not an aotc bundle"):
        read(backend, where, "tiny:v1")


# -- writing ----------------------------------------------------------------------------------------------------------


@backends(*WRITTEN_OVER_A_NETWORK)
def test_a_second_version_moves_only_what_changed(
    backend: Backend, where: str, published: str, local: Store, work: Path, tmp_path: Path
) -> None:
    fetch(backend.ref(where, "tiny:v1"), tmp_path / "copy", of_targets(), limits=QUICK)
    publish(local, "tiny", "v2", [stored(local, work, (1, 8, 32))], created=CREATED)
    pushed = push(local, Reference(None, "tiny", tag="v2"), backend.ref(where, "tiny:v2"), limits=QUICK)
    fetched = fetch(backend.ref(where, "tiny:v2"), tmp_path / "copy", of_targets(), limits=QUICK)
    assert pushed.moved == 4  # the new bucket's library and report, the provenance, and the record
    assert fetched.moved == 3
    assert read_bundle(Store.open(tmp_path / "copy"), Reference(None, "tiny", tag="v2")).digest == pushed.digest


@backends(*WRITTEN_OVER_A_NETWORK)
def test_a_blob_of_many_parts_arrives_whole(
    backend: Backend, where: str, local: Store, work: Path, tmp_path: Path
) -> None:
    data = random.Random(1).randbytes(20 << 20)  # does not compress
    artifact = make_artifact((make_variant((put_file(local, work, "model.so", data),)),))
    backend.publish(where, local, "v1", [artifact], CREATED)
    assert load(backend, where, "tiny:v1", tmp_path / "cache") == [data]


PUSH = """
import sys
from pathlib import Path
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store.remote.push import push
store, tags, to = Store.open(sys.argv[1]), sys.argv[2].split(","), sys.argv[3]
for tag in tags:
    print(push(store, parse_reference("tiny:v1"), parse_reference(to.replace("TAG", tag))).digest)
"""


def destination(backend: Backend, where: str, tag: str) -> str:
    return str(backend.ref(where, f"tiny:{tag}"))


@backends("registry", "s3-ceph", "azure", "hub")
def test_writers_of_different_tags_lose_none(
    backend: Backend, where: str, local: Store, work: Path, tmp_path: Path
) -> None:
    """Processes that all push the same artifact at once, each under tags of its own, into a store that is not there."""
    publish(local, "tiny", "v1", [stored(local, work)], created=CREATED)
    writers, each = int(os.environ.get("AOTC_TEST_WRITERS", "4")), 3
    tags = [[f"tag-{writer}-{n}" for n in range(each)] for writer in range(writers)]
    running = [python(PUSH, local.path, ",".join(some), destination(backend, where, "TAG")) for some in tags]
    digests = {line for process in running for line in finish(process).split()}
    assert digests == {read_bundle(local, LOCAL).digest}
    store = backend.readable(where)
    for tag in (tag for some in tags for tag in some):
        assert read_bundle(store, backend.ref(where, f"tiny:{tag}")).digest in digests


@backends("registry", "s3-ceph", "azure", "hub")
def test_writers_of_one_tag_leave_one_of_their_bundles_whole(
    backend: Backend, where: str, tmp_path: Path, work: Path
) -> None:
    running = []
    for batch in (1, 2):
        store = Store.create(tmp_path / f"local-{batch}")
        publish(store, "tiny", "v1", [stored(store, work, (batch,))], created=CREATED)
        running.append(python(PUSH, store.path, "v1,v1,v1", destination(backend, where, "TAG")))
    digests = {line for process in running for line in finish(process).split()}
    assert len(digests) == 2
    (batch,) = (variant.bucket["batch"] for variant in read(backend, where, "tiny:v1").variants)
    assert load(backend, where, "tiny:v1", tmp_path / "cache") == [library_bytes(int(str(batch)))]


KILLED = """
import os, signal, sys
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store import opening
from aotc.store.remote.push import push

opened, left = opening.open_remote, int(sys.argv[3])

def open_remote(url, limits):
    there = opened(url, limits)
    def counting(method):
        def call(*arguments):
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments)
        return call
    for name in ("put_blob", "put_document", "set_tag"):
        setattr(there, name, counting(getattr(there, name)))
    return there

opening.open_remote = open_remote
push(Store.open(sys.argv[1]), parse_reference("tiny:v1"), parse_reference(sys.argv[2]))
"""


@backends(*WRITTEN_OVER_A_NETWORK)
@pytest.mark.parametrize("writes", [2, 5])
def test_a_writer_that_is_killed_leaves_the_old_tag_and_the_next_one_finishes(
    backend: Backend, where: str, published: str, local: Store, work: Path, writes: int, tmp_path: Path
) -> None:
    """A push of two new libraries writes 4 blobs, the record, a manifest, and then the bundle with its tag."""
    publish(local, "tiny", "v1", [stored(local, work, (1, 8, 16, 32))], created=CREATED)
    to = destination(backend, where, "v1")
    killed = python(KILLED, local.path, to, writes, AOTC_REMOTE_JOBS="1")
    killed.communicate(timeout=120)
    assert killed.returncode == -9
    assert len(read(backend, where, "tiny:v1").variants) == 2
    pushed = push(local, LOCAL, backend.ref(where, "tiny:v1"), limits=QUICK)
    assert read_bundle(backend.readable(where), backend.ref(where, "tiny:v1")).digest == pushed.digest
    assert load(backend, where, "tiny:v1", tmp_path / "cache") == [library_bytes(batch) for batch in (1, 8, 16, 32)]


@backends("s3-rclone")
def test_where_conditions_are_ignored_a_writer_must_say_that_it_is_alone(
    backend: Backend, where: str, local: Store, work: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AOTC_SINGLE_WRITER")
    with pytest.raises(StoreError, match="whatever the condition says") as caught:
        backend.publish(where, local, "v1", [stored(local, work)], CREATED)
    assert "AOTC_SINGLE_WRITER=1" in caught.value.hint
    with pytest.raises(NotFoundError):  # nothing was written
        read(backend, where, "tiny:v1")


@backends("https")
def test_a_web_server_is_not_written_to(backend: Backend, where: str, local: Store, work: Path) -> None:
    publish(local, "tiny", "v1", [stored(local, work)], created=CREATED)
    with pytest.raises(StoreError, match="can only be read"):
        push(local, LOCAL, backend.ref(where, "tiny:v1"), limits=QUICK)


@backends("folder", "s3-ceph", "s3-rclone", "azure", "hub", "https", "file")
def test_its_tags_are_listed(backend: Backend, where: str, published: str, local: Store, tmp_path: Path) -> None:
    backend.put(where, local, LOCAL, "v0")
    listed = open_readable(where).tags()
    assert [(str(entry), entry.digest) for entry in listed] == [("tiny:v0", published), ("tiny:v1", published)]


@backends("folder", *WRITTEN_OVER_A_NETWORK)
def test_a_bundle_gets_a_further_name_and_a_tag_goes_back(
    backend: Backend, where: str, published: str, local: Store, work: Path
) -> None:
    newer = backend.publish(where, local, "v2", [stored(local, work, (2,))], CREATED)

    def named(tag: str) -> str:
        return backend.readable(where).resolve(backend.ref(where, f"tiny:{tag}")).digest

    for version, digest, before in (("v2", newer, ""), ("v1", published, newer)):
        (tagged,) = set_tags(where, backend.ref(where, f"tiny:{version}"), ["stable"])
        assert (tagged.digest, tagged.before, tagged.left) == (digest, before, False)
        assert (named("stable"), named("v1"), named("v2")) == (digest, published, newer)


@backends("s3-ceph", "s3-rclone", "azure", "hub", "file")
def test_a_removal_whose_answer_is_lost_is_no_missing_tag(
    backend: Backend, where: str, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = type(open_remote(where, QUICK))
    remove, removals = remote.remove_tag, list[Reference]()

    def unanswered_once(self: Any, reference: Reference) -> None:
        remove(self, reference)
        removals.append(reference)
        if len(removals) == 1:
            raise RemoteError("the connection broke", transient=True)

    monkeypatch.setattr(remote, "remove_tag", unanswered_once)
    assert remove_tag(where, backend.ref(where, "tiny:v1")).digest == published
    assert len(removals) == 2
    with pytest.raises(NotFoundError, match="tiny:v1 is not"):
        remove_tag(where, backend.ref(where, "tiny:v1"))


@backends("folder", "s3-ceph", "s3-rclone", "azure", "hub", "file")
def test_a_tag_is_removed_and_the_bundle_stays(backend: Backend, where: str, published: str, local: Store) -> None:
    backend.put(where, local, LOCAL, "v2")
    assert remove_tag(where, backend.ref(where, "tiny:v1")).others == ("tiny:v2",)
    assert remove_tag(where, backend.ref(where, "tiny:v2")).others == ()
    assert read_bundle(backend.readable(where), backend.ref(where, f"tiny@{published}")).digest == published
    with pytest.raises(NotFoundError, match="tiny:v2 is not in"):
        remove_tag(where, backend.ref(where, "tiny:v2"))


@backends("registry")
def test_a_registry_is_asked_to_remove_a_tag(backend: Backend, where: str, published: str) -> None:
    """Debian's docker-registry removes no tags, as the specification permits; another answers 202."""
    with pytest.raises(StoreError, match="removes no tags: it answers") as caught:
        remove_tag(where, backend.ref(where, "tiny:v1"))
    assert "aotc tag" in caught.value.hint
    assert backend.readable(where).resolve(backend.ref(where, "tiny:v1")).digest == published
