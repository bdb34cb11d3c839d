"""Comparing the module at load with the one that was captured at build; `aotc.reads.module_issues` says the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal

from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.errors import BindError
from aotc.reads.attributes import (
    backward_hooks,
    hooks_on_all_modules,
    module_attributes,
    training_differs,
)
from aotc.reads.outside import ReadFile, read_here, recorded_reads
from aotc.reads.sources import BY_DIGEST, file_identity, source_digests
from aotc.reads.watch import ModuleWatch
from aotc.records import Artifact, ModuleGuard

ModuleCheck = Literal["class", "source", "attributes", "training"]


def check_module(artifact: Artifact, module: nn.Module, ignore: Collection[ModuleCheck], read_file: ReadFile) -> None:
    """Raises BindError with every way in which `module` is not the one that was captured."""
    guard = artifact.module
    checks: dict[ModuleCheck, Callable[[], bool]] = {
        "class": lambda: type(module).__qualname__ == guard.class_name,
        "training": lambda: module.training is guard.training and training_differs(module) == guard.training_differs,
        "source": lambda: same_sources(guard, module) and not any(changed_imports(guard, module)),
        "attributes": lambda: same_attributes(artifact, module, read_file),
    }
    if differ := [name for name, same in checks.items() if name not in ignore and not same()]:
        from aotc.reads.module_issues import ignore_hint, module_issues

        if issues := module_issues(artifact, module, differ, read_file):
            what = f"this module is not the one that `{artifact.model}` was built from"
            raise BindError(what, issues=tuple(issues), hint=ignore_hint(differ))


def same_sources(guard: ModuleGuard, module: nn.Module) -> bool:
    return source_digests(module, dict(guard.trees)) == guard.sources


def changed_imports(guard: ModuleGuard, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Files that the classes' files import, and these in turn, as far as they are imported here, or would be found:
    the names of those that changed, and what they are here.

    Nothing where a class's own file goes by another name than at build: then so may the others, and another file by
    theirs.
    """
    if not guard.imports:
        return
    trees = dict(guard.trees)
    recorded = {text for texts in guard.sources.values() for text in texts.split(", ")}
    versions = {text for text in recorded if not text.startswith(BY_DIGEST)}
    classes = {type(part).__module__ for part in module.modules()}
    files = {name for name in classes if file_identity(name, trees) not in versions}
    unchanged = {name for name in files if file_identity(name, trees, by_version=False) in recorded}
    if unchanged <= guard.imports.keys():
        for name in sorted(guard.imports.keys() - classes):
            here = file_identity(name, trees, by_version=False)
            if here and here != guard.imports[name]:
                yield name, here


def same_attributes(artifact: Artifact, module: nn.Module, read_file: ReadFile) -> bool:
    """Also those that are compared only because a capture read them, and what it read elsewhere; and no hook is
    registered on all modules, of which training runs those of the backward, too."""
    return (
        not any(backward_hooks_here(artifact, module))
        and not any(hooks_on_all_modules(artifact.trains))
        and sha256_json(module_attributes(module)) == artifact.module.attributes
        and all(
            canonical_json(read_here(module, names, recorded)) == canonical_json(recorded)
            for names, recorded in recorded_reads(artifact, read_file)
        )
    )


def backward_hooks_here(artifact: Artifact, module: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks that compiled code of a backward does not run: torch runs those on a region's own."""
    left_out = {module, *module.children()} if artifact.regions else set()
    return backward_hooks(part for part in module.modules() if part not in left_out) if artifact.trains else []


def watch_module(
    artifact: Artifact,
    module: nn.Module,
    ignore: Collection[ModuleCheck],
    read_file: ReadFile,
    *,
    name: str = "",
    as_region: bool = False,
) -> ModuleWatch:
    """The look that each call takes at the module; without the attributes, at its tree alone."""
    if "attributes" in ignore:
        return ModuleWatch(module, (), (), name or artifact.model, as_region=as_region, hooks=False)
    outside = sorted({name for _, recorded in recorded_reads(artifact, read_file) for name in recorded.outside})
    return ModuleWatch(
        module, artifact.reads, outside, name or artifact.model, as_region=as_region, trains=artifact.trains
    )
