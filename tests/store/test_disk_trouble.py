"""Full disks, read-only folders, lost permissions, no locks: typed errors with hints, and nothing half-visible.

The disks are real (a tmpfs that the test mounts, so it needs root), and so are the permissions (a process of another
user). Of a file system without locks there is none to be had: there, `flock` is made to answer as one does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sample_artifacts import CREATED, PYTHONPATH, make_artifact, make_variant, put_file, stored_artifact

from aotc.digest import sha256_bytes
from aotc.errors import StoreError
from aotc.records import Artifact
from aotc.store.layout.bundle import each_file, read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, put_unit
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import parse_reference

DISK = 1 << 20
NOBODY = 65534


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root and CAP_SYS_ADMIN")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def published(disk: Path, work: Path) -> tuple[Store, Artifact]:
    """A store on the small disk, with tiny:v1 and some old garbage."""
    store = Store.create(disk / "store")
    artifact = stored_artifact(store, work)
    publish(store, "tiny", "v1", [artifact], created=CREATED)
    with store.writing("so that its folder is there"):
        garbage = store.blobs.put_bytes(os.urandom(20_000))
    os.utime(store.blobs.path(garbage.digest), (0, 0))
    return store, artifact


def fill(disk: Path) -> Path:
    """Leave no byte free."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        while stream.write(b"\0" * 4096):
            pass
    return path


def listing(store: Store) -> set[str]:
    return {str(path.relative_to(store.path)) for path in store.path.rglob("*")}


Writes = Callable[[Store, Artifact, Path], object]

WRITES: dict[str, Writes] = {
    "store a file": lambda store, artifact, work: put_file(store, work, "big.so", os.urandom(100_000)),
    "store a unit": lambda store, artifact, work: put_unit(store, unit_of(artifact)),
    "publish": lambda store, artifact, work: publish(store, "tiny", "v2", [artifact], created=CREATED),
    "move a tag": lambda store, artifact, work: store.set_tag(
        "tiny", "v1", store.resolve(parse_reference(f"tiny@{read_bundle(store, parse_reference('tiny')).digest}"))
    ),
    "remove a tag": lambda store, artifact, work: collect(store, Policy(untag=True, keep_last=0)),
}


def unit_of(artifact: Artifact) -> UnitRecord:
    import msgspec

    one = msgspec.structs.replace(artifact, variants=artifact.variants[:1])
    return UnitRecord(sha256_bytes(b"key"), {}, one, 1.0, CREATED)


def check_intact(store: Store, artifact: Artifact, before: set[str]) -> None:
    """The store is as it was, to the last file."""
    assert listing(store) == before
    assert [str(entry) for entry in store.tags()] == ["tiny:latest", "tiny:v1"]
    assert fsck(store.path).errors == []
    for file in each_file(artifact):
        store.blobs.verify(file)


@pytest.mark.parametrize("name", WRITES)
def test_a_full_disk_leaves_the_store_as_it_was(
    disk: Path, published: tuple[Store, Artifact], work: Path, name: str
) -> None:
    store, artifact = published
    publish(store, "tiny", "latest", [artifact], created="2026-02-02T00:00:00Z")
    put_unit(store, unit_of(artifact))
    (store.path / ".aotc" / "units" / f"{sha256_bytes(b'key')[7:]}.json").unlink()
    before = listing(store)
    filler = fill(disk)
    with pytest.raises(StoreError) as caught:
        WRITES[name](store, artifact, work)
    assert caught.value.errno == errno.ENOSPC
    assert "free space" in caught.value.hint
    check_intact(store, artifact, before)
    filler.unlink()
    WRITES[name](store, artifact, work)
    assert fsck(store.path).errors == []


def test_gc_frees_a_full_disk(disk: Path, published: tuple[Store, Artifact]) -> None:
    store, artifact = published
    fill(disk)
    assert collect(store, Policy()).freed == 20_000
    publish(store, "tiny", "v2", [artifact], created=CREATED)
    assert fsck(store.path).findings == ()


def test_a_new_store_on_a_full_disk_is_finished_later(disk: Path) -> None:
    filler = fill(disk)
    with pytest.raises(StoreError) as caught:
        Store.create(disk / "store")
    assert caught.value.errno == errno.ENOSPC
    assert fsck(disk / "store").errors == []
    filler.unlink()
    Store.create(disk / "store")
    assert fsck(disk / "store", repair=True).findings == ()


@pytest.mark.parametrize("name", [*WRITES, "gc", "fsck --repair"])
def test_a_read_only_disk_is_read_and_not_written(
    disk: Path, published: tuple[Store, Artifact], work: Path, name: str
) -> None:
    store, artifact = published
    publish(store, "tiny", "latest", [artifact], created="2026-02-02T00:00:00Z")
    before = listing(store)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    writes = {
        **WRITES,
        "gc": lambda store, artifact, work: collect(store, Policy()),
        "fsck --repair": lambda store, artifact, work: fsck(store.path, repair=True),
    }
    with pytest.raises(StoreError) as caught:
        writes[name](store, artifact, work)
    assert caught.value.errno == errno.EROFS
    assert "read-only" in caught.value.hint
    check_intact(store, artifact, before)
    assert collect(store, Policy(), dry_run=True).freed == 20_000
    for file in artifact.variants[0].files:
        store.blobs.verify(file)


