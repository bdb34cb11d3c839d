"""The finished units of a build become one bundle for each model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from aotc.amounts import counted
from aotc.compiler.build_report import Outcome
from aotc.compiler.publish.target_artifacts import merge
from aotc.errors import BuildError
from aotc.provenance import BuiltArtifact
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord

UnitResult = tuple[Outcome, UnitRecord | None]


def source_date() -> str:
    """The creation date in a bundle: SOURCE_DATE_EPOCH, or "" where it is not set.

    Equal units give equal bundles wherever and whenever they were built, so no clock is read
    (https://reproducible-builds.org/specs/source-date-epoch). The tag holds the time of publication. Raises BuildError.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        return ""
    try:
        return datetime.fromtimestamp(int(epoch), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        raise BuildError(
            f"SOURCE_DATE_EPOCH is {epoch!r}, which is not a number of seconds since 1970",
            hint="set it to a whole number, as `git log -1 --format=%ct` gives, or leave it out",
        ) from None


class Publication(NamedTuple):
    """The results, in which units that cannot be merged into one bundle have failed; the digest of each published
    bundle by model; and why the other models of which a unit was built were not published."""

    results: list[UnitResult]
    bundles: dict[str, str]
    unpublished: dict[str, str]


def publish_bundles(
    store: Store,
    tag: str,
    results: Sequence[UnitResult],
    partial: bool = False,
) -> Publication:
    """Publish one bundle for each model all of whose units were built.

    With `partial`, also of a model of which some were: of the artifacts in which each region has code.
    """
    done, created = Publication([*results], {}, {}), source_date()
    for model in dict.fromkeys(outcome.model for outcome, _ in results):
        units = [index for index, (outcome, _) in enumerate(results) if outcome.model == model]
        built = {index: record for index in units if (record := results[index][1]) is not None}
        if not built:
            continue
        if missing := 0 if partial else len(units) - len(built):
            done.unpublished[model] = f"{missing} of {counted(len(units), 'unit')} failed"
            continue
        try:
            artifacts = merge(record.artifact for record in built.values())
        except BuildError as error:
            for index, record in built.items():
                done.results[index] = msgspec.structs.replace(results[index][0], status="failed", error=error), record
            done.unpublished[model] = "its units cannot be merged into one bundle"
            continue
        if callable_ones := [artifact for artifact in artifacts if not regions_without_code(artifact)]:
            done.bundles[model] = publish(store, model, tag, callable_ones, created=created)
        else:
            done.unpublished[model] = "a region of which no unit was built leaves no call that could run"
    return done


def regions_without_code(artifact: BuiltArtifact) -> list[str]:
    """The regions of which no unit was built: a call of the model would miss there, whatever its sizes."""
    built = {variant.region for variant in artifact.variants}
    return [region.name for region in artifact.regions if region.name not in built]
