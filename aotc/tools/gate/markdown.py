"""The report of a gate, in Markdown, for a pull request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aotc.verification import Limit
from aotc.verify.verdicts import VerifyReport


def markdown(reports: Sequence[VerifyReport], limits: Mapping[str, Sequence[Limit]], machine: str) -> str:
    """`limits` by model; `machine` says where it was verified."""
    wrong = [report for report in reports if report.status != "ok"]
    verdicts = {one.verdict for each in limits.values() for one in each}
    result = "unmeasured" if "unmeasured" in verdicts else "passed"
    if not reports or wrong or "not kept" in verdicts:
        result = "failed"
    return "\n".join(_lines(reports, limits, machine, wrong, result)) + "\n"


_MARKS = {"kept": "✅", "not kept": "❌", "unmeasured": "❔ unmeasured"}


def _lines(
    reports: Sequence[VerifyReport],
    limits: Mapping[str, Sequence[Limit]],
    machine: str,
    wrong: Sequence[VerifyReport],
    result: str,
) -> Iterator[str]:
    yield f"## aotc verify: {result}"
    yield ""
    yield f"{len(reports) - len(wrong)} of {len(reports)} comparisons with eager passed, on {machine}."
    for model, found in limits.items():
        if found:
            yield ""
            yield from _table(
                (f"{model}: limit", "allowed", "found", ""),
                [(one.name, one.limit, one.found, _MARKS.get(one.verdict, "-")) for one in found],
            )
    if wrong:
        yield ""
        yield from _table(
            ("bucket", "sizes", "result", "detail"),
            [(f"{r.model} {r.bucket} {r.target}", r.sizes, r.status, r.detail.split("\n")[0]) for r in wrong[:_MOST]],
        )
        if len(wrong) > _MOST:
            yield f"\nand {len(wrong) - _MOST} more."
    bundles = dict.fromkeys((report.model, report.bundle) for report in reports if report.bundle)
    if bundles:
        yield ""
        yield from (f"`{model}@{digest}`  " for model, digest in bundles)


_MOST = 20  # rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(map(_cell, head))} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
