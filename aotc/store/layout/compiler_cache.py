"""The record of a compiler cache, and its check when it enters a store. What its files mean: `aotc.tools.caches`."""

from __future__ import annotations

import msgspec

from aotc.digest import canonical_json
from aotc.errors import CorruptError, StoreError
from aotc.records import Environment, File, Record, decode
from aotc.store.layout import oci
from aotc.store.layout.blobs import Blob, describe
from aotc.store.layout.bundle import CACHE_TYPE, CONFIG_LIMIT, FILE, BundleEntry, read_config
from aotc.store.layout.names import check_file_name, hex_of
from aotc.store.layout.oci import ImageIndex, ImageManifest
from aotc.store.layout.store import Store
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference

CACHE_CONFIG = "application/vnd.aotc.cache.config.v1+json"
PACK = "files"

USUAL = ("inductor", "triton", "vllm")
"""The caches of an engine: torch.compile's (Inductor, FX graph and AOTAutograd caches), Triton's own, vLLM's."""

KINDS = (*USUAL, "flashinfer", "deepgemm", "tilelang", "cutedsl", "helion", "computecache")
"""Whose cache it is: also that of libraries whose kernels are compiled at run time, and of the CUDA driver."""

BUILT_BY_NINJA = ("flashinfer",)
"""Caches that ninja compiles anew where a file is newer than ninja's log says, or older than what it was made from."""

MOST_FOLDERS = 64
"""Of a path: each is looked at."""


class CachedFile(Record, frozen=True):
    """One file: `path` is relative to the folder of the cache `kind`, with `/` between its parts. `modified` is when it
    was written, in ns since 1970, for the kinds of `BUILT_BY_NINJA`, else 0."""

    kind: str
    path: str
    digest: str
    size: int
    modified: int = 0


class CompilerCache(Record, frozen=True):
    """The files that compilers left in their cache folders: the config blob of its image manifest.

    `environment` is the machine that they come from; of its CPU's features, those that change which code a compiler
    writes. `packages` has versions by name, of Python its ABI. `code` is the version of the code that was compiled, as
    the user names it. `pack` holds the bytes of all `files`, one after the other, in that order. `variables` are those
    of the environment that the compilers read, and that were set where it was saved.
    """

    model: str
    environment: Environment
    packages: dict[str, str]
    files: tuple[CachedFile, ...]
    pack: File
    code: str = ""
    variables: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def target(self) -> str:
        """What the bundle calls it: `cache:sm_90`, `cache:cpu`."""
        capability = self.environment.cuda_capability
        return f"cache:sm_{capability.replace('.', '')}" if capability else "cache:cpu"


def publish_cache(store: Store, cache: CompilerCache, tag: str) -> str:
    """Write the manifest and a bundle of its own, and let `model:tag` name it. Returns the bundle's digest.

    The pack must be in the store. Equal files of equal machines give equal bytes.

    Raises StoreError, CorruptError for an unsafe record, ReferenceFormatError, NotFoundError.
    """
    Reference(None, cache.model, tag=tag)
    check_cache(cache)
    record = canonical_json(cache)
    if len(record) > CONFIG_LIMIT:
        raise StoreError(
            f"the list of {len(cache.files)} cached files has {len(record)} bytes; at most {CONFIG_LIMIT} are read",
            hint="let each model compile into a cache folder of its own, and save those",
        )
    with store.sharing():
        config = store.blobs.put_bytes(record)
        layer = {oci.TITLE: f"{hex_of(cache.pack.blob)[:16]}-{PACK}.zst"}
        manifest = store.blobs.put_bytes(
            canonical_json(
                ImageManifest(
                    schema_version=oci.OCI_SCHEMA_VERSION,
                    media_type=oci.MANIFEST,
                    artifact_type=CACHE_TYPE,
                    config=describe(CACHE_CONFIG, config),
                    layers=(describe(FILE, Blob(cache.pack.blob, cache.pack.blob_size), layer),),
                )
            )
        )
        named = {oci.MODEL: cache.model, oci.TARGET: cache.target}
        bundle = store.blobs.put_bytes(
            canonical_json(
                ImageIndex(
                    schema_version=oci.OCI_SCHEMA_VERSION,
                    media_type=oci.INDEX,
                    manifests=(describe(oci.MANIFEST, manifest, named),),
                    annotations={oci.MODEL: cache.model},
                )
            )
        )
        store.set_tag(cache.model, tag, describe(oci.INDEX, bundle, {oci.MODEL: cache.model}))
    return bundle.digest


def read_cache(store: ReadableStore, entry: BundleEntry) -> CompilerCache:
    """The record of a cache, after every check of it that needs no other blob. Raises NotFoundError, CorruptError,
    SchemaVersionError, StoreError."""
    data, manifest = read_config(store, entry.digest, CACHE_TYPE, CACHE_CONFIG)
    cache = decode(data, CompilerCache)
    if (cache.model, cache.target) != (entry.model, entry.target):
        raise _unsafe("a cache of", f"{entry.model} {entry.target}", f"{cache.model[:128]} {cache.target[:128]}")
    if [(layer.digest, layer.size) for layer in manifest.layers] != [(cache.pack.blob, cache.pack.blob_size)]:
        raise _unsafe("a manifest with the layers", cache.pack.blob, f"{len(manifest.layers)} others")
    check_cache(cache)
    return cache


def check_cache(cache: CompilerCache) -> None:
    """Raises CorruptError for a path that could leave its folder, for two files of one path, and for bad digests or
    sizes."""
    check_file_name(cache.pack.name)
    for digest in (cache.pack.digest, cache.pack.blob):
        hex_of(digest)
    seen: set[tuple[str, ...]] = set()
    folders: set[tuple[str, ...]] = set()
    for file in cache.files:
        if file.kind not in KINDS:
            raise _unsafe("a cache of", ", ".join(KINDS), file.kind[:100])
        if file.path.count("/") > MOST_FOLDERS:
            raise _unsafe("a path of", f"{MOST_FOLDERS} folders at most", file.path[:200])
        parts = (file.kind, *file.path.split("/"))
        for part in parts:
            check_file_name(part)
        hex_of(file.digest)
        if not 0 <= file.modified < 2**63:
            raise _unsafe("a time of", "ns since 1970", str(file.modified))
        if parts in seen or file.size < 0:
            raise _unsafe("one file of each path, and its size", file.path[:200], f"another of {file.size} bytes")
        seen.add(parts)
        folders.update(parts[:end] for end in range(1, len(parts)))
    if both := seen & folders:
        raise _unsafe("a file or a folder", "/".join(min(both))[:200], "both")
    if (total := sum(file.size for file in cache.files)) != cache.pack.size:
        raise _unsafe("a pack of", f"{total} bytes", f"{cache.pack.size} bytes")


def _unsafe(what: str, expected: str, actual: str) -> CorruptError:
    return CorruptError(
        f"the record of a compiler cache should name {what} {expected}, and names {actual}",
        hint="it was not written by `aotc cache save`, or was changed: do not trust where it came from",
        expected=expected,
        actual=actual,
    )
