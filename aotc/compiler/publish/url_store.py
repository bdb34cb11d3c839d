"""Builds for a store at a URL: what is there is not compiled, and what is compiled goes there unit by unit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aotc.compiler.cache_lookup import PlannedUnit, look_up
from aotc.compiler.report import Event, OnEvent
from aotc.errors import RemoteError
from aotc.store import Store
from aotc.store.files.disk import exists
from aotc.store.remote.staging import Staging

_log = logging.getLogger("aotc")


class Place(NamedTuple):
    """Where a build works: in the store's folder, or for a store at a URL in one on this host."""

    folder: Path
    staging: Staging | None = None

    def opened(self) -> Store | None:
        """Raises StoreError where the folder holds something else."""
        return Store.open(self.folder) if exists(self.folder / "oci-layout") else None


def place_of(store: Path | str) -> Place:
    """Raises StoreError for a URL that cannot be built into."""
    if isinstance(store, Path):
        return Place(store)
    staging = Staging(store)
    return Place(staging.store.path, staging)


def with_remote_units(planned: Sequence[PlannedUnit], staging: Staging) -> list[PlannedUnit]:
    """The plan, after the finished units that only the URL has were fetched. Raises RemoteError, StoreError."""
    fetched = staging.fetch(plan.unit.key for plan in planned if plan.cached is None)
    return [look_up(staging.store, plan.unit, False) if plan.unit.key in fetched else plan for plan in planned]


def keeping(staging: Staging | None, on_event: OnEvent) -> OnEvent:
    """`on_event`, where there is a URL after each finished unit was uploaded. What cannot be reached now is tried again
    at the end."""
    if staging is None:
        return on_event

    def event(event: Event) -> None:
        if event.outcome is not None and event.outcome.status != "failed":
            try:
                staging.keep(event.unit.key)
            except RemoteError as error:
                _log.warning("%s is not uploaded yet: %s", event.unit.name, error.message)
        on_event(event)

    return event


def publish_remotely(planned: Sequence[PlannedUnit], bundles: Sequence[str], tag: str, staging: Staging) -> None:
    """Upload what is left of the units, and the bundles of these models; their tags come last.

    Raises RemoteError, StoreError.
    """
    for plan in planned:
        staging.keep(plan.unit.key)
    for model in bundles:
        staging.push(model, tag)
