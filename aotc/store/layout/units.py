"""Finished units, kept so that a killed build loses none and an unchanged build compiles none."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aotc.digest import canonical_json, sha256_json
from aotc.errors import CorruptError, NotFoundError, SchemaVersionError, StoreError
from aotc.provenance import BuiltArtifact, CallTimes, RegionCost
from aotc.records import SCHEMA_VERSION, Bucket, File, Record, decode
from aotc.store.files.disk import read_limited, typed_errors
from aotc.store.files.writing import write_atomically
from aotc.store.layout.blobs import missing_files
from aotc.store.layout.check_record import check_record
from aotc.store.layout.names import hex_of, is_digest
from aotc.store.layout.store import Store
from aotc.store.readable import ReadableStore

UNIT_LIMIT = 16 << 20


class StageCost(Record, frozen=True):
    """The cost of one stage of compiling a unit.

    `began`: seconds after the unit's start. `seconds`: how long the stage took. `memory`: the most bytes that its
    processes had of their own at once, 0 where that was not measured. `parts`: seconds of each kind of work within the
    stage, summed over threads.
    """

    began: float
    seconds: float
    memory: int = 0
    parts: dict[str, float] = msgspec.field(default_factory=dict)


class Shared(Record, frozen=True):
    """Results that a unit took from other units of its build: `picks` of autotuning, and the `times` of
    generated code that decided fusions; compiled Triton `kernels`; compiled C++ `objects`, by builds of aotc 0.2 and
    before."""

    picks: int = 0
    times: int = 0
    kernels: int = 0
    objects: int = 0

    def __str__(self) -> str:
        said = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ", ".join(f"{count} {name if count > 1 else name[:-1]}" for name, count in said if count)


class UnitRecord(Record, frozen=True):
    """The result of compiling one unit: an artifact with its one variant, and the named factors of its key.

    `created` is RFC 3339 in UTC, so that the texts sort by time; `seconds` is how long the unit took, and `stages` what
    each stage cost; `failed_candidates` of autotuning were dropped since they could not be compiled or run. `cost` is
    what a region costs a call, measured at build; it is not the artifact's, whose bytes repeat. `shared` is what it
    took from other units of its build. `driver_compiled` is how many bytes of code the GPU's driver compiles for a
    first call, in a process that finds none in the driver's cache. `times` is what one call takes, measured at build.
    `reused` is the key of the unit whose code it has, "" where that was compiled.
    """

    key: str
    factors: dict[str, Any]
    artifact: BuiltArtifact
    seconds: float
    created: str
    failed_candidates: int = 0
    stages: dict[str, StageCost] = msgspec.field(default_factory=dict)
    cost: RegionCost | None = None
    shared: Shared = Shared()
    driver_compiled: int = 0
    times: CallTimes | None = None
    reused: str = ""


def put_unit(store: Store, unit: UnitRecord) -> None:
    """Remember a finished unit under its key. Raises NotFoundError for a missing blob, CorruptError, StoreError."""
    if len(unit.artifact.variants) != 1:
        raise StoreError(
            f"a unit has one variant; this one of {unit.artifact.model!r} has {len(unit.artifact.variants)}",
            hint="put each variant as a unit of its own",
        )
    check_record(unit.artifact)
    with store.sharing():
        if missing := missing_files(store.blobs, unit.artifact):
            raise NotFoundError(
                f"the unit {unit.key} names blobs that are not in the store, {len(missing)} in all, "
                f"like {missing[0].blob}",
                hint="store the unit's files first",
                known=(),
            )
        write_atomically(_path(store, unit.key), encode_unit(unit))


def use_unit(store: Store, key: str) -> UnitRecord | None:
    """The unit as `find_unit` gives it, for a build that will publish it: gc takes it as used now.

    As long as the build runs as one of `store.writing`, gc leaves it. Raises as `find_unit` does.
    """
    with store.sharing():
        unit = find_unit(store, key)
        if unit is not None:
            try:
                os.utime(_path(store, key))
            except OSError:  # another user's
                write_atomically(_path(store, key), encode_unit(unit))
    return unit


def find_unit(store: Store, key: str) -> UnitRecord | None:
    """The finished unit of that key, if all its blobs exist; None if it must be compiled (again).

    Raises CorruptError for a malformed key, StoreError where the store cannot be read.
    """
    unit = read_unit(_path(store, key))
    return None if unit is None or missing_files(store.blobs, unit.artifact) else unit


def find_built(store: ReadableStore, key: str) -> UnitRecord | None:
    """The finished unit of that key; None where it is not there, or only artifacts are, as in a registry."""
    return find_unit(store, key) if isinstance(store, Store) else None


class StoredReads(NamedTuple):
    """What the captures of some units read: of the instances of a region, or of the whole model, the attributes called
    `names`; and the file of all values (`Reads`)."""

    instances: tuple[str, ...]
    names: tuple[str, ...]
    file: File


class _Found(NamedTuple):
    """A unit: when it was finished, the file of its record, and the keys of its graphs."""

    created: str
    path: Path
    graphs: tuple[str, ...]


class StoredUnits:
    """The finished units of a store, found by model, bucket, target and region. All their files are read when the first
    one is asked for, and the rest of a record only where it is asked for: a store may hold thousands."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def latest(self, model: str, bucket: Bucket, target: str, region: str = "") -> UnitRecord | None:
        """The newest unit of that model, bucket, target and region, with any key; its blobs may be gone.

        A new unit's key is compared with it. Raises StoreError.
        """
        newest_first = sorted(self._alike(model, bucket, region).get(target, ()), reverse=True)
        units = (read_unit(unit.path) for unit in newest_first)
        return next((unit for unit in units if unit is not None), None)

    def targets(self, model: str, bucket: Bucket, region: str = "") -> list[str]:
        """The targets for which units of that model, bucket and region were finished. Raises StoreError."""
        alike = self._alike(model, bucket, region)
        return sorted(target for target in alike if self.latest(model, bucket, target, region) is not None)

    def graphs(self, model: str, bucket: Bucket, target: str, region: str = "") -> dict[str, str]:
        """The keys of the units of that model, bucket, target and region, by those of their graphs. Raises
        StoreError."""
        found = self._alike(model, bucket, region).get(target, ())
        return {graph: f"sha256:{unit.path.stem}" for unit in sorted(found) for graph in unit.graphs}

    def reads(self, model: str) -> set[StoredReads]:
        """What the captures of that model's units read. Raises StoreError."""
        return self._found_reads.get(model, set())

    def _alike(self, model: str, bucket: Bucket, region: str) -> dict[str, list[_Found]]:
        return self._found.get((model, region, canonical_json(bucket)), {})

    @functools.cached_property
    def _all_heads(self) -> list[tuple[Path, _Head]]:
        return list(_heads(self.store))

    @functools.cached_property
    def _found_reads(self) -> dict[str, set[StoredReads]]:
        found: dict[str, set[StoredReads]] = {}
        for _, head in self._all_heads:
            instances = {region.name: region.instances for region in head.artifact.regions}
            for variant in head.artifact.variants:
                if variant.read_values is not None:
                    reads = StoredReads(instances.get(variant.region, ()), variant.reads, variant.read_values)
                    found.setdefault(head.artifact.model, set()).add(reads)
        return found

    @functools.cached_property
    def _found(self) -> dict[tuple[str, str, bytes], dict[str, list[_Found]]]:
        """By model, region and bucket; then by target."""
        found: dict[tuple[str, str, bytes], dict[str, list[_Found]]] = {}
        for path, head in self._all_heads:
            for variant in head.artifact.variants:
                kind = head.artifact.model, variant.region, canonical_json(variant.bucket)
                kinds = (kept for kind in (head.artifact, *head.artifact.kinds) for kept in kind.variants)
                graphs = tuple(kept.graph for kept in kinds if kept.graph)
                units = found.setdefault(kind, {}).setdefault(head.artifact.target, [])
                units.append(_Found(head.created, path, graphs))
        return found


