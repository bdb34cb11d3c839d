"""Every change of a store's bytes is refused before a byte is mapped, or changes nothing of what is loaded.

What may be harmless is in `index.json` and `oci-layout` alone: white space, annotations of others, a size that nothing
else contradicts. `tests/benchmarks/integrity.py` tries all 255 other values of every byte, and large artifacts.
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
from aotc.store import Blobs, HotCopies, Store, publish
from aotc.store.blobs import _Hash

RANDOM_CHANGES = int(os.environ.get("AOTC_RANDOM_CHANGES", "300"))
VALUES = 2
"""Other values that each byte is given."""


@pytest.fixture
def sweep(store: Store, work: Path, tmp_path: Path) -> Sweep:
    publish(store, "tiny", "latest", [stored_artifact(store, work, (1,))], created=CREATED)
    return Sweep(store.path, "tiny", tmp_path / "hot")


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
    monkeypatch.setattr("aotc.store.blobs._expect", lambda *_: None)
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
    assert reach(store.path, "tiny:one", tmp_path / "hot").bundle == digests[1]
    with pytest.raises(NotFoundError):
        reach(store.path, f"tiny@{'sha256:' + '0' * 64}", tmp_path / "hot")


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
    with _Hash() as hashed:
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


# -- hot copies -------------------------------------------------------------------------------------------------------


class Hot:
    """A set of two files, and what each change of it must end in."""

    def __init__(self, store: Store, work: Path, cache: Path) -> None:
        self.files = [put_file(store, work, name, name.encode() * 500) for name in ("model.so", "kernel.cubin")]
        self.blobs: Blobs = store.blobs
        self.cache = cache
        self.folder = HotCopies(cache).materialise(self.files, self.blobs)
        self.library = self.folder / "model.so"
        self.shared = cache / "hot-v1" / "files" / "sha256" / self.files[0].digest[7:]

    def again(self) -> Path:
        """The set, handed out again: the right bytes, nothing else in it, nothing in it that can be written."""
        hot = HotCopies(self.cache)
        folder = hot.materialise(self.files, self.blobs)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
            name: name.encode() * 500 for name in ("model.so", "kernel.cubin")
        }
        assert not any(path.is_symlink() or path.stat().st_mode & 0o222 for path in folder.iterdir())
        hot.confirm()
        return folder


@pytest.fixture
def hot(store: Store, work: Path, tmp_path: Path) -> Hot:
    return Hot(store, work, tmp_path / "cache")


def rewrite(path: Path, data: bytes, mode: int = 0o444) -> None:
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(mode)


def elsewhere(path: Path) -> Path:
    """A folder with the same files, for links to lead to."""
    other = path.with_name("elsewhere")
    shutil.copytree(path, other)
    return other


DAMAGE: dict[str, Callable[[Hot], object]] = {
    "a writable file": lambda hot: hot.library.chmod(0o644),
    "a file that all may write": lambda hot: hot.library.chmod(0o777),
    "a changed file": lambda hot: rewrite(hot.library, hot.library.read_bytes()[::-1]),
    "a changed file that is writable": lambda hot: rewrite(hot.library, hot.library.read_bytes()[::-1], 0o666),
    "a shorter file": lambda hot: rewrite(hot.library, hot.library.read_bytes()[:-1]),
    "an empty file": lambda hot: rewrite(hot.library, b""),
    "a file of zeros": lambda hot: rewrite(hot.library, bytes(hot.library.stat().st_size)),
    "a missing file": lambda hot: hot.library.unlink(),
    "a missing set": lambda hot: shutil.rmtree(hot.folder),
    "an empty set": lambda hot: [path.unlink() for path in hot.folder.iterdir()],
    "the other file": lambda hot: (hot.library.unlink(), os.link(hot.folder / "kernel.cubin", hot.library)),
    "a symbolic link to the right bytes": lambda hot: (hot.library.unlink(), hot.library.symlink_to(hot.shared)),
    "a symbolic link to others": lambda hot: (hot.library.unlink(), hot.library.symlink_to("/etc/passwd")),
    "a symbolic link to itself": lambda hot: (hot.library.unlink(), hot.library.symlink_to("model.so")),
    "a pipe": lambda hot: (hot.library.unlink(), os.mkfifo(hot.library)),
    "a hard link to a file of somebody's": lambda hot: (
        (hot.cache / "own").write_bytes(b"mine"),
        hot.library.unlink(),
        os.link(hot.cache / "own", hot.library),
    ),
    "a set that is a symbolic link": lambda hot: (
        elsewhere(hot.folder),
        shutil.rmtree(hot.folder),
        hot.folder.symlink_to("elsewhere"),
    ),
    "a set that is a symbolic link to nothing": lambda hot: (
        shutil.rmtree(hot.folder),
        hot.folder.symlink_to("nothing"),
    ),
    "a set that is a file": lambda hot: (shutil.rmtree(hot.folder), hot.folder.write_bytes(b"")),
    "a stranger in the set": lambda hot: (hot.folder / "model.json").write_text('{"nodes": []}'),
    "a folder in the set": lambda hot: (hot.folder / "inner" / "deep").mkdir(parents=True),
    "a link to a folder in the set": lambda hot: (hot.folder / "out").symlink_to(hot.cache.parent),
    "changed shared bytes": lambda hot: rewrite(hot.shared, b"?" * hot.shared.stat().st_size),
    "no shared files": lambda hot: (hot.library.unlink(), shutil.rmtree(hot.shared.parent)),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_whatever_is_done_to_a_hot_copy_the_right_bytes_are_handed_out(hot: Hot, what: str) -> None:
    DAMAGE[what](hot)
    assert hot.again() == hot.folder
    assert hot.again() == hot.folder  # and it is mended for good


def test_what_lies_behind_a_link_is_left_alone(hot: Hot) -> None:
    outside = hot.cache.parent / "outside"
    shutil.copytree(hot.folder, outside)
    (outside / "precious").write_text("kept")
    shutil.rmtree(hot.folder)
    hot.folder.symlink_to(outside)
    hot.again()
    assert (outside / "precious").read_text() == "kept"
    (hot.folder / "out").symlink_to(outside)
    hot.again()
    assert (outside / "precious").read_text() == "kept"


def test_every_random_change_of_a_hot_copy_is_seen(hot: Hot) -> None:
    random = Random(3)
    original = hot.library.read_bytes()
    for _ in range(60):
        what, new = changed(original, random, [b"other", original[::-1]])
        rewrite(hot.library, new, random.choice((0o444, 0o644)))
        hot.again()
        assert hot.library.read_bytes() == original, what


def test_a_file_of_another_that_cannot_be_made_unwritable_is_made_anew(
    hot: Hot, monkeypatch: pytest.MonkeyPatch
) -> None:
    hot.library.chmod(0o666)
    before = hot.library.stat().st_ino
    real = os.fchmod

    def refuse(descriptor: int, mode: int) -> None:
        if os.fstat(descriptor).st_ino == before:
            raise PermissionError(1, "Operation not permitted")
        real(descriptor, mode)

    monkeypatch.setattr(os, "fchmod", refuse)
    hot.again()
    assert hot.library.stat().st_ino != before


def test_a_writable_file_of_a_read_only_file_system_is_good(hot: Hot, monkeypatch: pytest.MonkeyPatch) -> None:
    hot.library.chmod(0o644)

    def read_only(descriptor: int, mode: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fchmod", read_only)
    folder = HotCopies(hot.cache).materialise(hot.files, hot.blobs)
    assert (folder / "model.so").samefile(hot.library)


def test_without_hard_links_the_copies_are_checked(hot: Hot, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    real, broken = shutil.copyfileobj, []

    def copy_badly(source: object, destination: object, *rest: object) -> None:
        if not broken:
            broken.append(True)
            destination.write(b"?" * 4000)  # type: ignore[attr-defined]
        else:
            real(source, destination, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfileobj", copy_badly)
    shutil.rmtree(hot.folder)
    hot.again()
    assert broken


# -- between the check and the map ------------------------------------------------------------------------------------


def handed_out(hot: Hot) -> HotCopies:
    copies = HotCopies(hot.cache)
    copies.materialise(hot.files, hot.blobs)
    copies.confirm()
    return copies


def later(path: Path) -> None:
    """As a clock that ticks in milliseconds would show it."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


