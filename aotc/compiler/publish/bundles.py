"""The finished units of a build become one bundle for each model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from aotc.compiler.publish.target_artifacts import merge
from aotc.compiler.report import Outcome
from aotc.errors import BuildError
from aotc.provenance import BuiltArtifact
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord

Result = tuple[Outcome, UnitRecord | None]


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


def publish_bundles(store: Store, tag: str, results: Sequence[Result]) -> tuple[list[Result], dict[str, str]]:
    """Publish one bundle for each model of which a unit was built, of the artifacts in which each region has code.

    Returns the results, in which units that cannot be merged into one bundle have failed, and the digest of each bundle
    by model.
    """
    results, bundles, created = list(results), {}, source_date()
    for model in dict.fromkeys(outcome.model for outcome, _ in results):
        built = {index: record for index, (outcome, record) in enumerate(results) if record and outcome.model == model}
        if not built:
            continue
        try:
            artifacts = merge(record.artifact for record in built.values())
        except BuildError as error:
            for index, record in built.items():
                results[index] = msgspec.structs.replace(results[index][0], status="failed", error=error), record
            continue
        if callable_ones := [artifact for artifact in artifacts if not regions_without_code(artifact)]:
            bundles[model] = publish(store, model, tag, callable_ones, created=created)
    return results, bundles


def regions_without_code(artifact: BuiltArtifact) -> list[str]:
    """The regions of which no unit was built: a call of the model would miss there, whatever its sizes."""
    built = {variant.region for variant in artifact.variants}
    return [region.name for region in artifact.regions if region.name not in built]
