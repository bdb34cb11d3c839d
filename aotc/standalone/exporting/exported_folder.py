"""Write an artifact as a folder that runs without Python, torch or a store."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from aotc.call_table.dispatch import Dispatcher
from aotc.errors import StoreError
from aotc.records import CONSTANTS, Artifact, Record, StateSpec, TensorLeaf, Variant
from aotc.standalone.call_rows import (
    BucketFiles,
    FolderRows,
    TensorRow,
    call_rows,
    result_names,
)
from aotc.standalone.cpu_environment import open_cpu
from aotc.standalone.exporting import aotc_exported
from aotc.standalone.exporting.folder_refusals import refuse_for_folder
from aotc.standalone.exporting.folder_runtime import HEADER, RUNTIME, folder_runtime, header
from aotc.standalone.shim_library import constants_of, prepared_library
from aotc.standalone.state_tensors import StandaloneWeights, state_tensors
from aotc.store.files.disk import typed_errors
from aotc.store.files.temporary_folders import TemporaryFolder
from aotc.store.layout.blob_reader import BlobReader

TABLE, WEIGHTS, SUMS = "table.txt", "weights.bin", "SHA256SUMS"

_ALIGNMENT = 64
_CONSTANTS_LIMIT = (256 << 20) + (1 << 20)


class ExportedFolder(Record, frozen=True):
    """What was written: the folder, the artifact's target, names of inputs and outputs, and the bytes of each file."""

    folder: str
    target: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    files: dict[str, int]


def export_folder(
    artifact: Artifact, source: BlobReader, weights: StandaloneWeights | None, folder: Path
) -> ExportedFolder:
    """Write the folder, whole or not at all; `source` has the artifact's files, `weights` are as of
    `aotc.standalone.load`.

    Raises what `aotc.standalone.load` raises of an artifact or weights that do not run without torch; LibraryError
    also for what a folder does not do; StoreError where the folder cannot be written, or has something in it.
    """
    refuse_for_folder(artifact)
    with typed_errors("write", folder):
        if folder.exists() and any(folder.iterdir()):
            raise StoreError(f"{folder} is not empty", hint="name a new folder, or remove this one", path=str(folder))
        draft = TemporaryFolder(".aotc-export-", str(folder.absolute().parent))
        try:
            runtime = folder_runtime(artifact.environment.machine, draft.path)
            libraries = [prepared_library(variant, source, runtime, RUNTIME) for variant in artifact.variants]
            state = state_tensors(artifact, weights, lambda file: source.load(file, _CONSTANTS_LIMIT))
            (whole := draft.path / "whole").mkdir()
            _write(artifact, source, libraries, state, whole)
            python = Path(aotc_exported.__file__)
            for path, name in ((runtime, RUNTIME), (header(), HEADER), (python, python.name)):
                shutil.copyfile(path, whole / name)
            sizes = {path.name: path.stat().st_size for path in sorted(whole.iterdir())}
            (whole / SUMS).write_text("".join(f"{_sha256(whole / name)}  {name}\n" for name in sizes))
            whole.rename(folder)
        finally:
            draft.remove()
    inputs = tuple(leaf.path for leaf in artifact.signature.leaves if isinstance(leaf, TensorLeaf))
    return ExportedFolder(str(folder), artifact.target, inputs, tuple(result_names(artifact.variants[0])), sizes)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# -- the model's own files --------------------------------------------------------------------------------------------


def _write(
    artifact: Artifact, source: BlobReader, libraries: Sequence[bytearray], state: Sequence[Any], folder: Path
) -> None:
    files, specs = [], artifact.state if artifact.weights == "live" else ()
    with (folder / WEIGHTS).open("wb") as stream:
        rows = [_put_tensor(stream, tensor, spec) for tensor, spec in zip(state, specs, strict=True)]
        begun: dict[str, int] = {}
        for number, (variant, library) in enumerate(zip(artifact.variants, libraries, strict=True)):
            (path := folder / f"bucket-{number}.so").write_bytes(library)
            files.append(BucketFiles(path.name, len(library), _put_constants(stream, variant, source, begun)))
        size = stream.tell()
    if not size:
        (folder / WEIGHTS).unlink()
    dispatcher = Dispatcher(artifact.signature, artifact.variants, artifact.model)
    lines = call_rows(artifact, dispatcher, FolderRows(files, rows, size))
    (folder / TABLE).write_text("".join(f"{line}\n" for line in lines))


def _align(stream: BinaryIO) -> int:
    stream.write(bytes(-stream.tell() % _ALIGNMENT))
    return stream.tell()


def _put_tensor(stream: BinaryIO, tensor: Any, spec: StateSpec) -> TensorRow:
    """Its memory as it lies, from its first element to its last."""
    begin, reach = _align(stream), sum((size - 1) * step for size, step in zip(spec.shape, tensor.strides, strict=True))
    if 0 not in spec.shape:
        stream.write(open_cpu().strided(tensor, ((reach + 1) * tensor.itemsize,), (1,), 0, "uint8"))
    return TensorRow(spec.name, spec.dtype, begin, spec.shape, tensor.strides)


def _put_constants(stream: BinaryIO, variant: Variant, source: BlobReader, begun: dict[str, int]) -> list[TensorRow]:
    """Frozen weights, each file of them once: `begun` has the place of each by its digest."""
    if all(file.name != CONSTANTS for file in variant.files):
        return []
    places = {}
    for file in variant.files:
        if file.mapped:
            if file.digest not in begun:
                begun[file.digest] = _align(stream)
                source.unpack(file, stream)
            places[file.name] = begun[file.digest]
    rows = []
    for each in constants_of(variant, source):
        itemsize = open_cpu().placed(b"", 0, each.dtype, (0,), (1,)).itemsize
        offset = places[each.file] + each.offset + each.storage_offset * itemsize if each.file else 0
        rows.append(TensorRow(each.name, each.dtype, offset, each.shape, each.stride))
    return rows
