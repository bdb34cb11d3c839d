"""Which artifact of a bundle a machine runs: the most capable one that has no mismatch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from aotc.errors import CorruptError, EnvironmentMismatchError, Issue
from aotc.machine.targets import CPU_FEATURES, Target, parse_target
from aotc.records import Artifact, Environment
from aotc.store.layout.bundle import is_a_cache


class ForTarget(Protocol):
    """Something that is for a target, as an artifact and its entry in a bundle are."""

    @property
    def target(self) -> str: ...


_log = logging.getLogger("aotc")

_ORDER = [*CPU_FEATURES]

C = TypeVar("C", bound=ForTarget)


def of_target(entries: Sequence[C], target: str | None) -> list[C]:
    """Those for `target`; all where it is None. Raises EnvironmentMismatchError where there are others only."""
    fitting = [entry for entry in entries if target in (None, entry.target)]
    if fitting or not entries:
        return fitting
    hint = "leave `target` out: then the most capable one that this machine runs is taken"
    held = [entry.target for entry in entries]
    known = [*held, *CPU_FEATURES]
    import difflib

    meant = [name for name in known if name.partition(":")[2] == target] or difflib.get_close_matches(
        str(target), known, n=1, cutoff=0.8
    )
    if target not in known and meant:
        hint = f"did you mean {meant[0]!r}? Or {hint}"
    raise EnvironmentMismatchError(f"the bundle holds {', '.join(held)}, and nothing for {target!r}", hint=hint)


def most_capable(
    candidates: Sequence[C],
    device: str,
    read: Callable[[C], Artifact],
    mismatches: Callable[[Artifact, Environment], list[Issue]],
    this_machine: Callable[[], Environment],
) -> Artifact:
    """The most capable artifact for a type of device that this machine runs; `read` gives that of a candidate.

    Only those are read that come before it: from a remote, each costs two requests.

    Raises EnvironmentMismatchError that lists, for every artifact, every mismatch with both values.
    """
    fitting = sorted((one for one in candidates if _target(one).device == device), key=_rank)
    if not fitting:
        built = ", ".join(one.target for one in candidates)
        other = f", or build the model for a {device} target too" if device in ("cpu", "cuda") else ""
        raise EnvironmentMismatchError(
            f"the bundle holds {built or 'nothing'}, and it is to run on {device}",
            hint=f"move the module with .to(), or, without one, say another `device`{other}",
        )
    here = this_machine()
    rejected: list[Issue] = []
    for candidate in fitting:
        artifact = read(candidate)
        found = mismatches(artifact, here)
        if not found:
            _log.debug("%s: of %s, %s is taken", artifact.model, [one.target for one in candidates], artifact.target)
            return artifact
        _log.debug("%s: %s does not run here: %s", artifact.model, artifact.target, "; ".join(map(str, found)))
        rejected += [msgspec.structs.replace(issue, where=artifact.target) for issue in found]
    raise EnvironmentMismatchError(
        f"no artifact of `{artifact.model}` runs on this machine",
        issues=tuple(rejected),
        here=here,
    )


def _target(candidate: ForTarget) -> Target:
    if candidate.target.startswith("cache:"):
        raise is_a_cache()
    try:
        return parse_target(candidate.target)
    except ValueError as error:
        raise CorruptError(f"the bundle names an unknown target: {error}", hint="a newer aotc may know it") from error


def _rank(candidate: ForTarget) -> tuple[int, int]:
    """The most capable CPU target first; the highest GPU capability first."""
    target = _target(candidate)
    if target.device == "cpu":
        return _ORDER.index(target.name), 0
    return 0, -int(target.capability.replace(".", ""))
