"""Hot copies: once per host, checked each time, and somewhere else where the cache folder cannot be used."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import filelock
import msgspec
import pytest
from sample_artifacts import finish, make_artifact, make_variant, put_file, python

from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.records import File
from aotc.store import Blobs, HotCopies, Store, default_hot_folder, hot

CheckFallback = Callable[[Path], None]
CONTENT = {"model.so": b"the library" * 100, "kernel.cubin": b"the kernel" * 50}


class CountingBlobs:
    """Counts what is decompressed."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs = blobs
        self.extracted: list[str] = []

    def extract(self, file: File, destination: Path) -> None:
        self.extracted.append(file.name)
        self.blobs.extract(file, destination)


@pytest.fixture
def files(store: Store, work: Path) -> list[File]:
    return [put_file(store, work, name, data) for name, data in CONTENT.items()]


@pytest.fixture
def blobs(store: Store) -> CountingBlobs:
    return CountingBlobs(store.blobs)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_lie_under_their_names_read_only(cache: Path, files: list[File], blobs: CountingBlobs) -> None:
    folder = HotCopies(cache).materialise(files, blobs)
    assert contents(folder) == CONTENT
    assert folder.parent == cache / "hot-v1" / "sets"
    for file in files:
        shared = cache / "hot-v1" / "files" / "sha256" / file.digest[7:]
        assert (folder / file.name).samefile(shared)
        assert stat.S_IMODE(shared.stat().st_mode) & 0o222 == 0


def test_the_second_time_nothing_is_decompressed(cache: Path, files: list[File], blobs: CountingBlobs) -> None:
    first = HotCopies(cache).materialise(files, blobs)
    assert HotCopies(cache).materialise(files[::-1], blobs) == first  # nor does the order matter
    assert sorted(blobs.extracted) == ["kernel.cubin", "model.so"]


def test_variants_share_files(cache: Path, store: Store, work: Path, files: list[File], blobs: CountingBlobs) -> None:
    hot_copies = HotCopies(cache)
    other = [put_file(store, work, "model.so", b"another library"), files[1]]
    one, two = hot_copies.materialise(files, blobs), hot_copies.materialise(other, blobs)
    assert one != two
    assert (one / "kernel.cubin").samefile(two / "kernel.cubin")
    assert blobs.extracted.count("kernel.cubin") == 1


def test_one_file_under_two_names_is_decompressed_once(cache: Path, files: list[File], blobs: CountingBlobs) -> None:
    twice = [files[0], msgspec.structs.replace(files[0], name="again.so")]
    folder = HotCopies(cache).materialise(twice, blobs)
    assert contents(folder) == {"model.so": CONTENT["model.so"], "again.so": CONTENT["model.so"]}
    assert len(blobs.extracted) == 1


def test_a_prewarmed_read_only_cache_needs_no_write(
    cache: Path, files: list[File], blobs: CountingBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = HotCopies(cache).materialise(files, blobs)
    real = os.open

    def read_only(path: str, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    assert HotCopies(cache).materialise(files, blobs) == folder


def test_a_set_of_no_files_is_refused(cache: Path, blobs: CountingBlobs) -> None:
    with pytest.raises(CorruptError, match="set of no files"):
        HotCopies(cache).materialise([], blobs)


# -- damage -----------------------------------------------------------------------------------------------------------


def overwrite(path: Path, data: bytes) -> None:
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: overwrite(path, b"x" * path.stat().st_size),
        lambda path: overwrite(path, path.read_bytes()[:-1]),
        lambda path: overwrite(path, b""),
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.write_bytes(b"not the same inode")),
        lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["changed", "truncated", "emptied", "removed", "replaced", "symlink", "pipe"],
)
def test_a_damaged_hot_copy_is_replaced_from_the_store(
    cache: Path, files: list[File], blobs: CountingBlobs, damage: Callable[[Path], object]
) -> None:
    folder = HotCopies(cache).materialise(files, blobs)
    damage(folder / "model.so")
    assert HotCopies(cache).materialise(files, blobs) == folder
    assert contents(folder) == CONTENT
    assert blobs.extracted.count("kernel.cubin") == 1


def test_every_changed_byte_of_a_hot_copy_is_seen(cache: Path, store: Store, work: Path, blobs: CountingBlobs) -> None:
    file = put_file(store, work, "small", b"a small file")
    for position in range(file.size):
        path = HotCopies(cache).materialise([file], blobs) / "small"
        data = path.read_bytes()
        overwrite(path, data[:position] + b"?" + data[position + 1 :])
    HotCopies(cache).materialise([file], blobs)
    assert len(blobs.extracted) == file.size + 1


