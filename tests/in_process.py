"""Builds in the test's own process: where nothing is compiled, a process would only import torch once more."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from aotc.compiler.cache_lookup import PlannedUnit
from aotc.compiler.pipeline import build, plan_build
from aotc.compiler.publish.url_store import Place
from aotc.compiler.report import BuildReport
from aotc.compiler.request import BuildRequest
from aotc.compiler.workers.forks import ForkServers
from aotc.manifest import Manifest


def build_here(manifest: Manifest, store: Path, **more: Any) -> BuildReport:
    """`more` are fields of `BuildRequest`."""
    with closing(ForkServers()) as servers:
        return build(BuildRequest(manifest, store, **more), servers)


def plan_here(manifest: Manifest, store: Path, **more: Any) -> list[PlannedUnit]:
    planned, _ = plan_build(BuildRequest(manifest, store, **more), Place(store))
    return planned
