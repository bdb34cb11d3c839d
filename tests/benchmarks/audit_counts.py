"""What an audit finds of models that were built without some patches, beside what their calls give: of each patch

without      artifacts that were built without it
hits         of these, those of which the audit says that the advisory applies
wrong        those that gave wrong results, or none where eager raises an error
false alarms hits that are not wrong
missed       wrong, and no hit
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import aotc
from aotc.advisories import own_feed
from aotc.tools.audit.audit import audit
from tests.benchmarks.audit_models import MENDS, PATCHES, Parts, chosen, wrong_parts

COLUMNS = ("without", "hits", "wrong", "false alarms", "missed")


def measured(store: Path, count: int, seed: int) -> tuple[dict[str, Counter[str]], int, list[str]]:
    """The counts of each patch, the number of hits of others, and the models that were not built."""
    done = audit([str(store)], own_feed(), "")
    assert not done.unread, done.unread
    built = {one.ref.rpartition("#")[2].partition(":")[0] for one in done.artifacts}
    found = {(one.model, one.patch) for one in done.found if one.sure}
    counts: dict[str, Counter[str]] = {patch: Counter() for patch in PATCHES}
    explained = set()
    for number, (parts, off) in enumerate(chosen(count, seed)):
        name = f"m{number:02}"
        if name not in built:
            continue
        model = Parts(parts).eval()
        wrong = {
            MENDS.get(part, f"no patch: {part}") for part in wrong_parts(model, aotc.load(f"{store}#{name}", model))
        }
        assert wrong <= {*off}, f"{name}: {wrong} is wrong, though it was built without {off} alone"
        for patch in off:
            hit, is_wrong = (name, patch) in found, patch in wrong
            counts[patch] += Counter(
                {
                    "without": 1,
                    "hits": hit,
                    "wrong": is_wrong,
                    "false alarms": hit and not is_wrong,
                    "missed": is_wrong and not hit,
                }
            )
            explained.add((name, patch))
    return counts, len(found - explained), sorted({f"m{number:02}" for number in range(count)} - built)