def test_what_is_mapped_stays_while_its_hot_copy_is_replaced(
    cache: Path, files: list[File], blobs: CountingBlobs
) -> None:
    folder = HotCopies(cache).materialise(files, blobs)
    with (folder / "model.so").open("rb") as stream:
        (folder / "model.so").unlink()
        HotCopies(cache).materialise(files, blobs)
        assert stream.read() == CONTENT["model.so"]


def test_temporaries_of_a_killed_process_do_not_matter(cache: Path, files: list[File], blobs: CountingBlobs) -> None:
    (cache / "hot-v1" / "sets" / ".tmp-0123456789abcdef").mkdir(parents=True)
    (cache / "hot-v1" / "files" / "sha256").mkdir(parents=True)
    (cache / "hot-v1" / "files" / "sha256" / ".tmp-0123456789abcdef").write_bytes(b"half")
    assert contents(HotCopies(cache).materialise(files, blobs)) == CONTENT


def test_a_corrupt_blob_is_refused_and_leaves_no_set(cache: Path, store: Store, files: list[File]) -> None:
    store.blobs.path(files[1].blob).write_bytes(b"x" * files[1].blob_size)
    with pytest.raises(CorruptError) as caught:
        HotCopies(cache).materialise(files, store.blobs)
    assert caught.value.expected == files[1].blob
    assert not (cache / "hot-v1" / "sets").exists()


def test_a_missing_blob_is_not_found_and_no_reason_to_fall_back(cache: Path, store: Store, files: list[File]) -> None:
    store.blobs.path(files[1].blob).unlink()
    with pytest.raises(NotFoundError):
        HotCopies(cache).materialise(files, store.blobs)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\0b", "..", ".", "", "a\\b"])
def test_an_unsafe_name_is_refused_before_anything_is_made(
    cache: Path, files: list[File], blobs: CountingBlobs, name: str
) -> None:
    with pytest.raises(CorruptError, match="not safe"):
        HotCopies(cache).materialise([files[0], msgspec.structs.replace(files[1], name=name)], blobs)
    assert not cache.exists()


def test_two_files_of_one_name_are_refused(cache: Path, files: list[File], blobs: CountingBlobs) -> None:
    with pytest.raises(CorruptError, match=r"two files of one set are called model\.so"):
        HotCopies(cache).materialise([files[0], msgspec.structs.replace(files[1], name="model.so")], blobs)


def test_where_there_are_no_hard_links_files_are_copied(
    cache: Path, files: list[File], blobs: CountingBlobs, failing_os: Callable[[str, int], None]
) -> None:
    failing_os("link", errno.EPERM)
    folder = HotCopies(cache).materialise(files, blobs)
    assert contents(folder) == CONTENT
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o222 == 0 for path in folder.iterdir())
    overwrite(folder / "model.so", b"damaged")
    assert contents(HotCopies(cache).materialise(files, blobs)) == CONTENT


# -- many processes ---------------------------------------------------------------------------------------------------

LOAD = """
import os, sys, time
from pathlib import Path
from aotc.records import Artifact, decode
from aotc.store import HotCopies, Store

class Logging:
    def __init__(self, blobs):
        self.blobs = blobs
    def extract(self, file, destination):
        with open(sys.argv[3], "a") as log:  # one short append is atomic
            log.write(f"{file.digest}\\n")
        time.sleep(0.05)  # long enough for the others to come
        self.blobs.extract(file, destination)

store = Store.open(sys.argv[1])
files = list(decode(Path(sys.argv[4]).read_bytes(), Artifact).variants[0].files)
while time.time() < float(sys.argv[5]):
    pass
folder = HotCopies(Path(sys.argv[2])).materialise(files, Logging(store.blobs))
print(sum((folder / file.name).stat().st_size == file.size for file in files), folder)
"""


