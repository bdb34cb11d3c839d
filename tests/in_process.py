"""Builds in the test's own process: a process of its own would only import torch and its compiler once more."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.cache_lookup import PlannedUnit
from aotc.compiler.pipeline import build, plan_build
from aotc.compiler.publish.url_store import Place
from aotc.compiler.report import BuildReport
from aotc.compiler.request import BuildRequest
from aotc.compiler.workers.forks import ForkServers, unit_environment
from aotc.manifest import Manifest, read_manifest

_OF_ONE_TEST = ("PYTEST_CURRENT_TEST", "AOTC_CACHE_DIR", "PATH")
"""Variables that each forked process is given, and no imported module has read."""

_kept: list[tuple[dict[str, str], ForkServers]] = []


@contextmanager
def shared_servers() -> Iterator[ForkServers]:
    """The fork servers of all builds in this process: to import torch's compiler takes 5 s.

    A test that changes the environment gets servers of its own, since imported modules may have read it.
    """
    environment = unit_environment()
    read = {name: value for name, value in environment.items() if name not in _OF_ONE_TEST}
    if not _kept:
        _kept.append((read, ForkServers()))
        atexit.register(lambda: [servers.close() for _, servers in _kept])
    if _kept[0][0] != read:
        with closing(ForkServers()) as own:
            yield own
        return
    servers = _kept[0][1]
    try:
        servers.begin(environment)
        yield servers
    except BaseException:
        _kept.clear()
        servers.close()
        raise
    if servers.holder is not None:
        servers.holder.close()
        servers.holder = None


def build_here(manifest: Manifest | Path, store: Path, **more: Any) -> BuildReport:
    """`more` are fields of `BuildRequest`. The models' code is forgotten afterwards."""
    manifest = read_manifest(manifest) if isinstance(manifest, Path) else manifest
    with _code_forgotten(manifest.folder), shared_servers() as servers:
        return build(BuildRequest(manifest, store, **more), servers)


@contextmanager
def _code_forgotten(folder: Path) -> Iterator[None]:
    path, modules = [*sys.path], {*sys.modules}
    try:
        yield
    finally:
        sys.path[:] = path
        for name in {*sys.modules} - modules:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]


def plan_here(manifest: Manifest, store: Path, **more: Any) -> list[PlannedUnit]:
    planned, _ = plan_build(BuildRequest(manifest, store, **more), Place(store))
    return planned
