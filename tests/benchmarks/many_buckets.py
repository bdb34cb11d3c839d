"""An artifact of many buckets without many compiles, for benchmarks of what carries it.

The variants of manifests/quickstart.yaml, published again and again with other batch sizes and a few bytes behind each
library: an ELF file loads fine with bytes behind it, so every blob is distinct, and real.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from doctoring import CREATED, artifact_of, library_bytes, with_library
from processes import ROOT, environment

from aotc.records import Artifact, Variant
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store

MODEL = "quickstart"


def built_store(folder: Path, ready: Path | None) -> Store:
    """A store with the quickstart model: a copy of `ready`, or built now, which takes about half a minute."""
    store = folder / "store"
    if ready is not None:
        subprocess.run(["cp", "-r", str(ready), str(store)], check=True)
    else:
        manifest = ROOT / "manifests" / "quickstart.yaml"
        command = [sys.executable, "-m", "aotc", "build", str(manifest), "--store", str(store), "--json"]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, check=True)
    return Store.open(store)


def publish_many(store: Store, tag: str, count: int, changed: int = 0) -> None:
    """`quickstart:tag` with `count` buckets; the last `changed` of them have other bytes than under another tag."""
    built = artifact_of(store, MODEL)
    libraries = [library_bytes(store, variant) for variant in built.variants]
    variants = []
    for number in range(count):
        which = number % len(libraries)
        version = tag if number >= count - changed else ""
        tail = f"bucket {number} {version}".encode().ljust(64, b".")
        variants.append(_bucket(store, built.variants[which], number, libraries[which] + tail))
    many: Artifact = msgspec.structs.replace(built, variants=tuple(variants))
    publish(store, MODEL, tag, [many], created=CREATED)


def _bucket(store: Store, variant: Variant, number: int, library: bytes) -> Variant:
    sized = with_library(store, variant, library)
    return msgspec.structs.replace(sized, bucket={**variant.bucket, "batch": number + 1}, key=f"sha256:{number:064x}")
