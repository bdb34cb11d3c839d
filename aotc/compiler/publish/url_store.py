"""Builds into a store at a URL: units that are there are not compiled, and each compiled unit is uploaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from aotc.compiler.build_report import Event, OnEvent
from aotc.compiler.planning.cache_lookup import PlannedUnit, look_up
from aotc.compiler.planning.plan import changed_reads
from aotc.errors import Issue, NotFoundError, RemoteError
from aotc.models.factory import build_module
from aotc.store.files.disk import exists
from aotc.store.layout.store import Store, refuse_foreign
from aotc.store.layout.units import StoredUnits
from aotc.store.opening import open_readable
from aotc.store.reference import Reference
from aotc.store.remote.staging import Staging

_log = logging.getLogger("aotc")


class BuildStore(NamedTuple):
    """The folder of the store; for a store at a URL, a staging folder on this host."""

    folder: Path
    staging: Staging | None = None

    def opened(self) -> Store | None:
        """The store, or None if there is none yet. Raises StoreError where the folder holds something else."""
        if exists(self.folder / "oci-layout"):
            return Store.open(self.folder)
        if exists(self.folder):
            refuse_foreign(self.folder)  # as the build would
        return None

    def named(self, model: str, tag: str) -> str:
        """The digest that the tag names; "" where there is no such tag. Raises StoreError, RemoteError."""
        url = self.staging.url if self.staging else None
        try:
            return open_readable(str(url or self.folder)).resolve(Reference(url, model, tag=tag)).digest
        except NotFoundError:
            return ""


def place_of(store: Path | str) -> BuildStore:
    """The place of a store's folder or URL. Raises StoreError for a URL that cannot be built into."""
    if isinstance(store, Path):
        return BuildStore(store)
    staging = Staging(store)
    return BuildStore(staging.store.path, staging)


def with_remote_units(planned: Sequence[PlannedUnit], staging: Staging, folder: Path) -> list[PlannedUnit]:
    """Fetch the finished units that only the URL has. Returns the plan with those that fit the models as they are now;
    `folder` is the manifest's. Raises RemoteError, StoreError."""
    fetched = staging.fetch(plan.unit.key for plan in planned if plan.cached is None)
    if not fetched:
        return [*planned]
    stored = StoredUnits(staging.store)
    changed: dict[str, dict[str, list[Issue]]] = {}
    for spec in {plan.unit.spec.name: plan.unit.spec for plan in planned if plan.unit.key in fetched}.values():
        changed[spec.name] = changed_reads(stored, spec.name, build_module(spec, folder))
    return [
        look_up(stored, plan.unit, False, changed[plan.unit.spec.name]) if plan.unit.key in fetched else plan
        for plan in planned
    ]


def keeping(staging: Staging | None, on_event: OnEvent) -> OnEvent:
    """`on_event`, preceded by the upload of a finished unit if the store is at a URL. A failed upload is tried again at
    the end of the build."""
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
    """Upload the units that are not uploaded yet, and the bundles of these models; their tags come last.

    Raises RemoteError, StoreError.
    """
    for plan in planned:
        staging.keep(plan.unit.key)
    for model in bundles:
        staging.push(model, tag)
