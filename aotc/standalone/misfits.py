"""Which artifacts run without torch, by their records alone."""

from __future__ import annotations

from collections.abc import Iterator

from aotc.records import Artifact
from aotc.shim import lacking
from aotc.standalone.unsupported import unsupported


def misfits(artifact: Artifact) -> tuple[str, ...] | None:
    """Why the standalone runtime cannot run an artifact, in words; () where it can, None where its record does not say
    what its libraries call."""
    reasons = tuple(dict.fromkeys(_reasons(artifact)))
    recorded = all(variant.imports is not None for variant in artifact.variants)
    return reasons if reasons or recorded else None


def _reasons(artifact: Artifact) -> Iterator[str]:
    yield from (issue.message for issue in unsupported(artifact))
    for variant in artifact.variants:
        for name, dtypes in lacking(variant.imports) if variant.imports is not None else ():
            yield f"it calls {name}" + (f" with {dtypes}" if dtypes else "")
