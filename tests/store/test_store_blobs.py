"""Blobs: immutable, content-addressed, checked before a byte is used."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard

from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.records import File
from aotc.store.layout.blobs import Blobs
from aotc.store.layout.store import Store

DATA = b"some library code " * 40


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def put_packed(blobs: Blobs, packed: bytes, data: bytes, **fields: object) -> File:
    """A record for `data` whose blob is `packed`, whatever that is."""
    blob = blobs.put_bytes(packed)
    file = File(name="f", digest=digest_of(data), size=len(data), blob=blob.digest, blob_size=blob.size)
    return msgspec.structs.replace(file, **fields)


@pytest.fixture
def blobs(store: Store) -> Blobs:
    return store.blobs


@pytest.fixture
def file(blobs: Blobs, work: Path) -> File:
    (work / "lib.so").write_bytes(DATA)
    return blobs.put_file_zstd(work / "lib.so")


def test_bytes_stand_under_their_sha256(store: Store) -> None:
    blob = store.blobs.put_bytes(b"abc")
    # The first example of FIPS 180-2.
    assert blob.digest == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert blob.size == 3
    assert (store.path / "blobs" / "sha256" / blob.digest[7:]).read_bytes() == b"abc"
    assert store.blobs.read(blob.digest, 3) == b"abc"


def test_a_record_of_a_file_names_both_digests_and_sizes(blobs: Blobs, file: File) -> None:
    packed = blobs.path(file.blob).read_bytes()
    assert file == File("lib.so", digest_of(DATA), len(DATA), digest_of(packed), len(packed))
    assert zstandard.ZstdDecompressor().decompress(packed) == DATA
    assert zstandard.get_frame_parameters(packed).content_size == len(DATA)
    assert not zstandard.get_frame_parameters(packed).has_checksum


@pytest.mark.skipif(not shutil.which("zstd"), reason="needs the zstd command")
def test_the_zstd_command_reads_a_blob(blobs: Blobs, file: File) -> None:
    out = subprocess.run(["zstd", "-dc"], input=blobs.path(file.blob).read_bytes(), capture_output=True, check=True)
    assert out.stdout == DATA


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (5 << 20) + 17])
def test_a_file_of_any_size_comes_back(blobs: Blobs, work: Path, size: int) -> None:
    data = hashlib.shake_128(b"seed").digest(1 << 18) * (size // (1 << 18) + 1)
    (work / "a").write_bytes(data[:size])
    file = blobs.put_file_zstd(work / "a", name="renamed.bin")
    blobs.extract(file, work / "out" / "b")
    assert file.name == "renamed.bin"
    assert (work / "out" / "b").read_bytes() == data[:size]


def test_equal_files_give_equal_blobs(store: Store, work: Path, tmp_path: Path) -> None:
    (work / "a").write_bytes(DATA * 5000)
    (work / "b").write_bytes(DATA * 5000)
    other = Store.create(tmp_path / "other")
    first, second = store.blobs.put_file_zstd(work / "a"), other.blobs.put_file_zstd(work / "b")
    assert first.blob == second.blob


@pytest.mark.parametrize(("size", "level", "other"), [(1 << 20, 18, 10), ((1 << 20) + 1, 10, 18)])
def test_small_files_are_compressed_more(blobs: Blobs, work: Path, size: int, level: int, other: int) -> None:
    words = hashlib.shake_128(b"seed").digest(1 << 16)
    (work / "a").write_bytes(b"".join(words[at : at + 40] for at in words[: size // 40 + 1] * 2)[:size].ljust(size))
    file = blobs.put_file_zstd(work / "a")
    assert file == blobs.put_file_zstd(work / "a", level) != blobs.put_file_zstd(work / "a", other)


def test_an_extracted_file_is_read_only_and_whole(blobs: Blobs, file: File, work: Path) -> None:
    blobs.extract(file, work / "out")
    assert (work / "out").read_bytes() == DATA
    assert stat.S_IMODE((work / "out").stat().st_mode) & 0o222 == 0


def test_a_blob_that_is_there_is_not_written_again(blobs: Blobs, file: File, work: Path) -> None:
    os.utime(blobs.path(file.blob), (0, 0))
    before = blobs.path(file.blob).stat()
    assert blobs.put_file_zstd(work / "lib.so") == file
    after = blobs.path(file.blob).stat()
    assert before.st_ino == after.st_ino
    assert after.st_mtime_ns > before.st_mtime_ns  # and gc sees that it was wanted again


def test_a_truncated_blob_is_written_again(blobs: Blobs, file: File, work: Path) -> None:
    os.truncate(blobs.path(file.blob), 5)
    blobs.put_file_zstd(work / "lib.so")
    blobs.extract(file, work / "out")


def test_a_write_leaves_no_temporaries(blobs: Blobs, file: File) -> None:
    assert [path.name for path in (blobs.folder / "sha256").iterdir()] == [file.blob[7:]]


# -- hostile bytes ----------------------------------------------------------------------------------------------------


def refuse(blobs: Blobs, file: File, work: Path) -> CorruptError:
    """The error of extracting, after which nothing may be left behind."""
    out = work / "out"
    with pytest.raises(CorruptError) as caught:
        blobs.extract(file, out / "f")
    assert list(out.iterdir()) == []
    assert caught.value.expected
    assert caught.value.actual
    assert caught.value.expected != caught.value.actual
    return caught.value


def test_every_changed_byte_of_a_blob_is_seen(blobs: Blobs, file: File, work: Path) -> None:
    path = blobs.path(file.blob)
    good = path.read_bytes()
    for position in range(len(good)):
        path.write_bytes(good[:position] + bytes([good[position] ^ 0x41]) + good[position + 1 :])
        error = refuse(blobs, file, work)
        assert error.expected == file.blob  # and not what the change led to
        with pytest.raises(CorruptError):
            blobs.read(file.blob, len(good))


def test_every_truncation_of_a_blob_is_seen(blobs: Blobs, file: File, work: Path) -> None:
    path = blobs.path(file.blob)
    good = path.read_bytes()
    for size in range(len(good)):
        path.write_bytes(good[:size])
        assert (refuse(blobs, file, work).actual) == str(size)


def test_garbage_after_a_blob_is_seen(blobs: Blobs, file: File, work: Path) -> None:
    with blobs.path(file.blob).open("ab") as stream:
        stream.write(b"x")
    refuse(blobs, file, work)


@pytest.mark.parametrize("garbage", [b"x", b"garbage after the frame", zstandard.compress(b"one more frame")])
def test_garbage_after_the_frame_is_seen_though_the_digest_covers_it(blobs: Blobs, work: Path, garbage: bytes) -> None:
    refuse(blobs, put_packed(blobs, zstandard.compress(DATA) + garbage, DATA), work)


@pytest.mark.parametrize("packed", [b"", b"no zstd at all", zstandard.compress(DATA)[:-3]])
def test_what_is_no_whole_frame_is_refused(blobs: Blobs, work: Path, packed: bytes) -> None:
    refuse(blobs, put_packed(blobs, packed, DATA), work)


def test_a_decompression_bomb_is_cut_off_at_the_size_of_the_record(
    blobs: Blobs, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
    assert len(bomb) < 1 << 20
    written = []
    real = hashlib.sha256

    class Counting:
        def __init__(self, data: bytes = b"") -> None:
            self.hash = real()
            self.update(data)

        def update(self, data: bytes) -> None:
            written.append(len(data))
            self.hash.update(data)

        def hexdigest(self) -> str:
            return self.hash.hexdigest()

    file = put_packed(blobs, bomb, b"x" * 1000)
    monkeypatch.setattr(hashlib, "sha256", Counting)
    error = refuse(blobs, file, work)
    assert "more than 1000 bytes" in error.actual
    assert sum(written) <= len(bomb) + 1000


def test_a_frame_that_asks_for_too_much_memory_is_refused(blobs: Blobs, work: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    refuse(blobs, put_packed(blobs, compressor.compress(DATA) + compressor.flush(), DATA), work)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": len(DATA) - 1},
        {"size": len(DATA) + 1},
        {"size": 0},
        {"blob_size": 1},
        {"digest": digest_of(b"other")},
    ],
)
def test_a_record_that_says_something_else_is_refused(blobs: Blobs, work: Path, fields: dict[str, object]) -> None:
    refuse(blobs, put_packed(blobs, zstandard.compress(DATA), DATA, **fields), work)


@pytest.mark.parametrize("digest", ["", "sha256:..", "sha256:../../../etc/passwd", "sha512:" + "0" * 64, "0" * 64])
def test_a_malformed_digest_never_becomes_a_path(blobs: Blobs, file: File, work: Path, digest: str) -> None:
    for fields in ({"blob": digest}, {"digest": digest}):
        with pytest.raises(CorruptError, match="is not a digest"):
            blobs.extract(msgspec.structs.replace(file, **fields), work / "out")
    with pytest.raises(CorruptError, match="is not a digest"):
        blobs.read(digest, 10)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\\b", "a\0b", "..", ".", "", "x" * 201, ".tmp-1"])
def test_a_file_is_not_stored_under_an_unsafe_name(blobs: Blobs, work: Path, name: str) -> None:
    (work / "a").write_bytes(b"a")
    with pytest.raises(CorruptError, match="not safe"):
        blobs.put_file_zstd(work / "a", name=name)


def test_a_blob_above_the_limit_is_not_read(blobs: Blobs) -> None:
    with pytest.raises(CorruptError, match="more than the 2 bytes"):
        blobs.read(blobs.put_bytes(b"abc").digest, 2)


def test_a_small_file_is_read_into_memory_with_the_same_checks(blobs: Blobs, file: File) -> None:
    assert blobs.load(file, len(DATA)) == DATA
    with pytest.raises(CorruptError, match="at most 5"):
        blobs.load(file, 5)
    with pytest.raises(CorruptError):
        blobs.load(msgspec.structs.replace(file, digest=digest_of(b"")), len(DATA))


def test_a_missing_blob_is_not_found(blobs: Blobs, file: File, work: Path) -> None:
    blobs.path(file.blob).unlink()
    for use in (lambda: blobs.read(file.blob, 100), lambda: blobs.extract(file, work / "out")):
        with pytest.raises(NotFoundError, match=f"{file.blob} is not in the store") as caught:
            use()
        assert caught.value.hint


def test_a_pipe_in_place_of_a_blob_does_not_block(blobs: Blobs, file: File, work: Path) -> None:
    blobs.path(file.blob).unlink()
    os.mkfifo(blobs.path(file.blob))
    with pytest.raises(CorruptError, match="not a regular file"):
        blobs.extract(file, work / "out")


# -- the system says no -----------------------------------------------------------------------------------------------


def test_a_file_where_the_folder_should_be_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file")
    with pytest.raises(StoreError, match="cannot make the folder") as caught:
        Blobs(tmp_path / "blobs").put_bytes(b"x")
    assert str(tmp_path / "blobs") in caught.value.path
    assert "a file stands where a folder should be" in caught.value.hint


@pytest.mark.parametrize(
    ("function", "number", "hint"),
    [
        ("fsync", errno.ENOSPC, "disk is full"),
        ("fsync", errno.EDQUOT, "quota"),
        ("open", errno.EROFS, "read-only"),
        ("open", errno.EACCES, "permission"),
        ("fsync", errno.EIO, "input/output"),
    ],
)
def test_an_os_error_becomes_a_store_error_with_path_and_hint(
    blobs: Blobs, failing_os: Callable[[str, int], None], function: str, number: int, hint: str
) -> None:
    failing_os(function, number)
    with pytest.raises(StoreError) as caught:
        blobs.put_bytes(b"x")
    assert str(blobs.folder) in str(caught.value)
    assert hint in caught.value.hint
    assert caught.value.errno == number
    assert list((blobs.folder / "sha256").iterdir()) == []


def test_a_folder_in_place_of_a_blob_is_a_store_error(blobs: Blobs) -> None:
    blobs.path(digest_of(b"x")).mkdir()
    with pytest.raises(StoreError):
        blobs.put_bytes(b"x")
    with pytest.raises(StoreError):
        blobs.read(digest_of(b"x"), 10)


def test_a_file_system_that_loses_data_is_noticed(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat

    def short(descriptor: int) -> os.stat_result:
        status = list(real(descriptor))
        status[stat.ST_SIZE] -= 1
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", short)
    with pytest.raises(StoreError, match=r"3 bytes were written to .* and 2 are there"):
        blobs.put_bytes(b"abc")


def test_a_file_that_changes_while_it_is_stored_is_a_store_error(
    blobs: Blobs, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "growing").write_bytes(b"x" * 100)
    real = os.fstat

    def smaller(descriptor: int) -> os.stat_result:
        status = list(real(descriptor))
        status[stat.ST_SIZE] -= 50
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", smaller)
    with pytest.raises(StoreError, match="growing could not be compressed as a file of 50 bytes"):
        blobs.put_file_zstd(work / "growing")


def test_a_source_that_cannot_be_read_is_a_store_error(blobs: Blobs, work: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*nothing"):
        blobs.put_file_zstd(work / "nothing")
    with pytest.raises(StoreError, match="not a regular file"):
        blobs.put_file_zstd(work)
    with pytest.raises(StoreError):  # fails in the middle of reading, for root too
        blobs.put_file_zstd(Path("/proc/self/mem"))
