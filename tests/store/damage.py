"""Changes of a store's files, and what a reader then gives: the right bytes, an AotcError, or a finding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from aotc.digest import sha256_bytes
from aotc.errors import AotcError
from aotc.records import Artifact
from aotc.store.layout.built import with_provenance
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference

PAGE = 4096
KINDS = ("flip", "byte", "insert", "delete", "truncate", "swap", "duplicate", "zero a page", "append", "empty")


class Given(NamedTuple):
    """What a load reaches before it maps anything: of each variant the bytes that it would map, by digest."""

    bundle: str
    artifact: Artifact
    mapped: tuple[tuple[tuple[str, str], ...], ...]


def reach(store: Path, reference: str) -> Given:
    """All that `aotc.load` reads of a store. Raises AotcError."""
    opened = Store.open(store)
    bundle = read_bundle(opened, parse_reference(reference))
    (entry,) = bundle.artifacts
    artifact = read_artifact(opened, entry.digest)
    mapped = tuple(
        tuple(sorted((file.name, sha256_bytes(opened.blobs.load(file, 1 << 30))) for file in variant.files))
        for variant in artifact.variants
    )
    for file in {*each_file(artifact), *each_file(with_provenance(opened, artifact))} - {
        file for variant in artifact.variants for file in variant.files
    }:
        opened.blobs.load(file, 1 << 30)
    return Given(bundle.digest, artifact, mapped)


class Sweep:
    """Tries changes of one store, with counts. What was changed is put back."""

    def __init__(self, store: Path, reference: str) -> None:
        self.store, self.reference = store, reference
        self.right = reach(store, reference)
        self.files = sorted(path for path in store.rglob("*") if path.is_file() and ".aotc" not in path.parts)
        self.refused = self.harmless = 0
        self.harmless_in: dict[str, int] = {}
        self.findings: list[str] = []

    def try_bytes(self, path: Path, data: bytes, what: str) -> None:
        """Read the store with `data` as the bytes of `path`."""
        before = path.read_bytes()
        if data == before:
            return
        overwrite(path, data)
        try:
            self.judge(path, what)
        finally:
            overwrite(path, before)

    def judge(self, path: Path, what: str) -> None:
        """Count what a reader now gets: an error of ours, the right thing, or else a finding."""
        name = path.relative_to(self.store).as_posix()
        try:
            given = reach(self.store, self.reference)
        except AotcError:
            self.refused += 1
        except Exception as error:
            self.findings.append(f"{name}: {what}: {type(error).__name__}: {error}")
        else:
            if given != self.right or name.startswith("blobs/"):
                self.findings.append(f"{name}: {what}: not seen")
            self.harmless += 1
            self.harmless_in[name] = self.harmless_in.get(name, 0) + 1

    @property
    def tried(self) -> int:
        return self.refused + self.harmless


def overwrite(path: Path, data: bytes) -> None:
    """In place: ext4 writes a file to the disk at once when it is emptied and filled again."""
    with path.open("r+b") as stream:
        stream.write(data)
        stream.truncate()


def every_byte(data: bytes, values: int) -> Iterator[tuple[int, int]]:
    """Each position with other values of its byte: all 255, or a few that differ in one bit or are quite another."""
    few = (0x01, 0x80, 0x20, 0xFF, 0x10, 0x02, 0x40, 0x08, 0x04)[:values]
    for position, byte in enumerate(data):
        for mask in range(1, 256) if values >= 255 else few:
            yield position, byte ^ mask


def changed(data: bytes, random: Random, others: list[bytes]) -> tuple[str, bytes]:
    """The data with one random change, and what it was."""
    kind = random.choice(KINDS)
    at = random.randrange(len(data)) if data else 0
    length = random.choice((1, 2, 16, PAGE))
    piece = data[at : at + length]
    match kind:
        case "flip":
            new = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case "byte":
            new = data[:at] + random.randbytes(1) + data[at + 1 :]
        case "insert":
            new = data[:at] + random.randbytes(length) + data[at:]
        case "delete":
            new = data[:at] + data[at + length :]
        case "truncate":
            new = data[:at]
        case "swap":
            other = random.randrange(len(data))
            low, high = sorted((at, other))
            new = data[:low] + data[high : high + length] + data[low + length : high] + data[low : low + length]
            new += data[high + length :]
        case "duplicate":
            new = data[:at] + piece + data[at:]
        case "zero a page":
            start = at // PAGE * PAGE
            new = data[:start] + bytes(len(data[start : start + PAGE])) + data[start + PAGE :]
        case "append":
            new = data + random.choice((b"\0", b"\n", b" ", data[:PAGE], random.randbytes(length)))
        case _:
            new = random.choice((b"", *others))
    return f"{kind} at {at}", new
