"""In which ways a module is not the one that was captured at build, with both values; and which of them matter."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.errors import CorruptError, Issue
from aotc.records import Artifact, ModuleGuard
from aotc.runtime.state.module import (
    ModuleCheck,
    ReadFile,
    backward_hooks_here,
    changed_imports,
    read_here,
    recorded_reads,
)
from aotc.snapshot.attributes import hooks_on_all_modules, module_attributes, origin_of
from aotc.snapshot.outside import ABSENT, ENVIRONMENT, differences
from aotc.snapshot.sources import file_of, source_digests

_HOOKS_HINT = (
    "compiled code runs the hooks of the build and no others: remove the hook before the load, or rebuild with it"
)
BACKWARD_HOOKS = (
    "remove them; hooks on parameters, inputs and results run, as does one on a module that stays eager around this one"
)
_CACHE_HINT = "write `use_cache: false` among the manifest's inputs and build again: then no configuration decides it"
_ATTRIBUTES_HINT = (
    "Python attributes are part of the compiled code: construct the module with the `kwargs` of its manifest, or "
    "rebuild the model"
)


def module_issues(
    artifact: Artifact, module: nn.Module, checks: Collection[ModuleCheck], read_file: ReadFile
) -> list[Issue]:
    """Every way that matters in which `module` is not the one that was captured, by these checks."""
    issues: dict[ModuleCheck, Callable[[], list[Issue]]] = {
        "class": lambda: _class_issues(artifact, module),
        "training": lambda: _training_issues(artifact, module),
        "source": lambda: [*_source_issues(artifact.module, module), *_import_issues(artifact.module, module)],
        "attributes": lambda: [
            *_hook_issues(artifact, module),
            *_attribute_issues(artifact, module, read_file),
            *_read_issues(artifact, module, read_file),
        ],
    }
    if "class" in checks and (other_class := issues["class"]()):
        return other_class  # all else differs, too
    return [issue for name in checks for issue in issues[name]()]


def ignore_hint(differ: Collection[ModuleCheck]) -> str:
    """How to load despite a difference. "" for a module of another class and with other attributes: it is another
    model."""
    if {"class", "attributes"} <= {*differ}:
        return ""
    allowed = ", ".join(f'"{name}"' for name in differ if name != "training")
    return f"where the difference cannot matter: aotc.load(…, ignore=[{allowed}])" if allowed else ""


def _class_issues(artifact: Artifact, module: nn.Module) -> list[Issue]:
    built, here = artifact.module.class_name, type(module).__qualname__
    if built == here:
        return []
    paths = [path for path, part in module.named_modules() if type(part).__qualname__ == built]
    hint = f"pass its child `{paths[0]}`, a {built}" if paths else f"pass a {built}, as the manifest's factory makes it"
    if len(paths) > 1:
        hint = f"pass the one of its {len(paths)} children of class {built} that was built, like `{paths[0]}`"
    return [Issue(f"built from class {built}, the module is a {here}", expected=built, actual=here, hint=hint)]


def _training_issues(artifact: Artifact, module: nn.Module) -> list[Issue]:
    guard = artifact.module
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


_SOURCE_HINT = "rebuild the model"


def _source_issues(guard: ModuleGuard, module: nn.Module) -> list[Issue]:
    built, trees = guard.sources, dict(guard.trees)
    here = source_digests(module, trees)
    if here != built:  # a package may have been built from its folder, and be installed here
        files = source_digests(module, trees, by_version=False)
        here = {name: files[name] if files.get(name) == built.get(name) else text for name, text in here.items()}
    classes = {type(part) for part in module.modules()}
    files_of = {cls.__qualname__: f", in {file}" for cls in classes if (file := file_of(cls.__module__))}
    return [
        Issue(
            f"the source of class {name} changed since the build{files_of.get(name, '')}"
            if name in here
            else f"no part of it is a {name}",
            expected=built[name],
            actual=here.get(name, "not part of the module"),
            hint=_SOURCE_HINT,
        )
        for name in sorted(built)
        if here.get(name) != built[name]
    ] + [
        Issue(f"the module holds a class {name} that the build did not see", actual=here[name], hint="rebuild")
        for name in sorted(here.keys() - built.keys())
    ]


def _import_issues(built: ModuleGuard, module: nn.Module) -> list[Issue]:
    return [
        Issue(
            f"the source of `{name}`, which the module's code imports, changed since the build"
            + (f", in {file}" if (file := file_of(name)) else ""),
            expected=built.imports[name],
            actual=here,
            hint=_SOURCE_HINT,
        )
        for name, here in changed_imports(built, module)
    ]


def _attribute_issues(artifact: Artifact, module: nn.Module, read_file: ReadFile) -> list[Issue]:
    here = module_attributes(module)
    if sha256_json(here) == artifact.module.attributes:
        return []
    differ = Issue(
        "the module's Python attributes are not those of the build",
        expected=artifact.module.attributes,
        actual=sha256_json(here),
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
        _differs((path, name, members, one, other))
        for path, name, members, one, other in found
        if (not (origin := origin_of(name)) or origin in read)
        and not _is_set_by_forward(artifact, ".".join(filter(None, (path, name))), here.get(path, {}).get(name))
    ]
    return matters if found else [differ]


def _is_set_by_forward(artifact: Artifact, attribute: str, value: Any) -> bool:
    """Whether each variant sets an attribute before it reads it, or some variant's call has left this value in it."""
    regions = {variant.region for variant in artifact.variants if attribute in variant.assigned}
    if regions and all(attribute in variant.assigned for variant in artifact.variants if variant.region in regions):
        return True
    left = {variant.left[attribute] for variant in artifact.variants if attribute in variant.left}
    return bool(left) and sha256_json(value) in left