@pytest.mark.parametrize(
    "change",
    [
        lambda path: (rewrite(path, b"?" * path.stat().st_size), later(path)),
        lambda path: (rewrite(path, b""), later(path)),
        lambda path: path.unlink(),
        lambda path: (shutil.copy(path, path.with_name("new")), path.with_name("new").replace(path)),
        lambda path: (path.unlink(), path.symlink_to("kernel.cubin")),
        lambda path: shutil.rmtree(path.parent),
    ],
    ids=["written", "emptied", "removed", "replaced", "linked", "without its folder"],
)
def test_a_change_between_the_check_and_the_map_is_refused(hot: Hot, change: Callable[[Path], object]) -> None:
    copies = handed_out(hot)
    change(hot.library)
    with pytest.raises(CorruptError, match="was changed between its check and its use") as caught:
        copies.confirm()
    assert caught.value.path == str(hot.library)
    assert caught.value.expected != caught.value.actual


def test_what_other_processes_of_ours_do_meanwhile_is_no_change(hot: Hot) -> None:
    """They link the same file into other sets, and mark when a set was used."""
    copies = handed_out(hot)
    HotCopies(hot.cache).materialise(hot.files[:1], hot.blobs)
    hot.again()
    os.utime(hot.folder)
    copies.confirm()


# -- side by side -----------------------------------------------------------------------------------------------------


def test_sets_are_made_side_by_side_and_given_in_order(store: Store, work: Path, tmp_path: Path) -> None:
    shared = put_file(store, work, "kernel.cubin", b"shared" * 1000)
    sets = [[put_file(store, work, "model.so", b"library %d" % number * 50), shared] for number in range(20)]
    folders = HotCopies(tmp_path / "cache").materialise_all(sets, store.blobs)
    assert [(folder / "model.so").read_bytes() for folder in folders] == [b"library %d" % n * 50 for n in range(20)]
    assert len(list((tmp_path / "cache" / "hot-v1" / "files" / "sha256").iterdir())) == 21


def test_a_corrupt_one_among_many_is_refused(store: Store, work: Path, tmp_path: Path) -> None:
    sets = [[put_file(store, work, "model.so", b"library %d" % number)] for number in range(9)]
    store.blobs.path(sets[4][0].blob).write_bytes(b"?")
    with pytest.raises(CorruptError) as caught:
        HotCopies(tmp_path / "cache").materialise_all(sets, store.blobs)
    assert caught.value.digest == sets[4][0].blob


def test_one_private_folder_serves_all_threads(store: Store, work: Path) -> None:
    sets = [[put_file(store, work, "model.so", b"library %d" % number)] for number in range(9)]
    folders = HotCopies(Path("/proc/aotc")).materialise_all(sets, store.blobs)
    assert len({folder.parents[2] for folder in folders}) == 1
    assert [(folder / "model.so").read_bytes() for folder in folders] == [b"library %d" % n for n in range(9)]
