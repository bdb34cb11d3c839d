"""Hot copies within a limit: the least recently used go, and never one that a running process holds."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import ROOT
from sample_artifacts import CREATED, finish, put_file, python, stored_artifact

from aotc.errors import StoreError
from aotc.records import File
from aotc.store import HotCopies, Store, parse_reference, publish, read_artifact, read_bundle
from aotc.store.evict import FOLDERS as HOT_FOLDERS
from aotc.store.evict import evict
from aotc.store.fsck_hot import fsck_hot
from aotc.store.gc_hot import collect_hot
from aotc.store.remote_store import RemoteStore

SIZE = 10_000


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def sets(store: Store, work: Path) -> list[list[File]]:
    """Files of four sets, each of `SIZE` bytes."""
    return [[put_file(store, work, "model.so", bytes([number]) * SIZE)] for number in range(4)]


def materialise(cache: Path, store: Store, files: list[File], when: float | None = None) -> Path:
    """A set that nobody holds, last used at `when`."""
    hot = HotCopies(cache)
    folder = hot.materialise(files, store.blobs)
    hot.close()
    if when is not None:
        os.utime(folder, (when, when))
    return folder


def in_cache(cache: Path) -> set[str]:
    return {path.name for path in (cache / "hot-v1" / "sets").iterdir()}


def bytes_in(cache: Path) -> int:
    files = [path for path in (cache / "hot-v1").rglob("*") if path.is_file() and path.suffix != ".lock"]
    return sum({path.stat().st_ino: path.stat().st_size for path in files}.values())


def test_the_least_recently_used_go_until_the_limit_is_kept(cache: Path, store: Store, sets: list[list[File]]) -> None:
    folders = [materialise(cache, store, files, when=1000.0 + number) for number, files in enumerate(sets)]
    materialise(cache, store, sets[0])  # used again
    freed = evict(cache, max_size=2 * SIZE)
    assert in_cache(cache) == {folders[0].name, folders[3].name}
    assert [removal.name for removal in freed.removed] == [f"sets/{folders[1].name}", f"sets/{folders[2].name}"]
    assert (freed.freed, freed.kept, freed.over) == (2 * SIZE, 2 * SIZE, 0)
    assert bytes_in(cache) == 2 * SIZE
    assert fsck_hot(cache).findings == ()


def test_an_age_takes_what_was_not_used_for_that_long(cache: Path, store: Store, sets: list[list[File]]) -> None:
    old, new = materialise(cache, store, sets[0], when=time.time() - 1000), materialise(cache, store, sets[1])
    assert evict(cache, older_than=2000.0).removed == ()
    evict(cache, older_than=500.0)
    assert in_cache(cache) == {new.name}
    assert not old.exists()


def test_a_dry_run_takes_nothing(cache: Path, store: Store, sets: list[list[File]]) -> None:
    for files in sets:
        materialise(cache, store, files)
    said = evict(cache, max_size=SIZE, dry_run=True)
    assert len(in_cache(cache)) == 4
    assert evict(cache, max_size=SIZE).removed == said.removed


def test_what_sets_share_is_counted_once_and_goes_with_the_last(cache: Path, store: Store, work: Path) -> None:
    shared = put_file(store, work, "kernel.bin", b"k" * SIZE)
    own = [put_file(store, work, "model.so", bytes([number]) * 10) for number in range(2)]
    for number, file in enumerate(own):
        materialise(cache, store, [file, shared], when=1000.0 + number)
    freed = evict(cache, max_size=SIZE + 10)
    assert (freed.freed, freed.kept) == (10, SIZE + 10)
    assert evict(cache, max_size=0).freed == SIZE + 10
    assert bytes_in(cache) == 0


def test_where_there_are_no_hard_links_copies_are_counted_and_removed(
    cache: Path, store: Store, sets: list[list[File]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    for number, files in enumerate(sets):
        materialise(cache, store, files, when=1000.0 + number)
    assert evict(cache, max_size=2 * SIZE).kept == 2 * SIZE
    assert bytes_in(cache) == 2 * SIZE
    assert len(in_cache(cache)) == 2


def test_a_set_that_was_handed_out_is_held_until_it_is_let_go(
    cache: Path, store: Store, sets: list[list[File]]
) -> None:
    """Also between its making and the mapping of its library, which the system itself knows nothing of."""
    hot = HotCopies(cache)
    folder = hot.materialise(sets[0], store.blobs)
    freed = evict(cache, max_size=0)
    assert (freed.removed, freed.over) == ((), SIZE)
    assert folder.exists()
    hot.close()
    assert evict(cache, max_size=0).over == 0
    assert not folder.exists()
    again = hot.materialise(sets[0], store.blobs)
    assert evict(cache, max_size=0).over == SIZE
    assert again.exists()
    del hot
    gc.collect()
    assert evict(cache, max_size=0).over == 0


HOLD = """
import os, sys, time
from pathlib import Path
from aotc.records import File, decode
from aotc.store import HotCopies, Store, parse_reference, publish, read_artifact, read_bundle
file = decode(Path(sys.argv[3]).read_bytes(), File)
hot = HotCopies(Path(sys.argv[2]))
print(hot.materialise([file], Store.open(sys.argv[1]).blobs), flush=True)
if len(sys.argv) > 4 and os.fork() == 0:  # a child has mapped what its parent has
    time.sleep(60)