def test_eight_processes_that_start_together_decompress_each_blob_once(
    cache: Path, store: Store, work: Path, tmp_path: Path
) -> None:
    many = tuple(put_file(store, work, f"file-{number}", os.urandom(5000)) for number in range(6))
    (tmp_path / "record").write_bytes(make_artifact((make_variant(many),)).encode())
    start = time.time() + 3
    arguments = (store.path, cache, tmp_path / "log", tmp_path / "record", start)
    outputs = {finish(process) for process in [python(LOAD, *arguments) for _ in range(8)]}
    assert len(outputs) == 1
    assert outputs.pop().startswith("6 ")
    extracted = (tmp_path / "log").read_text().split()
    assert sorted(extracted) == sorted(file.digest for file in many)
    for file in many:
        assert (cache / "hot-v1" / "files" / "sha256" / file.digest[7:]).stat().st_nlink == 2
    assert list(cache.rglob(".tmp-*")) == []


def test_a_lock_that_stays_held_is_a_store_error(cache: Path, files: list[File], blobs: CountingBlobs) -> None:
    (cache / "hot-v1" / "locks").mkdir(parents=True)
    with (
        filelock.FileLock(cache / "hot-v1" / "locks" / f"{files[0].digest[7:]}.lock"),
        pytest.raises(StoreError, match=r"was not free within 0\.05 s; another aotc process may hold it") as caught,
    ):
        HotCopies(cache, lock_timeout=0.05).materialise(files, blobs)
    assert caught.value.hint


def test_a_set_that_a_stuck_process_holds_is_not_waited_for_for_ever(
    cache: Path, files: list[File], blobs: CountingBlobs, private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that is stopped while it takes the set away."""
    with contextlib.closing(HotCopies(cache)) as earlier:
        folder = earlier.materialise(files, blobs)
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    made: list[Path] = []
    late = HotCopies(cache, lock_timeout=0.05)
    with caplog.at_level(logging.WARNING, "aotc"):
        loading = threading.Thread(target=lambda: made.append(late.materialise(files, blobs)), daemon=True)
        loading.start()
        loading.join(60)
    os.close(descriptor)
    assert made and made[0].is_relative_to(private)
    assert contents(made[0]) == CONTENT
    [record] = caplog.records
    assert f"cannot lock {folder}: another process has held it for 0.05 s" in record.getMessage()


def test_an_eviction_by_a_stuck_process_is_not_waited_for_for_ever(
    cache: Path, files: list[File], blobs: CountingBlobs, private: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = cache / "hot-v1" / "locks" / "evict.lock"
    lock.parent.mkdir(parents=True)
    with filelock.FileLock(lock), caplog.at_level(logging.WARNING, "aotc"):
        folder = HotCopies(cache, lock_timeout=0.05).materialise(files, blobs)
    assert folder.is_relative_to(private)
    assert contents(folder) == CONTENT
    [record] = caplog.records
    assert f"the lock {lock} was not free within 0.05 s" in record.getMessage()


# -- where ------------------------------------------------------------------------------------------------------------


def test_the_folder_is_the_one_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("AOTC_CACHE_DIR", "/chosen")
    assert default_hot_folder() == Path("/chosen")
    monkeypatch.setenv("AOTC_CACHE_DIR", "")
    assert default_hot_folder() == Path("/xdg/aotc")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert default_hot_folder() == Path("/home/someone/.cache/aotc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_hot_folder() == Path("/home/someone/.cache/aotc")


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder for private copies."""
    folder = tmp_path / "private"
    folder.mkdir()
    monkeypatch.setattr(hot, "private_parents", lambda: iter([tmp_path / "no such folder", folder]))
    return folder


@pytest.fixture
def check_fallback(
    files: list[File], blobs: CountingBlobs, private: Path, caplog: pytest.LogCaptureFixture
) -> CheckFallback:
    """That hot copies for this cache folder go to a private one, and that it is said once."""

    def check(cache: Path) -> None:
        hot_copies = HotCopies(cache)
        with caplog.at_level(logging.WARNING, "aotc"):
            folder = hot_copies.materialise(files, blobs)
        assert contents(folder) == CONTENT
        assert folder.is_relative_to(private)
        made = next(private.iterdir())
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        [record] = caplog.records
        assert str(made) in record.getMessage()
        assert str(cache) in record.getMessage()
        assert hot_copies.materialise(files, blobs) == folder  # and it stays there
        assert len(blobs.extracted) == len(files)
        assert len(caplog.records) == 1

    return check


def test_a_file_in_place_of_the_cache_folder_leads_elsewhere(tmp_path: Path, check_fallback: CheckFallback) -> None:
    (tmp_path / "file").write_text("")
    check_fallback(tmp_path / "file" / "cache")


def test_a_cache_folder_in_proc_leads_elsewhere(check_fallback: CheckFallback) -> None:
    check_fallback(Path("/proc/aotc"))


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.ENOLCK])
def test_a_cache_folder_that_cannot_be_written_leads_elsewhere(
    cache: Path, check_fallback: CheckFallback, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def failing(path: str | Path, flags: int, *rest: int, **others: int) -> int:
        if str(path).startswith(str(cache)) and flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **others)

    monkeypatch.setattr(os, "open", failing)
    check_fallback(cache)


