"""The module at a load and the one that was captured at the build: each difference that matters, with both values."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.errors import BindError, CorruptError, Issue
from aotc.reads.attributes import (
    ORDER,
    backward_hooks,
    hooks_on_all_modules,
    origin_of,
)
from aotc.reads.module_identity import NOWHERE, ModuleIdentity, value_differences
from aotc.reads.outside import ABSENT, ENVIRONMENT, ReadFile, changed_names, read_here, recorded_reads
from aotc.reads.sources import BY_DIGEST, file_identity, file_of, source_digests
from aotc.reads.watch import ModuleWatch

if TYPE_CHECKING:
    from aotc.records import Artifact, ModuleGuard, Reads

ModuleCheck = Literal["class", "source", "attributes", "training"]


def check_module(artifact: Artifact, module: nn.Module, ignore: Collection[ModuleCheck], read_file: ReadFile) -> None:
    """Raises BindError with every way that matters in which `module` is not the one that was captured."""
    found: dict[ModuleCheck, list[Issue]] = {}
    identity = ModuleIdentity(module, dict(artifact.module.trees))
    for name, find in _CHECKS.items():
        if name not in ignore and (issues := find(artifact, identity, read_file)):
            found[name] = issues
    if found:
        issues = found.get("class") or [issue for each in found.values() for issue in each]  # else all differs, too
        what = f"this module is not the one that `{artifact.model}` was built from"
        raise BindError(what, issues=tuple(issues), hint=_ignore_hint(found))


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
        return ModuleWatch(module, (), {}, name or artifact.model, as_region=as_region, hooks=False)
    outside = {name: value for _, reads in recorded_reads(artifact, read_file) for name, value in reads.outside.items()}
    return ModuleWatch(
        module, artifact.reads, outside, name or artifact.model, as_region=as_region, trains=artifact.trains
    )


def _ignore_hint(differ: Collection[ModuleCheck]) -> str:
    """How to load despite a difference. "" for a module of another class and with other attributes: it is another
    model."""
    if {"class", "attributes"} <= {*differ}:
        return ""
    allowed = ", ".join(f'"{name}"' for name in differ if name != "training")
    return f"where the difference cannot matter: aotc.load(…, ignore=[{allowed}])" if allowed else ""


def _class_issues(artifact: Artifact, identity: ModuleIdentity, _: ReadFile) -> list[Issue]:
    module, built, here = identity.module, artifact.module.class_name, identity.class_name
    if built == here:
        return []
    paths = [path for path, part in module.named_modules() if type(part).__qualname__ == built]
    hint = f"pass its child `{paths[0]}`, a {built}" if paths else f"pass a {built}, as the manifest's factory makes it"
    if len(paths) > 1:
        hint = f"pass the one of its {len(paths)} children of class {built} that was built, like `{paths[0]}`"
    return [Issue(f"built from class {built}, the module is a {here}", expected=built, actual=here, hint=hint)]


def _training_issues(artifact: Artifact, identity: ModuleIdentity, _: ReadFile) -> list[Issue]:
    guard, module = artifact.module, identity.module
    differ = [name for name, part in module.named_modules() if part.training is not guard.training_of(name)]
    found = []
    for built in (True, False):
        if wrong := [name for name in differ if guard.training_of(name) is built]:
            first = wrong[0]
            found.append(
                Issue(
                    f"built with training={built}, training={not built} in {len(wrong)} of its modules, first "
                    f"`{first or type(module).__qualname__}`",
                    expected=str(built),
                    actual=str(not built),
                    hint=f"{call_of_mode(built, first if guard.training_differs else '')} before the load",
                )
            )
    return found


def call_of_mode(training: bool, path: str) -> str:
    """The advice that sets the training flags of the submodule at `path`; of the whole module for ""."""
    part = f".get_submodule({path!r})" if path else ""
    return f"call module{part}.{'train' if training else 'eval'}()"


def _absent(name: str, modules_of: Mapping[str, str]) -> str:
    """Why the source of a class of the build is not found in the module; `modules_of` has the module's own classes."""
    if name not in modules_of:
        return f"no part of it is a {name}"
    return (
        f"its class {name} is of a Python module `{modules_of[name]}` whose source file is not known here, and cannot "
        "be compared with the build's"
    )


