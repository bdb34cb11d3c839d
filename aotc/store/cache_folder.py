"""The cache folder: bundles that aotc has fetched, and facts that it remembers, on this host."""

from __future__ import annotations

import os
from pathlib import Path

from aotc.errors import StoreError


def cache_folder() -> Path:
    """`$AOTC_CACHE_DIR`, else `$XDG_CACHE_HOME/aotc`, else `~/.cache/aotc`. Raises StoreError without a home.

    folder/
    ├── store/            what was fetched: an ordinary store (`aotc.store.remote.fetching`)
    ├── remembered/       what `aotc.compile` builds: an ordinary store
    ├── remembered-copies/  of stores at URLs, in which it works (`aotc.tools.remembering.memory.remote_memory`)
    ├── staging-v1/       stores of builds for a URL (`aotc.store.remote.staging`)
    ├── trust-v1/         the newest signatures that were accepted (`aotc.store.signing.trust`)
    └── …                 what builds keep (`aotc.store.compile_cache`)
    """
    if chosen := os.environ.get("AOTC_CACHE_DIR"):
        return Path(chosen).absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # a relative one is to be ignored, says the XDG base directory specification
        return xdg / "aotc"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise StoreError(f"this user has no home folder: {error}", hint="set AOTC_CACHE_DIR") from error
    return home / ".cache" / "aotc"