def test_a_disk_that_fills_half_way_leads_elsewhere_and_leaves_nothing_half(
    cache: Path,
    files: list[File],
    blobs: CountingBlobs,
    private: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.fstat

    def full(descriptor: int) -> os.stat_result:  # the length check, which comes after the last byte was written
        written = Path(f"/proc/self/fd/{descriptor}").readlink()
        if str(written).startswith(f"{cache}/hot-v1/files/sha256/.tmp-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", full)
    hot_copies = HotCopies(cache)
    with caplog.at_level(logging.WARNING, "aotc"):
        assert contents(hot_copies.materialise(files, blobs)) == CONTENT
    assert "No space left" in caplog.text
    assert list((cache / "hot-v1" / "files" / "sha256").iterdir()) == []


def test_a_set_that_cannot_be_renamed_leads_elsewhere(
    cache: Path,
    files: list[File],
    blobs: CountingBlobs,
    private: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.rename

    def full(source: Path, destination: Path) -> None:
        if Path(destination).parent == cache / "hot-v1" / "sets":
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(source, destination)

    monkeypatch.setattr(os, "rename", full)
    with caplog.at_level(logging.WARNING, "aotc"):
        assert contents(HotCopies(cache).materialise(files, blobs)) == CONTENT
    assert "Disk quota exceeded" in caplog.text
    assert list((cache / "hot-v1" / "sets").iterdir()) == []


def test_a_cache_folder_mounted_noexec_leads_elsewhere(
    cache: Path, check_fallback: CheckFallback, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_flag=os.ST_NOEXEC if Path(path).is_relative_to(cache) else 0)

    monkeypatch.setattr(os, "statvfs", statvfs)
    check_fallback(cache)
    assert "noexec" in caplog.text


def test_no_home_leads_elsewhere(
    files: list[File],
    blobs: CountingBlobs,
    private: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("AOTC_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert contents(HotCopies().materialise(files, blobs)) == CONTENT
    assert "no home folder" in caplog.text


def test_where_no_folder_can_be_written_the_error_lists_all(
    tmp_path: Path, files: list[File], blobs: CountingBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / name for name in ("cache", "shm", "tmp")]
    monkeypatch.setattr(hot, "private_parents", lambda: iter(places[1:]))
    with pytest.raises(StoreError, match="no folder can hold the hot copies") as caught:
        HotCopies(places[0]).materialise(files, blobs)
    assert "AOTC_CACHE_DIR" in caught.value.hint
    assert [issue.where for issue in caught.value.issues] == [str(place) for place in places]


def test_a_private_folder_that_fills_is_taken_away_and_the_next_is_tried(
    tmp_path: Path, files: list[File], blobs: CountingBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, free = tmp_path / "full", tmp_path / "free"
    full.mkdir()
    free.mkdir()
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        written = Path(f"/proc/self/fd/{descriptor}").readlink()
        if written.is_relative_to(full) and written.name.startswith(".tmp-"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(hot, "private_parents", lambda: iter([full, free]))
    assert HotCopies(Path("/proc/aotc")).materialise(files, blobs).is_relative_to(free)
    assert list(full.iterdir()) == []


def test_private_folders_are_tried_in_memory_first() -> None:
    assert list(hot.private_parents()) == [Path("/dev/shm"), Path(tempfile.gettempdir())]


def test_a_private_folder_goes_with_its_process_and_not_with_a_fork(store: Store, files: list[File]) -> None:
    code = """
import os, sys
from pathlib import Path
from aotc.records import File
from aotc.store import HotCopies, Store
file = File(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6]))
folder = HotCopies(Path("/proc/aotc")).materialise([file], Store.open(sys.argv[1]).blobs)
if os.fork() == 0:
    sys.exit()
os.wait()
assert (folder / file.name).exists()
print(folder.parents[2])
"""
    arguments = [getattr(files[0], name) for name in ("name", "digest", "size", "blob", "blob_size")]
    out = finish(python(code, store.path, *arguments)).strip()
    assert Path(out).name.startswith("aotc-")
    assert not Path(out).exists()
