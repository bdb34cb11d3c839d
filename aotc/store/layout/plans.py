"""The plan of a sharded build: all its units, so that a merge knows whether one is missing.

STORE/.aotc/plans/<tag>.json      the newest plan of a shard that was built for that tag
"""

from __future__ import annotations

from pathlib import Path

from aotc.digest import canonical_json
from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.records import Record, decode
from aotc.store.files.disk import read_limited, typed_errors
from aotc.store.files.writing import make_folder, write_atomically
from aotc.store.layout.store import Store
from aotc.store.reference import Reference

PLAN_SCHEMA_VERSION = 1
PLAN_LIMIT = 16 << 20


class PlannedKey(Record, frozen=True):
    """A unit that the whole build needs: how it is called, its key, and the shard, from 1, that was to build it."""

    unit: str
    model: str
    key: str
    shard: int


class ShardPlan(Record, frozen=True):
    """All units of a build in its order, `shards` in number; the store that holds this built `shard`."""

    schema: int
    shard: int
    shards: int
    units: tuple[PlannedKey, ...]


def put_plan(store: Store, tag: str, plan: ShardPlan) -> None:
    """Raises StoreError, ReferenceFormatError for a text that is not a tag."""
    path = _path(store, tag)
    make_folder(path.parent)
    write_atomically(path, canonical_json(plan))


def read_plan(store: Store, tag: str) -> ShardPlan | None:
    """The plan for that tag; None where no shard was built for it.

    Raises CorruptError, SchemaVersionError, StoreError.
    """
    path = _path(store, tag)
    try:
        with typed_errors("read", path):
            data = read_limited(path, PLAN_LIMIT)
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    plan = decode(data, ShardPlan)
    if plan.schema != PLAN_SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{path} has plan schema {plan.schema}; this aotc reads schema {PLAN_SCHEMA_VERSION}",
            hint="merge with the aotc that built the shards, or build them again with this one",
            found=plan.schema,
            supported=PLAN_SCHEMA_VERSION,
        )
    if not 1 <= plan.shard <= plan.shards:
        number = f"{plan.shard}/{plan.shards}"
        raise CorruptError(f"{path} is shard {number}", hint="build that shard again", actual=number)
    return plan


def _path(store: Store, tag: str) -> Path:
    Reference(None, "model", tag=tag)  # it becomes a file's name
    return store.path / ".aotc" / "plans" / f"{tag}.json"