time.sleep(60 if len(sys.argv) == 4 else 0)
"""


@pytest.mark.parametrize("forked", [False, True])
def test_other_processes_hold_their_sets_until_they_end(
    cache: Path, store: Store, sets: list[list[File]], tmp_path: Path, forked: bool
) -> None:
    import msgspec

    (tmp_path / "file").write_bytes(msgspec.json.encode(sets[0][0]))
    arguments = [str(store.path), str(cache), str(tmp_path / "file"), *(["fork"] if forked else [])]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        if forked:
            process.wait()  # the parent has ended; its child lives
        assert evict(cache, max_size=0).over == SIZE
        assert folder.exists()
    finally:
        os.killpg(process.pid, 9)
        process.communicate()
    deadline = time.monotonic() + 10
    while evict(cache, max_size=0).over and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not folder.exists()


def test_a_limit_is_kept_whenever_something_is_added(cache: Path, store: Store, sets: list[list[File]]) -> None:
    last = ""
    for files in sets:
        hot = HotCopies(cache, limit=2 * SIZE)
        last = hot.materialise(files, store.blobs).name
        hot.close()
        assert bytes_in(cache) <= 2 * SIZE
    assert len(in_cache(cache)) == 2
    assert last in in_cache(cache)


def test_the_limit_comes_from_the_environment(
    cache: Path, store: Store, sets: list[list[File]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_CACHE_LIMIT", "25kB")
    for files in sets:
        materialise(cache, store, files)
    assert len(in_cache(cache)) == 2
    monkeypatch.setenv("AOTC_CACHE_LIMIT", "much")
    with pytest.raises(StoreError, match="AOTC_CACHE_LIMIT: 'much' is no size"):
        materialise(cache, store, sets[0])


def test_a_limit_that_cannot_be_kept_is_said(
    cache: Path, store: Store, sets: list[list[File]], caplog: pytest.LogCaptureFixture
) -> None:
    hot = HotCopies(cache, limit=SIZE)
    with caplog.at_level(logging.WARNING, "aotc"):
        for files in sets[:2]:
            hot.materialise(files, store.blobs)
    assert f"take {2 * SIZE} bytes, {SIZE} over the limit" in caplog.text
    assert len(in_cache(cache)) == 2


STRESS = """
import random, sys, time
from pathlib import Path
from aotc.records import File, decode
from aotc.store import HotCopies, Store, parse_reference, publish, read_artifact, read_bundle
store, cache = Store.open(sys.argv[1]), Path(sys.argv[2])
files = [decode(path.read_bytes(), File) for path in sorted(Path(sys.argv[3]).iterdir())]
end, count = time.monotonic() + 3, 0
while time.monotonic() < end:
    hot = HotCopies(cache, limit=int(sys.argv[4]))
    chosen = random.choice(files)
    folder = hot.materialise([chosen], store.blobs)
    time.sleep(random.random() / 200)
    data = (folder / chosen.name).read_bytes()  # between the making and the mapping
    assert len(data) == chosen.size
    hot.close()
    count += 1