def latest_unit(store: Store, model: str, bucket: Bucket, target: str, region: str = "") -> UnitRecord | None:
    """As `StoredUnits.latest`, for one unit."""
    return StoredUnits(store).latest(model, bucket, target, region)


class UnitCost(Record, frozen=True):
    """The cost of a unit's last build: seconds, peak memory in bytes (0 if not measured), and bytes in the store.

    `size` is that of its blobs without `mapped` ones: frozen weights, most of which the units of a model share.
    """

    model: str
    region: str
    bucket: Bucket
    target: str
    created: str
    seconds: float
    memory: int
    size: int = 0
    mapped: int = 0


def unit_costs(store: Store) -> list[UnitCost]:
    """The cost of each unit that was compiled, the oldest first; its blobs may be gone. Raises StoreError."""
    costs = []
    for _, head in _heads(store):
        if head.reused:
            continue
        artifact, memory = head.artifact, max((stage.memory for stage in head.stages.values()), default=0)
        for variant in artifact.variants:
            unit = artifact.model, variant.region, variant.bucket, artifact.target
            costs.append(UnitCost(*unit, head.created, head.seconds, memory, *variant.sizes()))
    return sorted(costs, key=lambda cost: cost.created)


def _heads(store: Store) -> Iterator[tuple[Path, _Head]]:
    """The file and the head of each unit; those of another aotc are skipped. Raises StoreError."""
    for path in _unit_files(store):
        try:
            with typed_errors("read", path):
                data = read_limited(path, UNIT_LIMIT)
            yield path, decode(data, _Head)
        except StoreError as error:
            if not isinstance(error, CorruptError) and not _leads_nowhere(error):
                raise