def _found_differences(
    built: Mapping[str, Mapping[str, Any]], now: Mapping[str, Mapping[str, Any]]
) -> list[tuple[str, str, tuple[str, ...], str, str]]:
    """Of each difference the submodule's path, the attribute, the members of it that lead there, and both values."""
    return [
        (path, name, members, _shown(one), _shown(other))
        for path in sorted(built.keys() | now.keys())
        for name in sorted(built.get(path, {}).keys() | now.get(path, {}).keys())
        for members, one, other in _differences(
            built.get(path, {}).get(name, _ABSENT), now.get(path, {}).get(name, _ABSENT)
        )
    ]


def _read_issues(artifact: Artifact, module: nn.Module, read_file: ReadFile) -> list[Issue]:
    """Of attributes that are compared only because a capture read them, and of what it read elsewhere."""
    found: dict[Issue, None] = {}
    for names, recorded in recorded_reads(artifact, read_file):
        here = read_here(module, names, recorded)
        found |= dict.fromkeys(map(_differs, _found_differences(recorded.attributes, here.attributes)))
        found |= dict.fromkeys(_outside_issue(*each) for each in differences(recorded.outside, here.outside))
    return list(found)


def _outside_issue(name: str, built: Any, here: Any) -> Issue:
    if name.startswith(ENVIRONMENT):
        set_at_build, now = built is not None, os.environ.get(name[1:])
        built, here = "another value" if set_at_build else "not set", "not set" if now is None else repr(now)
        what = f"the environment variable {name[1:]}, which forward reads, was {built} at the build, and is {here} here"
        return Issue(what, where=name, expected=built, actual=here, hint="set it as the build had it, or rebuild")
    built, here = (_shown(_ABSENT if value == ABSENT else value) for value in (built, here))
    return Issue(
        f"forward reads it: built with {built}, here it is {here}",
        where=name,
        expected=built,
        actual=here,
        hint="values that forward reads are part of the compiled code: set it as the build had it, or rebuild",
    )


def _differs(difference: tuple[str, str, tuple[str, ...], str, str]) -> Issue:
    path, name, members, built, here = difference
    is_cache = "use_cache" in (name.rpartition(".")[2], *members)
    return Issue(
        f"built with {built}, here it is {here}",
        where=".".join(filter(None, (path, name, *members))),
        expected=built,
        actual=here,
        hint=_HOOKS_HINT if name == "forward hooks" else _CACHE_HINT if is_cache else _ATTRIBUTES_HINT,
    )


def _hook_issues(artifact: Artifact, module: nn.Module) -> Iterator[Issue]:
    if count := sum(map(len, hooks_on_all_modules(artifact.trains))):
        what = f"{count} hooks are registered on all modules, which compiled code does not run"
        yield Issue(what, expected="0", actual=str(count), hint="remove them before the load")
    if count := sum(map(len, backward_hooks_here(artifact, module))):
        what = f"{count} hooks are registered on the backward of its modules, which compiled code does not run"
        yield Issue(what, expected="0", actual=str(count), hint=BACKWARD_HOOKS)


_ABSENT = object()


def _differences(one: Any, other: Any, members: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """Where two values differ: the members of the dicts that lead there, and both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            yield from _differences(one.get(name, _ABSENT), other.get(name, _ABSENT), (*members, name))
    elif one is not other and _exactly(one) != _exactly(other):
        yield members, one, other


def _exactly(value: Any) -> Any:
    """As text: True is not 1."""
    return value if value is _ABSENT else canonical_json(value)


def _decode_attributes(data: bytes) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(data, type=dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the record of the module's attributes cannot be read: {error}") from error


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)[:60]
