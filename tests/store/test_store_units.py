"""Finished units: found again by their key, or compiled again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sample_artifacts import CREATED, stored_artifact

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, NotFoundError, StoreError
from aotc.store.files.disk import read_limited
from aotc.store.layout import units
from aotc.store.layout.store import Store
from aotc.store.layout.units import StoredUnits, UnitRecord, find_unit, latest_unit, put_unit

KEY = sha256_bytes(b"a key")


def make_unit(store: Store, work: Path, key: str = KEY, created: str = CREATED, **fields: Any) -> UnitRecord:
    artifact = stored_artifact(store, work, (1,), **fields)
    return UnitRecord(
        key=key, factors={"torch": "2.13.0", "sources": {"m": "x"}}, artifact=artifact, seconds=1.5, created=created
    )


def unit_path(store: Store, key: str = KEY) -> Path:
    return store.path / ".aotc" / "units" / f"{key[7:]}.json"


def test_a_unit_is_found_by_its_key(store: Store, work: Path) -> None:
    unit = make_unit(store, work)
    assert find_unit(store, KEY) is None
    put_unit(store, unit)
    assert find_unit(store, KEY) == unit
    record = msgspec.to_builtins(unit)
    assert unit_path(store).read_bytes() == canonical_json({**record, "digest": sha256_bytes(canonical_json(record))})


def test_numbers_that_are_written_in_another_way_are_no_damage(store: Store, work: Path) -> None:
    unit = msgspec.structs.replace(make_unit(store, work), seconds=2)
    put_unit(store, unit)
    assert find_unit(store, KEY) == unit


def test_every_changed_byte_of_a_unit_is_seen(store: Store, work: Path) -> None:
    """A unit is not a blob, and what a build finds here it publishes."""
    unit = make_unit(store, work)
    put_unit(store, unit)
    good = unit_path(store).read_bytes()
    for position in range(len(good)):
        unit_path(store).write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        assert find_unit(store, KEY) is None, good[position - 20 : position + 20]


def test_a_unit_of_the_same_key_replaces_the_old_one(store: Store, work: Path) -> None:
    put_unit(store, make_unit(store, work))
    again = make_unit(store, work, created="2026-05-05T00:00:00Z")
    put_unit(store, again)
    assert find_unit(store, KEY) == again


def test_a_unit_without_its_blobs_is_compiled_again(store: Store, work: Path) -> None:
    unit = make_unit(store, work)
    put_unit(store, unit)
    path = store.blobs.path(unit.artifact.variants[0].files[1].blob)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert find_unit(store, KEY) is None
    path.unlink()
    assert find_unit(store, KEY) is None
    path.write_bytes(data)
    assert find_unit(store, KEY) == unit


def sealed(record: dict[str, Any]) -> bytes:
    """With its right digest."""
    return canonical_json({**record, "digest": sha256_bytes(canonical_json(record))})


def test_a_unit_that_cannot_be_believed_is_compiled_again(store: Store, work: Path) -> None:
    unit = make_unit(store, work)
    put_unit(store, unit)
    good = unit_path(store).read_bytes()
    record = msgspec.to_builtins(unit)
    artifact = record["artifact"]
    file = {**artifact["variants"][0]["files"][0], "name": "../x"}
    bad_name = {**artifact["variants"][0], "files": [file], "library": "../x"}
    for data in (
        b"",
        good[:-1],
        b"garbage",
        canonical_json(record),
        sealed({**record, "unknown": 1}),
        sealed({**record, "key": sha256_bytes(b"another")}),
        sealed({**record, "artifact": {**artifact, "schema": 3}}),
        sealed({**record, "artifact": {**artifact, "variants": []}}),
        sealed({**record, "artifact": {**artifact, "variants": [bad_name]}}),
    ):
        unit_path(store).write_bytes(data)
        assert find_unit(store, KEY) is None
    put_unit(store, unit)
    assert find_unit(store, KEY) == unit


def test_a_unit_has_one_variant_and_its_blobs_are_stored(store: Store, work: Path) -> None:
    unit = make_unit(store, work)
    two = msgspec.structs.replace(unit, artifact=stored_artifact(store, work, (1, 8)))
    with pytest.raises(StoreError, match="one variant; this one of 'tiny' has 2"):
        put_unit(store, two)
    store.blobs.path(unit.artifact.variants[0].files[0].blob).unlink()
    with pytest.raises(NotFoundError, match="names blobs that are not in the store, 1 in all"):
        put_unit(store, unit)
    assert find_unit(store, KEY) is None


def test_a_malformed_key_never_becomes_a_path(store: Store, work: Path) -> None:
    for key in ("../../x", "", "sha256:x"):
        with pytest.raises(CorruptError, match="is not a digest"):
            find_unit(store, key)
        with pytest.raises(CorruptError, match="is not a digest"):
            put_unit(store, make_unit(store, work, key=key))


def test_the_latest_unit_of_a_bucket_is_found_whatever_its_key(store: Store, work: Path) -> None:
    assert latest_unit(store, "tiny", {"batch": 1}, "cpu:x86-64-v3") is None
    old, new, newer = (sha256_bytes(name) for name in (b"old", b"new", b"newer"))
    put_unit(store, make_unit(store, work, old, "2026-01-01T00:00:00Z"))
    latest = make_unit(store, work, new, "2026-03-01T00:00:00Z")
    put_unit(store, latest)
    put_unit(store, make_unit(store, work, newer, "2026-04-01T00:00:00Z", target="cuda:sm_90"))
    unit_path(store, sha256_bytes(b"broken")).write_bytes(b"garbage")
    (unit_path(store).parent / ".tmp-0123456789abcdef").write_bytes(b"half")
    store.blobs.path(latest.artifact.variants[0].files[0].blob).unlink()  # explaining needs no blobs
    assert latest_unit(store, "tiny", {"batch": 1}, "cpu:x86-64-v3") == latest
    assert latest_unit(store, "tiny", {"batch": 2}, "cpu:x86-64-v3") is None
    assert latest_unit(store, "other", {"batch": 1}, "cpu:x86-64-v3") is None
    assert StoredUnits(store).targets("tiny", {"batch": 1}) == ["cpu:x86-64-v3", "cuda:sm_90"]
    unit_path(store, new).write_bytes(unit_path(store, new).read_bytes().replace(b'"seconds":', b'"Seconds":'))
    found = latest_unit(store, "tiny", {"batch": 1}, "cpu:x86-64-v3")
    assert found is not None and found.key == old, "the newest that can be read"


def test_each_unit_s_file_is_read_once_however_many_units_are_looked_for(
    store: Store, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planning asks for each unit that is missing, in a store of thousands; only what is alike is checked."""
    for number in range(4):
        put_unit(store, make_unit(store, work, sha256_bytes(b"%d" % number), target=f"cuda:sm_9{number}"))
    read: list[str] = []

    def noting(path: Path, limit: int) -> bytes:
        read.append(path.stem)
        return read_limited(path, limit)

    monkeypatch.setattr(units, "read_limited", noting)
    stored = StoredUnits(store)
    assert [stored.latest("tiny", {"batch": size}, "cuda:sm_90") for size in range(2, 10)] == [None] * 8
    assert len(read) == len(set(read)) == 4
    assert stored.latest("tiny", {"batch": 1}, "cuda:sm_90") is not None
    assert len(read) == 5


def test_a_full_disk_is_a_store_error_and_leaves_no_unit(
    store: Store, work: Path, failing_os: Callable[[str, int], None]
) -> None:
    unit = make_unit(store, work)
    failing_os("fsync", errno.ENOSPC)
    with pytest.raises(StoreError, match="No space left"):
        put_unit(store, unit)
    assert find_unit(store, KEY) is None


def test_a_store_that_cannot_be_read_is_an_error_and_no_miss(
    store: Store, work: Path, failing_os: Callable[[str, int], None]
) -> None:
    put_unit(store, make_unit(store, work))
    failing_os("open", errno.EACCES)
    with pytest.raises(StoreError, match="Permission denied"):
        find_unit(store, KEY)
