"""What `aotc audit` has found, for Prometheus.

`aotc_advisories` counts the units of which an advisory is, with the labels ref, digest, target, id, effect and sure.
The labels digest and target are those of `aotc_artifact_info`, which each replica exports, so one query tells the
replicas that run such code:

    aotc_artifact_info * on (digest, target) group_left () sum by (digest, target) (aotc_advisories)

`aotc_audited_artifacts` counts what was looked at: 0 says that the audit saw nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol


class AdvisedUnit(Protocol):
    """A unit and an advisory of it: `aotc.tools.audit.audit.Affection`."""

    @property
    def ref(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def effect(self) -> str: ...
    @property
    def sure(self) -> bool: ...


def advisories_text(found: Iterable[AdvisedUnit], artifacts: int) -> str:
    """The metrics in Prometheus' text format, as the node exporter's textfile collector and a push gateway take it."""
    counts = Counter((one.ref, one.digest, one.target, one.id, one.effect, str(one.sure).lower()) for one in found)
    names = ("ref", "digest", "target", "id", "effect", "sure")
    lines = ["# HELP aotc_advisories Units of an artifact of which an advisory is.", "# TYPE aotc_advisories gauge"]
    for labels, count in counts.items():
        text = ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, labels, strict=True))
        lines.append(f"aotc_advisories{{{text}}} {count}")
    lines += [
        "# HELP aotc_audited_artifacts Artifacts that the audit has looked at.",
        "# TYPE aotc_audited_artifacts gauge",
        f"aotc_audited_artifacts {artifacts}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
