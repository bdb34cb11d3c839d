"""The finished units of a build become one bundle for each model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aotc.compiler.publish.target_artifacts import merge
from aotc.compiler.report import Outcome
from aotc.errors import BuildError
from aotc.store import Store, UnitRecord, publish

Result = tuple[Outcome, UnitRecord | None]


def publish_bundles(store: Store, tag: str, results: Sequence[Result]) -> tuple[list[Result], dict[str, str]]:
    """One bundle for each model of which a unit was built, by its digest. Units that do not go together into one have
    failed: so the results are given back."""
    results, bundles = list(results), {}
    for model in dict.fromkeys(outcome.model for outcome, _ in results):
        built = {index: record for index, (outcome, record) in enumerate(results) if record and outcome.model == model}
        if not built:
            continue
        # Of the newest unit, so that an unchanged rebuild gives the same bundle.
        created = max(record.created for record in built.values())
        try:
            artifacts = merge(record.artifact for record in built.values())
        except BuildError as error:
            for index, record in built.items():
                results[index] = msgspec.structs.replace(results[index][0], status="failed", error=error), record
            continue
        bundles[model] = publish(store, model, tag, artifacts, created=created)
    return results, bundles
