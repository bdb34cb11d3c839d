"""Cache folders to a bundle in a store."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from aotc.digest import sha256_bytes
from aotc.errors import NotFoundError, StoreError
from aotc.store.files.disk import open_regular, typed_errors
from aotc.store.layout.compiler_cache import BUILT_BY_NINJA, PACK, CachedFile, CompilerCache, publish_cache
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.tools.caches.folders import files_worth_keeping, without_paths
from aotc.tools.caches.origin import Origin
from aotc.tools.caches.receipt import REQUIREMENTS, Receipt

_LEVEL = 6
"""Of zstd. Compiled code grows by a few percent against the level of artifacts, and is saved several times as fast."""


class SavedCache(NamedTuple):
    """What was saved: the bundle, its files, their bytes, and files that were left out (links, pipes, odd names)."""

    reference: str
    digest: str
    files: dict[str, int]
    size: int
    stored: int
    left_out: int


def save(
    store: Store,
    reference: Reference,
    folders: Mapping[str, Path],
    origin: Origin,
    receipt: Receipt | None = None,
) -> SavedCache:
    """Publish the files of cache folders, by kind, as the bundle that `reference`, a tag, names; with a `receipt` only
    those that a start from the cache has used.

    Compilers may write to the folders meanwhile: they give a file its name when it is whole, and what comes later is
    left out. Raises NotFoundError where the folders hold nothing, StoreError, CorruptError.
    """
    if receipt is not None and (flaws := receipt.flaws(REQUIREMENTS)):
        raise StoreError(
            "the receipt is of a start that compiled, so it does not say what a start needs",
            issues=tuple(flaws),
            hint="save the whole cache, restore it, start the program from it, and save with that receipt",
        )
    kept = {kind: files_worth_keeping(kind, folder) for kind, folder in folders.items()}
    if not any(found.files for found in kept.values()):
        raise NotFoundError(
            f"there is nothing to save in {', '.join(map(str, folders.values()))}",
            hint="run the program once, so that it compiles; or name its folder: --cache inductor=FOLDER",
            known=(),
        )
    with store.writing("aotc cache save"), tempfile.TemporaryDirectory(prefix="aotc-cache-") as folder:
        files: list[CachedFile] = []
        pack = Path(folder) / PACK
        with typed_errors("write", pack), pack.open("wb") as stream:
            for kind, found in kept.items():
                for path in found.files:
                    if receipt is not None and os.path.realpath(folders[kind] / path) not in receipt.used:
                        continue
                    if (read := _read(folders[kind] / path)) is not None:
                        data, modified = read
                        stream.write(data)
                        modified = modified if kind in BUILT_BY_NINJA else 0
                        files.append(CachedFile(kind, path, sha256_bytes(data), len(data), modified))
        packed = store.blobs.put_file_zstd(pack, _LEVEL)
        cache = CompilerCache(
            reference.model,
            origin.environment,
            origin.packages,
            tuple(files),
            packed,
            code=origin.code,
            variables=origin.variables,
        )
        digest = publish_cache(store, cache, str(reference.tag))
    counts = {kind: sum(file.kind == kind for file in files) for kind in folders}
    odd = sum(found.odd for found in kept.values())
    return SavedCache(f"{store.path}#{reference.name}", digest, counts, packed.size, packed.blob_size, odd)


def _read(path: Path) -> tuple[bytes, int] | None:
    """A file's bytes and the time of its last change in ns; None if another process has removed it meanwhile."""
    try:
        with typed_errors("read", path), open_regular(path, follow=False) as stream:
            return without_paths(path.name, stream.read()), os.fstat(stream.fileno()).st_mtime_ns
    except StoreError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
