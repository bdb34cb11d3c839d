"""Choosing the artifact of a bundle that this machine runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from aotc.environment import mismatches, this_environment
from aotc.errors import CorruptError, EnvironmentMismatchError, Issue
from aotc.records import Artifact
from aotc.targets import CPU_FEATURES, Target, parse_target

_ORDER = [*CPU_FEATURES]


def select_artifact(artifacts: Sequence[Artifact], device: torch.device) -> Artifact:
    """The most capable artifact for `device` that this machine runs.

    Raises EnvironmentMismatchError that lists, for every artifact, every mismatch with both values.
    """
    candidates = sorted((a for a in artifacts if _target(a).device == device.type), key=_rank)
    if not candidates:
        built = ", ".join(artifact.target for artifact in artifacts)
        raise EnvironmentMismatchError(
            f"the bundle holds {built or 'nothing'}, and the module is on {device.type}",
            hint=f"move the module with .to(), or build the model for a {device.type} target too",
        )
    here = this_environment(device)
    rejected: list[Issue] = []
    for artifact in candidates:
        found = mismatches(artifact, here)
        if not found:
            return artifact
        rejected += _named(artifact, found)
    raise EnvironmentMismatchError(
        f"no artifact of `{candidates[0].model}` runs on this machine",
        issues=tuple(rejected),
        here=here,
    )


def _target(artifact: Artifact) -> Target:
    try:
        return parse_target(artifact.target)
    except ValueError as error:
        raise CorruptError(
            f"the record of `{artifact.model}` names an unknown target: {error}", hint="a newer aotc may know it"
        ) from error


def _rank(artifact: Artifact) -> tuple[int, int]:
    """The most capable CPU target first; the highest GPU capability first."""
    target = _target(artifact)
    if target.device == "cpu":
        return _ORDER.index(target.name), 0
    return 0, -int(target.capability.replace(".", ""))


def _named(artifact: Artifact, issues: Iterable[Issue]) -> list[Issue]:
    return [
        Issue(issue.message, where=artifact.target, expected=issue.expected, actual=issue.actual, hint=issue.hint)
        for issue in issues
    ]