# -- permissions ------------------------------------------------------------------------------------------------------

AS_NOBODY = """
import json, os, sys
from pathlib import Path
from sample_artifacts import *
from aotc.errors import StoreError
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, put_unit
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
os.chdir(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
store, work = Store.open(Path("store")), Path("work")
def wait():
    print("ready", flush=True)
    sys.stdin.readline()
try:
    if sys.argv[2] == "build":
        with store.writing("a build"):
            put_file(store, work, "first.so", b"first")
            wait()
            put_file(store, work, "second.so", b"second")
    elif sys.argv[2] == "publish":
        artifact = stored_artifact(store, work)
        wait()
        publish(store, "tiny", "v2", [artifact], created=CREATED)
    elif sys.argv[2] == "gc":
        wait()
        collect(store, Policy(grace=0.0))
    print("{}")
except StoreError as error:
    print(json.dumps({"errno": error.errno, "hint": error.hint}))
"""


@pytest.mark.parametrize("name", ["build", "publish", "gc"])
def test_permissions_lost_in_the_middle_are_told_and_leave_the_store_whole(
    tmp_path: Path, store: Store, work: Path, name: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    artifact = stored_artifact(store, work)
    publish(store, "tiny", "v1", [artifact], created=CREATED)
    store.blobs.put_bytes(b"garbage")
    tmp_path.chmod(0o755)
    for path in [store.path, work, *store.path.rglob("*"), *work.iterdir()]:
        os.chown(path, NOBODY, NOBODY)
    process = subprocess.Popen(
        [sys.executable, "-c", AS_NOBODY, str(tmp_path), name],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for path in (store.path / "blobs" / "sha256", store.path):
        os.chown(path, 0, 0)
        path.chmod(0o755)
    out, _ = process.communicate("\n", timeout=60)
    answer = json.loads(out)
    assert answer["errno"] in (errno.EACCES, errno.EPERM)
    assert "permission" in answer["hint"]
    report = fsck(store.path)
    assert {one.severity for one in report.findings} == {"garbage"}
    assert [str(entry) for entry in store.tags()] == ["tiny:v1"]


# -- no locks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("name", ["store a file", "store a unit", "publish", "move a tag", "gc", "build", "create"])
def test_without_locks_nothing_is_written(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    artifact = stored_artifact(store, work)
    for tag in ("v1", "latest"):
        publish(store, "tiny", tag, [artifact], created=CREATED)
    with store.writing("so that its folder is there"):
        put_unit(store, unit_of(artifact))
    before = listing(store)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)

    def build(store: Store, artifact: Artifact, work: Path) -> None:
        with store.writing("a build"):
            pytest.fail("it began")

    writes = {
        **WRITES,
        "gc": lambda store, artifact, work: collect(store, Policy(grace=0.0)),
        "build": build,
        "create": lambda store, artifact, work: Store.create(work / "new"),
    }
    began = time.monotonic()
    with pytest.raises(StoreError) as caught:
        writes[name](store, artifact, work)
    assert time.monotonic() - began < 30  # it is not a lock that somebody holds
    assert caught.value.errno == number
    assert "no locks" in caught.value.hint
    check_intact(store, artifact, before)


def test_without_locks_a_store_is_still_read(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put_file(store, work, "model.so", b"a library")
    publish(store, "tiny", "v1", [make_artifact((make_variant((file,)),))], created=CREATED)
    real = fcntl.flock

    def refuse(descriptor: int, kind: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().is_relative_to(store.path):
            raise OSError(errno.ENOLCK, "No locks available")
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert read_bundle(store, parse_reference("tiny:v1")).artifacts
    assert store.blobs.load(file, 1 << 20) == b"a library"
    assert fsck(store.path).findings == ()


@pytest.mark.parametrize("lock", ["index.lock", "gc.lock", "writers"])
def test_an_error_of_closing_a_lock_is_typed(
    store: Store, work: Path, lock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network file system that is lost; the lock is free all the same."""
    close = os.close

    def fail(descriptor: int) -> None:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        close(descriptor)
        if lock in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    artifact = stored_artifact(store, work)
    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(StoreError, match=r"cannot close .*Input/output error") as caught, store.writing("a test"):
        publish(store, "tiny", "v1", [artifact], created=CREATED)
    assert caught.value.hint and caught.value.errno == errno.EIO
    with pytest.raises(KeyError), store.lock():
        raise KeyError  # is said, and not what closing said then
    monkeypatch.undo()
    publish(store, "tiny", "v1", [artifact], created=CREATED)
