"""Every change of a store's bytes is refused before a byte is mapped, or changes nothing of what is loaded.

What may be harmless is in `index.json` and `oci-layout` alone: white space, annotations of others, a size that nothing
else contradicts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from damage import KINDS, Sweep, changed, every_byte, reach
from sample_artifacts import CREATED, make_artifact, make_variant, put_file, stored_artifact

from aotc.digest import sha256_bytes
from aotc.errors import CorruptError, NotFoundError
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.streams import Hash

RANDOM_CHANGES = int(os.environ.get("AOTC_RANDOM_CHANGES", "300"))
VALUES = 2
"""Other values that each byte is given."""


@pytest.fixture
def sweep(store: Store, work: Path, tmp_path: Path) -> Sweep:
    publish(store, "tiny", "latest", [stored_artifact(store, work, (1,))], created=CREATED)
    return Sweep(store.path, "tiny")


def test_every_changed_byte_of_a_small_artifact_is_refused_or_harmless(sweep: Sweep) -> None:
    for path in sweep.files:
        data = path.read_bytes()
        for position, value in every_byte(data, VALUES):
            new = data[:position] + bytes([value]) + data[position + 1 :]
            sweep.try_bytes(path, new, f"byte {position} to {value}")
    assert sweep.findings == []
    assert sweep.tried == VALUES * sum(path.stat().st_size for path in sweep.files)
    assert set(sweep.harmless_in) <= {"index.json", "oci-layout"}


def test_random_changes_of_every_kind_are_refused_or_harmless(sweep: Sweep) -> None:
    random = Random(6)
    others = [path.read_bytes() for path in sweep.files]
    kinds = set()
    for _ in range(RANDOM_CHANGES):
        path = random.choice(sweep.files)
        what, new = changed(path.read_bytes(), random, others)
        kinds.add(what.split(" at ")[0])
        sweep.try_bytes(path, new, what)
    assert sweep.findings == []
    assert kinds == set(KINDS)


def test_a_sweep_sees_what_is_not_refused(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the digests the same changes are findings: the test can fail."""
    monkeypatch.setattr("aotc.store.layout.blob_reader.expect", lambda *_: None)
    path = next(path for path in sweep.files if b"float32" in path.read_bytes())
    sweep.try_bytes(path, path.read_bytes().replace(b'"dtype":"float32"', b'"dtype":"float64"'), "another dtype")
    assert sweep.findings


def test_files_that_change_places_are_refused(sweep: Sweep) -> None:
    blobs = [path for path in sweep.files if "blobs" in path.parts]
    for path in blobs:
        for other in blobs:
            sweep.try_bytes(path, other.read_bytes(), f"the bytes of {other.name}")
    assert sweep.findings == []
    assert sweep.harmless == 0


@pytest.mark.parametrize(
    "replace",
    [
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.symlink_to(path.name)),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["nothing", "endless", "loop", "pipe", "folder"],
)
def test_what_is_no_file_is_refused(sweep: Sweep, replace: Callable[[Path], object], tmp_path: Path) -> None:
    for path in sweep.files:
        kept = tmp_path / "kept"
        shutil.copyfile(path, kept)
        replace(path)
        sweep.judge(path, "replaced")
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.copyfile(kept, path)
    assert sweep.findings == []
    assert sweep.harmless == 0


def test_another_valid_bundle_under_the_tag_is_what_only_a_signature_can_tell(
    store: Store, work: Path, tmp_path: Path
) -> None:
    """As FORMAT.md says: the digest in `index.json` is the one thing that no other digest vouches for."""
    digests = []
    for tag, batch in (("one", 1), ("two", 2)):
        artifact = make_artifact((make_variant((put_file(store, work, "model.so", b"x" * batch),), batch),))
        digests.append(publish(store, "tiny", tag, [artifact], created=CREATED))
    index = store.path / "index.json"
    index.write_text(index.read_text().replace(digests[0], digests[1]))
    assert reach(store.path, "tiny:one").bundle == digests[1]
    with pytest.raises(NotFoundError):
        reach(store.path, f"tiny@{'sha256:' + '0' * 64}")


# -- what an error says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", ["read", "load", "extract"])
@pytest.mark.parametrize("damage", [b"?", b"", b"longer than it was" * 99])
def test_the_error_carries_the_digest_of_the_blob_that_is_to_be_fetched_again(
    store: Store, work: Path, reader: str, damage: bytes
) -> None:
    file = put_file(store, work, "model.so", b"the library" * 9)
    store.blobs.path(file.blob).write_bytes(damage)
    with pytest.raises(CorruptError) as caught:
        if reader == "read":
            store.blobs.read(file.blob, file.blob_size)
        elif reader == "load":
            store.blobs.load(file, 1 << 20)
        else:
            store.blobs.extract(file, work / "out")
    assert caught.value.digest == file.blob
    assert not (work / "out").exists()


def test_a_blob_that_is_itself_right_and_is_not_the_file_is_refused(store: Store, work: Path) -> None:
    """The digest of the blob holds; the record's other digest, that of the file's own bytes, does not."""
    file = put_file(store, work, "model.so", b"the library")
    lying = msgspec.structs.replace(file, digest="sha256:" + "0" * 64)
    with pytest.raises(CorruptError, match="digest of the decompressed file"):
        store.blobs.load(lying, 1 << 20)


# -- hashing beside the work ------------------------------------------------------------------------------------------


def test_pieces_of_every_size_are_hashed_in_order() -> None:
    random = Random(1)
    pieces = [random.randbytes(random.choice((0, 1, 1000, 1 << 17, 1 << 20))) for _ in range(60)]
    with Hash() as hashed:
        for piece in pieces:
            hashed.update(piece)
        whole = b"".join(pieces)
        assert hashed.size == len(whole)
        assert hashed.digest == sha256_bytes(whole)


def test_a_file_of_many_pieces_survives(store: Store, work: Path) -> None:
    data = Random(2).randbytes(5 << 20) + bytes(3 << 20)
    file = put_file(store, work, "large.so", data)
    store.blobs.extract(file, work / "out")
    assert (work / "out").read_bytes() == data