print(count)
"""


def test_processes_that_evict_each_others_sets_never_miss_their_own(
    cache: Path, store: Store, sets: list[list[File]], tmp_path: Path
) -> None:
    import msgspec

    (tmp_path / "files").mkdir()
    for number, (file,) in enumerate(sets):
        (tmp_path / "files" / str(number)).write_bytes(msgspec.json.encode(file))
    arguments = (store.path, cache, tmp_path / "files", SIZE)
    counts = [int(finish(process)) for process in [python(STRESS, *arguments) for _ in range(4)]]
    assert min(counts) > 10
    assert fsck_hot(cache).errors == []
    evict(cache, max_size=0)
    assert bytes_in(cache) == 0
    assert list((cache / "hot-v1").rglob(".tmp-*")) == []


def test_what_killed_processes_left_goes(
    cache: Path, store: Store, sets: list[list[File]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = materialise(cache, store, sets[0])
    (cache / "hot-v1" / "files" / "sha256" / ".tmp-0000000000000000").write_bytes(b"half")
    (folder.parent / ".tmp-0101010101010101").mkdir()
    (folder / ".tmp-0202020202020202").write_bytes(b"half")
    dead, foreign = tmp_path / "aotc-hot-abcdefgh", tmp_path / "aotc-hot"
    dead.mkdir()
    foreign.mkdir()
    os.utime(dead, (0, 0))
    monkeypatch.setattr("aotc.store.gc_hot.private_parents", lambda: iter([tmp_path]))
    freed = collect_hot(cache)
    assert sorted(removal.kind for removal in freed.removed) == ["temporary"] * 3 + ["work folder"]
    assert (folder.exists(), dead.exists(), foreign.exists()) == (True, False, True)


@pytest.mark.parametrize(
    "folder", [*HOT_FOLDERS, "remote-v1", "remote-v1/sha256", "staging-v1", "staging-v1/0123456789abcdef"]
)
def test_nothing_in_the_cache_is_removed_behind_a_link(
    cache: Path, store: Store, sets: list[list[File]], tmp_path: Path, folder: str
) -> None:
    materialise(cache, store, sets[0])
    his = tmp_path / "his"
    names = ("0" * 64, f".tmp-{'0' * 16}", f".tmp-{'0' * 64}", "evict.lock", "thesis.txt")
    for inner in ("", "files", "files/sha256", "sets", "downloads", "downloads/sha256", "sha256", "sets/" + "1" * 64):
        (his / inner).mkdir(parents=True, exist_ok=True)
        for path in (his / inner / name for name in names):
            path.touch()
            os.utime(path, (0, 0))
    before = sorted(his.rglob("*"))
    shutil.rmtree(cache / folder, ignore_errors=True)
    (cache / folder).parent.mkdir(parents=True, exist_ok=True)
    (cache / folder).symlink_to(his)
    with pytest.raises(StoreError, match=f"{folder} is a link to {his}"):
        collect_hot(cache, max_size=0, older_than=0.0, grace=0.0)
    if folder in HOT_FOLDERS:
        with pytest.raises(StoreError, match=f"{folder} is a link to {his}"):
            fsck_hot(cache, repair=True)
    assert sorted(his.rglob("*")) == before


def test_what_has_another_name_than_a_hot_copy_has_stays(cache: Path, store: Store, sets: list[list[File]]) -> None:
    materialise(cache, store, sets[0])
    folders = ["hot-v1", *HOT_FOLDERS, "remote-v1/sha256"]
    his = [cache / folder / name for folder in folders for name in ("thesis.txt", ".tmp-mine", "0" * 63)]
    for path in his:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (0, 0))
    fsck_hot(cache, repair=True)
    collect_hot(cache, max_size=0, older_than=0.0, grace=0.0)
    assert all(path.exists() for path in his)
    assert bytes_in(cache) == 0


def test_a_set_whose_maker_was_killed_while_it_copied_goes_with_what_is_in_it(
    cache: Path, store: Store, sets: list[list[File]]
) -> None:
    """Where there are no hard links, a set that is being made holds a file that is."""
    folder = materialise(cache, store, sets[0])
    half = folder.with_name(".tmp-0101010101010101")
    half.mkdir()
    (half / ".tmp-0202020202020202").write_bytes(b"half")
    freed = evict(cache)
    assert [(removal.name, removal.size) for removal in freed.removed] == [("sets/.tmp-0101010101010101", 4)]
    assert in_cache(cache) == {folder.name}


def test_a_download_that_broke_waits_an_hour_for_a_load_to_go_on_with_it(
    cache: Path, store: Store, sets: list[list[File]]
) -> None:
    materialise(cache, store, sets[0])
    downloads = cache / "hot-v1" / "downloads" / "sha256"
    downloads.mkdir(parents=True)
    young, old = (downloads / f".tmp-{digit * 64}" for digit in "ab")
    for path in (young, old):
        path.write_bytes(b"half of it")
    os.utime(old, (time.time() - 3700,) * 2)
    assert [(finding.kind, finding.path) for finding in fsck_hot(cache).findings] == [
        ("temporary", f"downloads/sha256/{old.name}")
    ]
    freed = evict(cache)
    assert [removal.name for removal in freed.removed] == [f"downloads/sha256/{old.name}"]
    assert young.exists() and not old.exists()


def test_a_private_folder_in_use_stays(store: Store, sets: list[list[File]], monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago it changed: its process holds it."""
    hot = HotCopies(Path("/proc/aotc"))
    folder = hot.materialise(sets[0], store.blobs)
    private = folder.parents[2]
    os.utime(private, (0, 0))
    monkeypatch.setattr("aotc.store.gc_hot.private_parents", lambda: iter([private.parent]))
    hot.close()
    assert str(private) not in [removal.name for removal in collect_hot(Path("/proc/aotc"), dry_run=True).removed]
    shutil.rmtree(private)