class _HeadVariant(msgspec.Struct):
    bucket: Bucket
    files: tuple[File, ...]
    region: str = ""
    reads: tuple[str, ...] = ()
    read_values: File | None = None
    report: File | None = None
    picks: File | None = None
    graph: str = ""

    def sizes(self) -> tuple[int, int]:
        """The bytes of its blobs, without and of mapped files."""
        files = {file.blob: file for file in (*self.files, self.read_values, self.report, self.picks) if file}.values()
        mapped = sum(file.blob_size for file in files if file.blob == file.digest)
        return sum(file.blob_size for file in files) - mapped, mapped


class _HeadRegion(msgspec.Struct):
    name: str
    instances: tuple[str, ...]


class _HeadArtifact(msgspec.Struct):
    model: str
    target: str
    variants: tuple[_HeadVariant, ...]
    regions: tuple[_HeadRegion, ...] = ()
    kinds: tuple[_HeadArtifact, ...] = ()


class _Head(msgspec.Struct):
    """The part of a UnitRecord that is needed here: the rest need not be made sense of."""

    artifact: _HeadArtifact
    seconds: float
    created: str
    stages: dict[str, StageCost] = msgspec.field(default_factory=dict)
    reused: str = ""


def each_unit(store: Store) -> Iterator[UnitRecord]:
    """Every finished unit that this aotc can use. Raises StoreError."""
    for path in _unit_files(store):
        if (unit := read_unit(path)) is not None:
            yield unit


def _unit_files(store: Store) -> list[Path]:
    folder = units_folder(store)
    with typed_errors("look into", folder):
        return [path for path in sorted(folder.iterdir()) if is_unit_file(path)] if folder.exists() else []


def is_unit_file(path: Path) -> bool:
    return path.suffix == ".json" and is_digest(f"sha256:{path.stem}")


def read_unit(path: Path) -> UnitRecord | None:
    """The unit whose record is at `path`; None if there is none, or it has another format. Raises StoreError."""
    try:
        return load_unit(path)
    except (CorruptError, SchemaVersionError):
        return None  # compiled again, and overwritten
    except StoreError as error:
        if _leads_nowhere(error):
            return None
        raise


def _leads_nowhere(error: StoreError) -> bool:
    """Whether the file is missing, or a link to a missing file."""
    return error.fields.get("errno") in (errno.ENOENT, errno.ELOOP)


def load_unit(path: Path) -> UnitRecord:
    """The unit whose record is at `path`. Raises CorruptError, SchemaVersionError, StoreError."""
    with typed_errors("read", path):
        data = read_limited(path, UNIT_LIMIT)
    return decode_unit(data, f"sha256:{path.stem}", str(path))


def decode_unit(data: bytes, key: str, where: str) -> UnitRecord:
    """The unit of that key from the bytes at `where`. Raises CorruptError, SchemaVersionError."""
    schema = decode(data, UnitRecordHead).artifact.schema
    if schema != SCHEMA_VERSION:
        raise SchemaVersionError(
            f"{where} is a unit of record schema {schema}; this aotc uses schema {SCHEMA_VERSION}",
            hint="build it again with this aotc",
            found=schema,
            supported=SCHEMA_VERSION,
        )
    unit = _decode(data, where)
    check_record(unit.artifact)
    if unit.key != key:
        raise CorruptError(f"{where} is the unit {unit.key}", expected=key, actual=unit.key)
    if (count := len(unit.artifact.variants)) != 1:
        raise CorruptError(f"{where} has {count} variants", expected="1", actual=str(count))
    return unit


class _StoredUnit(UnitRecord, frozen=True):
    """A unit on disk: `digest` is that of its canonical JSON without `digest`.

    A unit is not a blob, so no other digest says that its bytes are those that were written.
    """

    digest: str = ""


def encode_unit(unit: UnitRecord) -> bytes:
    """The bytes of a unit's record in a store, on disk or at a URL."""
    read_back = decode(canonical_json(unit), UnitRecord)  # 1 is read as 1.0 where a float is meant
    return canonical_json({**msgspec.to_builtins(read_back), "digest": sha256_json(read_back)})


def _decode(data: bytes, where: str) -> UnitRecord:
    stored = decode(data, _StoredUnit)
    unit = UnitRecord(**{name: getattr(stored, name) for name in UnitRecord.__struct_fields__})
    if (actual := sha256_json(unit)) != stored.digest:
        raise CorruptError(
            f"{where} is corrupt: its record has the digest {actual}, and says {stored.digest[:100]!r}",
            hint="the unit is compiled again by the next build that needs it",
            path=where,
            expected=stored.digest[:100],
            actual=actual,
        )
    return unit


class ArtifactHead(msgspec.Struct):
    schema: int


class UnitRecordHead(msgspec.Struct):
    artifact: ArtifactHead


def units_folder(store: Store) -> Path:
    return store.path / ".aotc" / "units"


def _path(store: Store, key: str) -> Path:
    return units_folder(store) / f"{hex_of(key)}.json"
