"""Apply the patches of `registry` to this process's torch, and refuse a torch that they do not fit."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx

from aotc.advisories import release
from aotc.compiler.patches.machinery.graph_operators import operators_of
from aotc.compiler.patches.machinery.patch import NEWEST_TESTED, Patch, PatchStage, chosen, flaw_of
from aotc.compiler.patches.machinery.registry import HOOKS, PATCHES
from aotc.errors import BuildError, Issue


class Applied(NamedTuple):
    """The names of a unit's patches, of all stages, and a note for each patch that is left out."""

    names: tuple[str, ...]
    left_out: tuple[str, ...]


@contextmanager
def patched(
    stage: PatchStage,
    device: str = "any",
    options: Mapping[str, Any] = MappingProxyType({}),
    off: Collection[str] = (),
    graph: fx.Graph | None = None,
) -> Iterator[Applied]:
    """While active, the patches of a stage are applied. Raises BuildError if this torch lacks a target of a patch that
    the graph needs; before there is a graph, of one that every graph needs."""
    wanted = chosen(PATCHES, device, options, off)
    names = None if graph is None else operators_of(graph)
    patches = usable(wanted, names)
    with ExitStack() as stack:
        for patch in patches:
            if patch.stage == stage:
                stack.enter_context(patch.apply(graph))
        yield Applied(tuple(patch.name for patch in patches), (*left_out(wanted), *switched_off(device, options, off)))


def usable(patches: Collection[Patch], names: Collection[str] | None) -> list[Patch]:
    """The patches that fit this torch. Of the others, performance patches are left out, and those of which the graph
    has no operator (`names`, see `Patch.concerns`).

    Raises BuildError, which lists every other patch, and every hook, that does not fit.
    """
    flaws = {patch.name: patch.flaws() for patch in patches}
    needed = [patch for patch in patches if patch.kind != "performance" and patch.concerns(names)]
    issues = [Issue(f"`{patch.name}` ({patch.link}): {flaw}") for patch in needed for flaw in flaws[patch.name]]
    hooked = {target: place for place, targets in HOOKS.items() for target in targets}
    issues += [Issue(f"aotc/compiler/{place}: {flaw}") for target, place in hooked.items() if (flaw := flaw_of(target))]
    if issues:
        raise BuildError(
            f"torch {torch.__version__} is not as aotc's patches expect",
            issues=tuple(issues),
            hint=f"use torch 2.11 to {'.'.join(map(str, NEWEST_TESTED))}, with which the patches were tested",
            stage="compile",
        )
    return [patch for patch in patches if not flaws[patch.name]]


def switched_off(device: str, options: Mapping[str, Any], off: Collection[str]) -> list[str]:
    """A note for each patch of a bug that the manifest switches off."""
    return [
        f"the patch `{patch.name}` is off, by the manifest: {patch.title} `aotc audit` calls it {patch.advisory}"
        for patch in chosen(PATCHES, device, options)
        if patch.name in off and patch.advisory
    ]


def untested() -> str:
    """A note that this torch is newer than any with which the reproducers were run; "" where it is not."""
    if release(str(torch.__version__)) <= NEWEST_TESTED:
        return ""
    return (
        f"torch {torch.__version__} is newer than {'.'.join(map(str, NEWEST_TESTED))}, the newest that aotc was tested "
        "with: its patches of torch are applied as far as they fit, and `aotc verify` compares the results with eager"
    )


def left_out(patches: Collection[Patch]) -> list[str]:
    """A note for each patch that does not fit this torch, and is not needed."""
    return [
        f"the performance patch `{patch.name}` is left out: {flaw}"
        if patch.kind == "performance"
        else f"the patch `{patch.name}` is left out, as the graph has none of its operators: {flaw}"
        for patch in patches
        for flaw in patch.flaws()
    ]