def _source_issues(artifact: Artifact, identity: ModuleIdentity, _: ReadFile) -> list[Issue]:
    built, module, here = artifact.module.sources, identity.module, identity.sources
    imports = _import_issues(artifact.module, module)
    if here == built:
        return imports
    # It may have been built from its folder, and be installed.
    files = source_digests(module, dict(artifact.module.trees), by_version=False)
    here = {name: files[name] if files.get(name) == built.get(name) else text for name, text in here.items()}
    classes = {type(part) for part in module.modules()}
    files_of = {cls.__qualname__: f", in {file}" for cls in classes if (file := file_of(cls.__module__))}
    modules_of = {cls.__qualname__: cls.__module__ for cls in classes}
    return (
        [
            Issue(
                f"the source of class {name} changed since the build{files_of.get(name, '')}"
                if name in here
                else _absent(name, modules_of),
                expected=built[name],
                actual=here.get(name, "no source file is known" if name in modules_of else "not part of the module"),
                hint="import it as the manifest's factory names it; a module that a program loads itself belongs in "
                "sys.modules"
                if name in modules_of and name not in here
                else "rebuild the model",
            )
            for name in sorted(built)
            if here.get(name) != built[name]
        ]
        + [
            Issue(f"the module holds a class {name} that the build did not see", actual=here[name], hint="rebuild")
            for name in sorted(here.keys() - built.keys())
        ]
        + imports
    )


