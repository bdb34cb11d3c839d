"""Applies the patches of `registry` to this process's torch, and refuses a torch that they do not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from aotc.compiler.patches.patch import NEWEST_TESTED, Patch, Stage, chosen, flaw_of, release
from aotc.compiler.patches.registry import HOOKS, PATCHES
from aotc.errors import BuildError, Issue


class Applied(NamedTuple):
    """The names of a unit's patches, of all stages, and a note for each performance patch that is left out."""

    names: tuple[str, ...]
    left_out: tuple[str, ...]


@contextmanager
def patched(
    stage: Stage,
    device: str = "any",
    options: Mapping[str, Any] = MappingProxyType({}),
    off: Collection[str] = (),
    graph: fx.Graph | None = None,
) -> Iterator[Applied]:
    """Within, torch has the patches of a stage. Raises BuildError where it has not got what they replace."""
    wanted = chosen(PATCHES, device, options, off)
    patches = usable(wanted)
    with ExitStack() as stack:
        for patch in patches:
            if patch.stage == stage:
                stack.enter_context(patch.apply(graph) if patch.of_graph else patch.apply())
        yield Applied(tuple(patch.name for patch in patches), tuple(left_out(wanted)))


def usable(patches: Collection[Patch]) -> list[Patch]:
    """Those of the patches that this torch can be given; without performance patches that it cannot.

    Raises BuildError that lists every other patch, and every hook, that it cannot be given.
    """
    flaws = {patch.name: patch.flaws() for patch in patches}
    needed = [patch for patch in patches if patch.kind != "performance"]
    issues = [Issue(f"`{patch.name}` ({patch.link}): {flaw}") for patch in needed for flaw in flaws[patch.name]]
    hooked = {target: place for place, targets in HOOKS.items() for target in targets}
    issues += [Issue(f"aotc/compiler/{place}: {flaw}") for target, place in hooked.items() if (flaw := flaw_of(target))]
    if issues:
        raise BuildError(
            f"torch {torch.__version__} is not as aotc's patches of it expect",
            issues=tuple(issues),
            hint=f"use torch 2.11 to {'.'.join(map(str, NEWEST_TESTED))}, for which they were tested",
            stage="compile",
        )
    return [patch for patch in patches if not flaws[patch.name]]


def untested() -> str:
    """That this torch is newer than any for which the reproducers were run; "" where it is not."""
    if release(str(torch.__version__)) <= NEWEST_TESTED:
        return ""
    return (
        f"torch {torch.__version__} is newer than {'.'.join(map(str, NEWEST_TESTED))}, the newest that aotc was tested "
        "with: its patches of torch are applied as far as they fit, and `aotc verify` compares the results with eager"
    )


def left_out(patches: Collection[Patch]) -> list[str]:
    """A note for each performance patch that this torch cannot be given."""
    return [
        f"the performance patch `{patch.name}` is left out: {flaw}"
        for patch in patches
        if patch.kind == "performance"
        for flaw in patch.flaws()
    ]
