"""Choosing the artifact of a bundle that this machine runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import torch

from aotc.errors import CorruptError, EnvironmentMismatchError, Issue
from aotc.machine.environment import mismatches, this_environment
from aotc.machine.targets import CPU_FEATURES, Target, parse_target
from aotc.records import Artifact

_log = logging.getLogger("aotc")

_ORDER = [*CPU_FEATURES]


class _ForTarget(Protocol):
    @property
    def target(self) -> str: ...


C = TypeVar("C", bound=_ForTarget)


def select_artifact(candidates: Sequence[C], device: torch.device, read: Callable[[C], Artifact]) -> Artifact:
    """The most capable artifact for `device` that this machine runs; `read` gives that of a candidate.

    Only those are read that come before it: from a remote, each costs two requests.

    Raises EnvironmentMismatchError that lists, for every artifact, every mismatch with both values.
    """
    fitting = sorted((one for one in candidates if _target(one).device == device.type), key=_rank)
    if not fitting:
        built = ", ".join(one.target for one in candidates)
        other = f", or build the model for a {device.type} target too" if device.type in ("cpu", "cuda") else ""
        raise EnvironmentMismatchError(
            f"the bundle holds {built or 'nothing'}, and it is to run on {device.type}",
            hint=f"move the module with .to(), or, without one, say another `device`{other}",
        )
    here = this_environment(device)
    rejected: list[Issue] = []
    for candidate in fitting:
        artifact = read(candidate)
        found = mismatches(artifact, here)
        if not found:
            _log.debug("%s: of %s, %s is taken", artifact.model, [one.target for one in candidates], artifact.target)
            return artifact
        _log.debug("%s: %s does not run here: %s", artifact.model, artifact.target, "; ".join(map(str, found)))
        rejected += _named(artifact, found)
    raise EnvironmentMismatchError(
        f"no artifact of `{artifact.model}` runs on this machine",
        issues=tuple(rejected),
        here=here,
    )


def _target(candidate: _ForTarget) -> Target:
    try:
        return parse_target(candidate.target)
    except ValueError as error:
        raise CorruptError(f"the bundle names an unknown target: {error}", hint="a newer aotc may know it") from error


def _rank(candidate: _ForTarget) -> tuple[int, int]:
    """The most capable CPU target first; the highest GPU capability first."""
    target = _target(candidate)
    if target.device == "cpu":
        return _ORDER.index(target.name), 0
    return 0, -int(target.capability.replace(".", ""))


def _named(artifact: Artifact, issues: Iterable[Issue]) -> list[Issue]:
    return [
        Issue(issue.message, where=artifact.target, expected=issue.expected, actual=issue.actual, hint=issue.hint)
        for issue in issues
    ]