def _changed_imports(guard: ModuleGuard, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Files that the classes' files import, and these in turn, as far as they are imported here, or would be found:
    the names of those that changed, and what they are here.

    If a class's source module was renamed since the build, no import is compared: they may be renamed too.
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


def _import_issues(built: ModuleGuard, module: nn.Module) -> list[Issue]:
    return [
        Issue(
            f"the source of `{name}`, which the module's code imports, changed since the build"
            + (f", in {file}" if (file := file_of(name)) else ""),
            expected=built.imports[name],
            actual=here,
            hint="rebuild the model",
        )
        for name, here in _changed_imports(built, module)
    ]


def _attribute_issues(artifact: Artifact, identity: ModuleIdentity, read_file: ReadFile) -> list[Issue]:
    module = identity.module
    reads = [each for recorded in recorded_reads(artifact, read_file) for each in read_issues(module, *recorded)]
    return [*_hook_issues(artifact, module), *_plain_issues(artifact, identity, read_file), *dict.fromkeys(reads)]


def _plain_issues(artifact: Artifact, identity: ModuleIdentity, read_file: ReadFile) -> list[Issue]:
    """Of the attributes that are compared whatever a capture read."""
    here = identity.attributes
    if identity.attributes_digest == artifact.module.attributes:
        return []
    differ = Issue(
        "the module's Python attributes are not those of the build",
        expected=artifact.module.attributes,
        actual=identity.attributes_digest,
        hint=_ATTRIBUTES_HINT,
    )
    if artifact.module.attributes_file is None:
        return [differ]
    try:
        built = _decode_attributes(read_file(artifact.module.attributes_file))
        found = _found_differences(built, _decode_attributes(canonical_json(here)))
    except RecursionError as error:
        raise CorruptError("the record of the module's attributes is nested too deeply") from error
    read = {origin for variant in artifact.variants for origin in variant.origins}
    matters = [
        _attribute_issue((path, name, members, one, other))
        for path, name, members, one, other in found
        if (not (origin := origin_of(name)) or origin in read)
        and not _is_set_by_forward(artifact, ".".join(filter(None, (path, name))), here.get(path, {}).get(name))
    ]
    return matters if found else [differ]


_CHECKS: dict[ModuleCheck, Callable[[Artifact, ModuleIdentity, ReadFile], list[Issue]]] = {
    "class": _class_issues,
    "training": _training_issues,
    "source": _source_issues,
    "attributes": _attribute_issues,
}


def _is_set_by_forward(artifact: Artifact, attribute: str, value: Any) -> bool:
    """Whether each variant sets an attribute before it reads it, or some variant's call has left this value in it."""
    regions = {variant.region for variant in artifact.variants if attribute in variant.assigned}
    if regions and all(attribute in variant.assigned for variant in artifact.variants if variant.region in regions):
        return True
    left = {variant.left[attribute] for variant in artifact.variants if attribute in variant.left}
    return bool(left) and sha256_json(value) in left


def _hook_issues(artifact: Artifact, module: nn.Module) -> Iterator[Issue]:
    if count := sum(map(len, hooks_on_all_modules(artifact.trains))):
        what = f"{count} hooks are registered on all modules, which compiled code does not run"
        yield Issue(what, expected="0", actual=str(count), hint="remove them before the load")
    if count := sum(map(len, _backward_hooks_here(artifact, module))):
        what = f"{count} hooks are registered on the backward of its modules, which compiled code does not run"
        hint = (
            "remove them; hooks on parameters, inputs and results run, as does one on a module that stays eager around"
        )
        yield Issue(what, expected="0", actual=str(count), hint=f"{hint} this one")


def _backward_hooks_here(artifact: Artifact, module: nn.Module) -> list[dict[int, Any]]:
    """The tables of hooks that compiled code of a backward does not run: torch runs those on a region's own."""
    left_out = {module, *module.children()} if artifact.regions else set()
    return backward_hooks(part for part in module.modules() if part not in left_out) if artifact.trains else []


def _decode_attributes(data: bytes) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(data, type=dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the record of the module's attributes cannot be read: {error}") from error


# -- what the captures read -------------------------------------------------------------------------------------------

AttributeDifference = tuple[str, str, tuple[str, ...], str, str]
"""The submodule's path, the attribute, the members of it that lead there, and both values."""

_ATTRIBUTES_HINT = (
    "Python attributes are part of the compiled code: construct the module with the `kwargs` of its manifest, or "
    "rebuild the model"
)


def _found_differences(
    built: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[AttributeDifference]:
    """Where attributes differ, by submodule."""
    return [
        (path, name, members, _shown(one), _shown(other))
        for path in sorted(built.keys() | now.keys())
        for name in sorted(built.get(path, {}).keys() | now.get(path, {}).keys())
        for members, one, other in value_differences(
            built.get(path, {}).get(name, NOWHERE), now.get(path, {}).get(name, NOWHERE)
        )
        if name != ORDER or (NOWHERE not in (one, other) and sorted(one) == sorted(other))  # else parts differ
    ]


def read_issues(module: nn.Module, names: Collection[str], recorded: Reads) -> list[Issue]:
    """Of the attributes called `names` that are compared only because a capture read them, and of what it read outside
    the module."""
    here = read_here(module, names, recorded)
    if canonical_json(here) == canonical_json(recorded):
        return []
    of_module = _found_differences(recorded.attributes, here.attributes)
    outside = changed_names(recorded.outside, here.outside)
    return [*map(_attribute_issue, of_module), *(_outside_issue(*each) for each in outside)]


def _outside_issue(name: str, built: Any, here: Any) -> Issue:
    if name.startswith(ENVIRONMENT):
        set_at_build, now = built is not None, os.environ.get(name[1:])
        built, here = "another value" if set_at_build else "not set", "not set" if now is None else repr(now)
        what = f"the environment variable {name[1:]}, which forward reads, was {built} at the build, and is {here} here"
        return Issue(what, where=name, expected=built, actual=here, hint="set it as the build had it, or rebuild")
    built, here = (_shown(NOWHERE if value == ABSENT else value) for value in (built, here))
    return Issue(
        f"forward reads it: built with {built}, here it is {here}",
        where=name,
        expected=built,
        actual=here,
        hint="values that forward reads are part of the compiled code: set it as the build had it, or rebuild",
    )


def _attribute_issue(difference: AttributeDifference) -> Issue:
    path, name, members, built, here = difference
    hint = _ATTRIBUTES_HINT
    if name == "forward hooks":
        hint = (
            "compiled code runs the hooks of the build and no others: remove the hook before the load, or rebuild with"
        )
        hint += " it"
    elif "use_cache" in (name.rpartition(".")[2], *members):
        hint = "write `use_cache: false` among the manifest's inputs and build again: then no configuration decides it"
    where = ".".join(filter(None, (path, name, *members)))
    return Issue(f"built with {built}, here it is {here}", where, built, here, hint)


def _shown(value: Any) -> str:
    return "absent" if value is NOWHERE else repr(value)[:60]