# -- what remotes have left -------------------------------------------------------------------------------------------


def served(tmp_path: Path, work: Path) -> str:
    """A store at a URL."""
    store = Store.create(tmp_path / "there")
    publish(store, "tiny", "v1", [stored_artifact(store, work, (1,))], created=CREATED)
    return f"file://{store.path}"


def read(url: str, cache: Path) -> None:
    remote = RemoteStore.cached(url, cache)
    for entry in read_bundle(remote, parse_reference(f"{url}#tiny:v1")).artifacts:
        read_artifact(remote, entry.digest)


def test_documents_of_remotes_go_when_they_were_not_read_for_long(cache: Path, tmp_path: Path, work: Path) -> None:
    url = served(tmp_path, work)
    read(url, cache)
    documents = sorted((cache / "remote-v1" / "sha256").iterdir())
    for path in documents:
        os.utime(path, (0, 0))
    stranger = documents[0].with_name("0" * 64)
    stranger.write_bytes(b"of a bundle that nobody loads any more")
    os.utime(stranger, (0, 0))
    read(url, cache)
    assert len(documents) == 3
    assert collect_hot(cache).removed == ()
    said = collect_hot(cache, older_than=3600.0, dry_run=True)
    assert stranger.exists()
    freed = collect_hot(cache, older_than=3600.0)
    assert said.removed == freed.removed
    assert [(one.kind, Path(one.name).name) for one in freed.removed] == [("document", stranger.name)]
    assert sorted(stranger.parent.iterdir()) == documents
    collect_hot(cache, older_than=-10.0)
    assert not list(stranger.parent.iterdir())
    read(url, cache)


def test_what_builds_for_a_url_put_together_goes_with_age_and_what_was_accepted_stays(cache: Path, work: Path) -> None:
    staged = Store.create(cache / "staging-v1" / "0123456789abcdef")
    publish(staged, "tiny", "v1", [stored_artifact(staged, work, (1,))], created=CREATED)
    accepted = cache / "trust-v1" / f"{64 * '0'}.json"
    accepted.parent.mkdir()
    accepted.write_text("the newest accepted signature")
    os.utime(accepted, (0, 0))
    assert collect_hot(cache, older_than=3600.0, grace=0.0).removed == ()
    for path in staged.path.rglob("*"):
        os.utime(path, (0, 0))
    freed = collect_hot(cache, older_than=3600.0, grace=0.0)
    assert "staging-v1/0123456789abcdef/tiny:v1" in [one.name for one in freed.removed]
    assert staged.tags() == []
    assert accepted.exists()


@pytest.mark.parametrize("repair", [False, True])
def test_a_cache_folder_that_cannot_be_looked_at_is_said(tmp_path: Path, repair: bool) -> None:
    root = tmp_path / ("n" * 300)
    for work in (lambda: evict(root), lambda: evict(root, dry_run=True), lambda: fsck_hot(root, repair=repair)):
        with pytest.raises(StoreError, match=f"{root}.*: File name too long"):
            work()
