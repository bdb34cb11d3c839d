"""Small records for the store's tests, made without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from processes import ROOT
from small_artifact import small_artifact

from aotc.digest import sha256_bytes
from aotc.provenance import BuiltArtifact, BuiltVariant
from aotc.records import Argument, File, ModuleGuard, Output
from aotc.store.layout.store import Store

CREATED = "2026-01-02T03:04:05Z"
PYTHONPATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
"""For processes that import aotc and this module."""


def library_bytes(batch: int) -> bytes:
    return f"library for batch {batch}\n".encode() * 50


def put_file(store: Store, folder: Path, name: str, data: bytes) -> File:
    path = folder / name
    path.write_bytes(data)
    return store.blobs.put_file_zstd(path)


def make_variant(files: tuple[File, ...], batch: int = 1, report: File | None = None) -> BuiltVariant:
    return BuiltVariant(
        bucket={"batch": batch},
        key=sha256_bytes(b"key of batch %d" % batch),
        library=files[0].name,
        files=files,
        arguments=(Argument(leaf=0),),
        outputs=(Output(index=0, dims=("batch", "")),),
        output_tree=0,
        report=report,
    )


def make_artifact(variants: tuple[BuiltVariant, ...], **fields: Any) -> BuiltArtifact:
    module = ModuleGuard(class_name="m.Tiny", training=False, sources={}, attributes=sha256_bytes(b""))
    return small_artifact(**{"model": "tiny", "module": module, "variants": variants, **fields})


def stored_artifact(store: Store, folder: Path, batches: tuple[int, ...] = (1, 8), **fields: Any) -> BuiltArtifact:
    """An artifact with a variant for each batch size, its blobs in the store. `kernel.bin` is shared by all."""
    shared = put_file(store, folder, "kernel.bin", b"the kernel that all variants share" * 9)
    variants = tuple(
        make_variant(
            (put_file(store, folder, "model.so", library_bytes(batch)), shared),
            batch,
            put_file(store, folder, "report.json", b'{"batch":%d}' % batch),
        )
        for batch in batches
    )
    return make_artifact(variants, **fields)


def python(code: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """A fresh interpreter that runs `code` with aotc and this module importable."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Its output; an AssertionError with its errors where it failed."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"ended with {process.returncode}: {out}{err}"
    return out
