"""Changing what a store holds: copies of built stores, records that lie, libraries with other bytes."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
from elftools.elf.elffile import ELFFile
from small_artifact import publish_unchecked

from aotc.provenance import BuiltArtifact, BuiltVariant
from aotc.records import File
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference

CREATED = "2026-01-02T03:04:05Z"
LIBRARY_LIMIT = 1 << 30


def copy_store(store: Path, folder: Path) -> Store:
    """A copy that a test may change."""
    return Store.open(Path(shutil.copytree(store, folder / "copied-store")))


def artifact_of(store: Store, model: str, tag: str = "latest") -> BuiltArtifact:
    """The only artifact of a bundle."""
    (entry,) = read_bundle(store, Reference(None, model, tag=tag)).artifacts
    return read_built(store, entry.digest)


def publish_changed(
    store: Store, model: str, change: Callable[[BuiltArtifact], BuiltArtifact], tag: str = "latest"
) -> None:
    """Publish the artifact again as `change` gives it, its digests all right."""
    publish_unchecked(store, model, tag, [change(artifact_of(store, model))], created=CREATED)


def replace_variant(artifact: BuiltArtifact, index: int, variant: BuiltVariant) -> BuiltArtifact:
    variants = [*artifact.variants[:index], variant, *artifact.variants[index + 1 :]]
    return msgspec.structs.replace(artifact, variants=tuple(variants))


def library_file(variant: BuiltVariant) -> File:
    return next(file for file in variant.files if file.name == variant.library)


def library_bytes(store: Store, variant: BuiltVariant) -> bytes:
    return store.blobs.load(library_file(variant), LIBRARY_LIMIT)


def with_library(store: Store, variant: BuiltVariant, data: bytes) -> BuiltVariant:
    """The variant with other bytes as its library, which are put into the store."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / variant.library
        path.write_bytes(data)
        file = store.blobs.put_file_zstd(path)
    others = [other for other in variant.files if other.name != variant.library]
    return msgspec.structs.replace(variant, files=(*others, file))


def crashing(library: bytes, function: str = "AOTInductorModelContainerRun") -> bytes:
    """The library with an instruction at the start of `function` that only the kernel may use: SIGSEGV when called."""
    elf = ELFFile(io.BytesIO(library))
    (symbol,) = elf.get_section_by_name(".dynsym").get_symbol_by_name(function)
    (at,) = elf.address_offsets(symbol["st_value"])
    return library[:at] + b"\xf4" + library[at + 1 :]
