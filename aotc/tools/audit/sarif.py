"""What an audit found as SARIF 2.1.0 (OASIS), which viewers of code scans read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.advisories import Feed
from aotc.tools.audit.audit import Affection

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {"silent": "error", "crash": "warning"}


def sarif(found: Sequence[Affection], feed: Feed, version: str) -> dict[str, Any]:
    """One run, with a rule for each advisory that was found, and a result for each unit that it is of."""
    ids = {each.id for each in found}
    rules = [
        {
            "id": each.id,
            "shortDescription": {"text": each.summary},
            "fullDescription": {"text": each.details or each.summary},
            "defaultConfiguration": {"level": _LEVELS.get(each.concern.effect, "warning")},
        }
        for each in feed.advisories
        if each.id in ids
    ]
    driver = {"name": "aotc audit", "version": version, "rules": rules}
    runs = [{"tool": {"driver": driver}, "results": [*map(_result, found)]}]
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": runs}


def _result(each: Affection) -> dict[str, Any]:
    applies = "applies to" if each.sure else "may apply to"
    return {
        "ruleId": each.id,
        "level": _LEVELS.get(each.effect, "warning") if each.sure else "note",
        "message": {"text": f"{each.id} {applies} {each.ref} for {each.target}, {each.unit}: {each.summary}"},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": each.ref.replace("#", "/").replace("\\", "/")}},
                "logicalLocations": [{"fullyQualifiedName": f"{each.ref} {each.target} {each.unit}", "kind": "object"}],
            }
        ],
        "partialFingerprints": {"unit/v1": f"{each.id}:{each.key}"},
    }
