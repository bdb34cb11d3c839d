"""In which ways a module is not the one that was captured at build, with both values; and which of them matter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import msgspec
from torch import nn

from aotc.digest import canonical_json, sha256_json
from aotc.errors import CorruptError, Issue
from aotc.reads.attributes import hooks_on_all_modules, module_attributes, origin_of
from aotc.reads.module_check import ModuleCheck, backward_hooks_here, changed_imports
from aotc.reads.outside import ReadFile, recorded_reads
from aotc.reads.read_issues import ATTRIBUTES_HINT, attribute_issue, found_differences, read_issues
from aotc.reads.sources import file_of, source_digests
from aotc.records import Artifact, ModuleGuard

BACKWARD_HOOKS = (
    "remove them; hooks on parameters, inputs and results run, as does one on a module that stays eager around this one"
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
            *dict.fromkeys(
                issue for reads in recorded_reads(artifact, read_file) for issue in read_issues(module, *reads)
            ),
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
_IMPORT_HINT = (
    "import it as the manifest's factory names it; a module that a program loads itself belongs in sys.modules"
)


def _absent(name: str, modules_of: Mapping[str, str]) -> str:
    """Why the source of a class of the build is not found in the module; `modules_of` has the module's own classes."""
    if name not in modules_of:
        return f"no part of it is a {name}"
    return (
        f"its class {name} is of a Python module `{modules_of[name]}` whose source file is not known here, and cannot "
        "be compared with the build's"
    )


def _source_issues(guard: ModuleGuard, module: nn.Module) -> list[Issue]:
    built, trees = guard.sources, dict(guard.trees)
    here = source_digests(module, trees)
    if here != built:  # a package may have been built from its folder, and be installed here
        files = source_digests(module, trees, by_version=False)
        here = {name: files[name] if files.get(name) == built.get(name) else text for name, text in here.items()}
    classes = {type(part) for part in module.modules()}
    files_of = {cls.__qualname__: f", in {file}" for cls in classes if (file := file_of(cls.__module__))}
    modules_of = {cls.__qualname__: cls.__module__ for cls in classes}
    return [
        Issue(
            f"the source of class {name} changed since the build{files_of.get(name, '')}"
            if name in here
            else _absent(name, modules_of),
            expected=built[name],
            actual=here.get(name, "no source file is known" if name in modules_of else "not part of the module"),
            hint=_IMPORT_HINT if name in modules_of and name not in here else _SOURCE_HINT,
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
        hint=ATTRIBUTES_HINT,
    )
    if artifact.module.attributes_file is None:
        return [differ]
    try:
        built = _decode_attributes(read_file(artifact.module.attributes_file))
        found = found_differences(built, _decode_attributes(canonical_json(here)))
    except RecursionError as error:
        raise CorruptError("the record of the module's attributes is nested too deeply") from error
    read = {origin for variant in artifact.variants for origin in variant.origins}
    matters = [
        attribute_issue((path, name, members, one, other))
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


def _hook_issues(artifact: Artifact, module: nn.Module) -> Iterator[Issue]:
    if count := sum(map(len, hooks_on_all_modules(artifact.trains))):
        what = f"{count} hooks are registered on all modules, which compiled code does not run"
        yield Issue(what, expected="0", actual=str(count), hint="remove them before the load")
    if count := sum(map(len, backward_hooks_here(artifact, module))):
        what = f"{count} hooks are registered on the backward of its modules, which compiled code does not run"
        yield Issue(what, expected="0", actual=str(count), hint=BACKWARD_HOOKS)


def _decode_attributes(data: bytes) -> dict[str, dict[str, Any]]:
    try:
        return msgspec.json.decode(data, type=dict[str, dict[str, Any]])
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"the record of the module's attributes cannot be read: {error}") from error
