"""Comparing the module at load with the one that was captured at build; `aotc.runtime.explain.module` says the rest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Literal

from torch import nn

from aotc.digest import sha256_json
from aotc.errors import BindError
from aotc.records import Artifact, File, ModuleGuard
from aotc.snapshot.attributes import hooks_on_all_modules, module_attributes, read_attributes, training_differs
from aotc.snapshot.sources import BY_DIGEST, file_identity, source_digests

ModuleCheck = Literal["class", "source", "attributes", "training"]
ReadFile = Callable[[File], bytes]


def check_module(artifact: Artifact, module: nn.Module, ignore: Collection[ModuleCheck], read_file: ReadFile) -> None:
    """Raises BindError with every way in which `module` is not the one that was captured."""
    guard = artifact.module
    checks: dict[ModuleCheck, Callable[[], bool]] = {
        "class": lambda: type(module).__qualname__ == guard.class_name,
        "training": lambda: module.training is guard.training and training_differs(module) == guard.training_differs,
        "source": lambda: same_sources(guard, module) and not any(changed_imports(guard, module)),
        "attributes": lambda: same_attributes(artifact, module),
    }
    if differ := [name for name, same in checks.items() if name not in ignore and not same()]:
        from aotc.runtime.explain.module import ignore_hint, module_issues

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


def same_attributes(artifact: Artifact, module: nn.Module) -> bool:
    """Also those that are compared only because a capture read them; and no hook is registered on all modules."""
    if any(hooks_on_all_modules()) or sha256_json(module_attributes(module)) != artifact.module.attributes:
        return False
    files = {variant.reads: variant.read_values for variant in artifact.variants}
    return all(is_read_value(read_attributes(module, names), file) for names, file in files.items())


def is_read_value(here: object, file: File | None) -> bool:
    return not here if file is None else sha256_json(here) == file.digest
