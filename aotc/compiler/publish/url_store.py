"""Builds for a store at a URL: what is there is not compiled, and what is compiled goes there unit by unit."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from aotc.compiler.pipeline import Event, OnEvent
from aotc.compiler.plan import PlannedUnit, look_up
from aotc.errors import RemoteError
from aotc.store.staging import Staging

_log = logging.getLogger("aotc")


def with_remote_units(planned: Sequence[PlannedUnit], staging: Staging) -> list[PlannedUnit]:
    """The plan, after the finished units that only the URL has were fetched. Raises RemoteError, StoreError."""
    fetched = staging.fetch(plan.unit.key for plan in planned if plan.cached is None)
    return [look_up(staging.store, plan.unit, False) if plan.unit.key in fetched else plan for plan in planned]


def keeping(staging: Staging, on_event: OnEvent) -> OnEvent:
    """`on_event`, after each finished unit was uploaded. What cannot be reached now is tried again at the end."""

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
