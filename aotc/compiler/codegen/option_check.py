"""Check the Inductor options and the patches in a manifest against those of this torch and aotc."""

from __future__ import annotations

from types import NoneType
from typing import Any, Union, get_args, get_origin

import msgspec

from aotc.errors import Issue
from aotc.manifest.findings import describe, did_you_mean, nearest
from aotc.manifest.types import Manifest, ModelSpec

_BY_AOTC = "aotc packages libraries itself"

OWNED: dict[str, str] = {
    "aot_inductor.package": _BY_AOTC,
    "aot_inductor.package_cpp_only": _BY_AOTC,
    "aot_inductor.output_path": _BY_AOTC,
    "aot_inductor.dynamic_linkage": _BY_AOTC,
    "aot_inductor.metadata": _BY_AOTC,
    "aot_inductor.model_name_for_generated_files": _BY_AOTC,
    "aot_inductor.serialized_in_spec": "aotc keeps the calling convention in its own record",
    "aot_inductor.serialized_out_spec": "aotc keeps the calling convention in its own record",
    "aot_inductor.use_runtime_constant_folding": "write `weights: live` or `weights: frozen`",
    "aot_inductor.package_constants_in_so": "write `weights: live` or `weights: frozen`",
    "aot_inductor.package_constants_on_disk_format": "write `weights: live` or `weights: frozen`",
    "aot_inductor.force_mmap_weights": "write `weights: live` or `weights: frozen`",
    "aot_inductor.emit_multi_arch_kernel": "write `ptx: true`",
    "aot_inductor.cross_target_platform": "write `targets`",
    "aot_inductor.link_libtorch": _BY_AOTC,
    "aot_inductor_mode.compile_standalone": _BY_AOTC,
    "cpp_wrapper": "compiled code is always C++",
    "fx_wrapper": "compiled code is always C++",
    "freezing": "write `weights: frozen`",
    "freezing_discard_parameters": "write `weights: frozen`",
    "max_autotune": "write `mode: max-autotune`",
    "triton.cudagraphs": "write `cuda_graphs` or `mode: reduce-overhead`",
    "triton.cudagraph_trees": "write `cuda_graphs`",
    "triton.cudagraph_capture_sizes": "write `graph_sizes`",
    "cpp.march": "write `targets`, such as cpu:x86-64-v3",
    "cuda.arch": "write `targets`, such as cuda:sm_90",
    "global_cache_dir": "aotc gives every unit a cache folder of its own",
    "compile_threads": "use `aotc build --jobs`",
}
"""Options that aotc sets itself, each with the alternative to write, or the reason."""


def check_patches(manifest: Manifest) -> list[Issue]:
    """An issue, with its line, for every name in a manifest's `patches` that is not one that can be switched off."""
    if not any(spec.patches for spec in manifest.models.values()):
        return []
    from aotc.compiler.patches.machinery.registry import PATCHES

    known = {patch.name for patch in PATCHES}
    names = [patch.name for patch in PATCHES if patch.can_be_off]
    issues = [
        Issue(
            f"the patch `{name}` of torch cannot be switched off: it is for equal builds, or is applied in torch.export"
            if name in known
            else f"there is no patch `{name}` of torch",
            where=manifest.where("models", spec.name, "patches", name),
            hint=did_you_mean(name, names),
        )
        for spec in manifest.models.values()
        for name in spec.patches
        if name not in names
    ]
    return list(dict.fromkeys(issues))


def check_options(manifest: Manifest) -> list[Issue]:
    """An issue, with its line, for every unknown, mistyped or reserved option of a manifest. Imports Inductor."""
    if not any(spec.options for spec in manifest.models.values()):
        return []
    types = _option_types()
    issues = [
        issue
        for spec in manifest.models.values()
        for name, value in spec.options.items()
        if (issue := _option_issue(manifest, spec, name, value, types))
    ]
    return list(dict.fromkeys(issues))


def _option_types() -> dict[str, Any]:
    """The type of every option of Inductor, by its dotted name."""
    from torch._inductor import config

    # torch adds these methods to its configuration modules at import, where a type checker does not see them.
    settings: Any = config
    return {name: settings.get_type(name) for name in settings.get_config_copy() if not name.startswith("_")}


def _option_issue(manifest: Manifest, spec: ModelSpec, name: str, value: Any, types: dict[str, Any]) -> Issue | None:
    where = manifest.where("models", spec.name, "options", name)
    if name in OWNED:
        return Issue(f"the option `{name}` is set by aotc", where=where, hint=OWNED[name])
    if name not in types:
        return Issue(f"Inductor has no option `{name}`", where=where, hint=_name_hint(name, types))
    expected = _type_name(types[name])
    if not _can_be_written(types[name]):
        message = f"the option `{name}` takes a Python object ({expected}), which a manifest cannot hold"
        return Issue(message, where=where, hint="leave it out")
    if not _fits(value, types[name]):
        message = f"the option `{name}` is {describe(value)}; expected {expected}"
        return Issue(message, where=where, expected=expected, actual=describe(value))
    return None


def _name_hint(name: str, known: dict[str, Any]) -> str:
    # `simdlen` for `cpp.simdlen`: the group left out is a common slip.
    same_ending = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    if same_ending:
        return _meant(same_ending[0])
    if near := nearest(name, known):
        return _meant(near)
    return "the names are those of torch._inductor.config"


def _meant(name: str) -> str:
    if name in OWNED:
        return f"the nearest, `{name}`, is set by aotc: {OWNED[name]}"
    return f"did you mean `{name}`?"


def _can_be_written(kind: Any) -> bool:
    try:
        msgspec.json.schema(kind)
    except TypeError:
        return False
    return True


def _fits(value: Any, kind: Any) -> bool:
    if kind is type(None):
        # torch derives the type from the default value; an option that is None by default accepts anything.
        return True
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        return False
    return True


def _type_name(kind: Any) -> str:
    """The type as text: `int | None` also where this torch writes `Optional[int]`."""
    if get_origin(kind) is Union:
        return " | ".join("None" if part is NoneType else _type_name(part) for part in get_args(kind))
    return str(getattr(kind, "__name__", kind)) if isinstance(kind, type) else str(kind)
