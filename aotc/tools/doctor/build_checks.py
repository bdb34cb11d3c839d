"""Can a manifest be built here: its mistakes, models, targets, and what a build needs of this machine."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from aotc.amounts import size_text
from aotc.errors import BuildError, Issue
from aotc.records import bucket_name, tuned_dims
from aotc.store.reference import is_remote
from aotc.tools.doctor.checks import Check, CheckStatus, check_folder, failing, from_issue
from aotc.tools.doctor.machine import BUILDING, check_toolchain

if TYPE_CHECKING:
    from aotc.manifest import Manifest, ModelSpec


def check_manifest(path: Path, store: str) -> list[Check]:
    """Whether `aotc build` of the manifest could start here.

    Factories are called, and each model runs once, in eager, at its smallest bucket.

    The store is the folder or URL `store`. Prints nothing itself; what the modules of factories print goes to standard
    output.
    """
    checks = check_toolchain(needed=True)
    if checks[0].status == "fail":
        return checks  # without the extra `build` no manifest can be read
    from aotc.compiler.mistakes import read_checked

    with failing(checks, "manifest", "mistakes"):
        manifest = read_checked(path)
        checks.append(Check("manifest", "mistakes", "ok", f"none in {path}; models: {', '.join(manifest.models)}"))
        checks += _options(manifest)
        devices: set[str] = set()
        for spec in manifest.models.values():
            factories, targets = _factories(manifest, spec), _targets(spec, devices)
            checks += [*factories, *targets]
            if all(check.status == "ok" for check in factories):
                checks += _model(manifest, spec)
        checks += _room(devices, store)
    return checks


def _options(manifest: Manifest) -> list[Check]:
    from aotc.compiler.autotune.picks_file import read_picks_file
    from aotc.compiler.codegen.option_check import check_options, check_patches

    checks = [from_issue("manifest", "options", issue) for issue in check_options(manifest)]
    checks += [from_issue("manifest", "patches", issue) for issue in check_patches(manifest)]
    if manifest.picks is not None:
        with failing(checks, "manifest", "picks"):
            read_picks_file(manifest.picks)
            checks.append(Check("manifest", "picks", "ok", str(manifest.picks)))
    return checks


def _factories(manifest: Manifest, spec: ModelSpec) -> list[Check]:
    from aotc.manifest.inputs import nested_factories
    from aotc.models.factory import import_object

    part, checks = f"model {spec.name}", list[Check]()
    for reference in dict.fromkeys([spec.factory, *(name for _, name in nested_factories(spec.kwargs))]):
        with failing(checks, part, "factory"):
            import_object(reference, manifest.folder)
            checks.append(Check(part, "factory", "ok", f"{reference} is imported"))
    return checks


def _model(manifest: Manifest, spec: ModelSpec) -> list[Check]:
    """The module that the factory gives, whether forward takes the inputs, and which submodules are regions."""
    from aotc.compiler.capture.regions.equal_regions import find_regions, regions_of
    from aotc.compiler.capture.regions.padded_calls import padded_calls
    from aotc.models.auto_inputs import with_inputs
    from aotc.models.factory import build_modules
    from aotc.models.regions import region_paths, run_eagerly
    from aotc.models.signature import make_signature
    from aotc.reads.tensors import plain_state

    part, checks = f"model {spec.name}", list[Check]()
    with failing(checks, part, "inputs"):
        alone = dataclasses.replace(manifest, models={spec.name: spec})
        module = build_modules(alone)[spec.name]
        spec = with_inputs(alone, spec, module)
        signature = make_signature(spec, module)
        taken = f"forward takes {', '.join(spec.inputs) or 'no inputs'}"
        state = plain_state(module).values()
        weights = sum(tensor.numel() * tensor.element_size() for tensor in {id(one): one for one in state}.values())
        device = _device(spec)
        if device is None:
            checks.append(Check(part, "inputs", "ok", f"{taken}; not run, since this machine has no GPU"))
            with failing(checks, part, "regions"):
                if spec.regions:
                    found = f"{len(region_paths(spec, module))} submodules match; not run"
                    checks.append(Check(part, "regions", "ok", found))
            return checks
        module.to(device)
        bucket = min(spec.buckets, key=lambda bucket: math.prod(tuned_dims(bucket).values()))
        began = time.monotonic()
        try:
            run_eagerly(spec, module, signature, tuned_dims(bucket), manifest.folder)
        except BuildError as error:
            where = manifest.where("models", spec.name, "inputs")
            raise BuildError(error.message, issues=(Issue(error.message, where=where, hint=error.hint),)) from error
        ran = f"runs at {bucket_name(dict(tuned_dims(bucket)))} in {time.monotonic() - began:.2f} s on {device}"
        checks.append(Check(part, "inputs", "ok", f"{taken}; {size_text(weights)} of weights; {ran}"))
        with failing(checks, part, "regions"):
            if spec.regions:
                smallest = msgspec.structs.replace(spec, buckets=(bucket,))
                regions = regions_of(find_regions(smallest, module, manifest.folder))
                padded_calls(smallest, module, manifest.folder)
                named = (f"{region.name} ({len(region.instances)} of its kind)" for region in regions)
                checks.append(Check(part, "regions", "ok", ", ".join(named)))
    return checks


def _device(spec: ModelSpec) -> str | None:
    """Where a model of these targets runs here; None where it needs a GPU that is not here."""
    import torch

    if not all(target.startswith("cuda") for target in spec.targets):
        return "cpu"
    return "cuda" if torch.cuda.is_available() else None


def _targets(spec: ModelSpec, devices: set[str]) -> list[Check]:
    from aotc.compiler.planning.plan import checked_target, why_not_buildable
    from aotc.machine.targets import parse_target

    part, checks = f"model {spec.name}", list[Check]()
    for name in spec.targets:
        with failing(checks, part, f"target {name}"):
            target = parse_target(checked_target(name))
            issue = why_not_buildable(spec, target)
            if issue is not None:
                checks.append(Check(part, f"target {name}", "fail", issue.actual, issue.expected, issue.hint))
                continue
            devices.add(target.device)
            named = "is built here" if target.name == name else f"is {target.name} here"
            checks.append(Check(part, f"target {name}", "ok", named))
    return checks


def _room(devices: set[str], store: str) -> list[Check]:
    """Memory for one unit, beside its weights; and disk."""
    from aotc.compiler.executors.local import BASE
    from aotc.machine.resources import cores_here, memory_here

    free, checks = memory_here(), list[Check]()
    for device in sorted(devices):
        status: CheckStatus = "ok" if free >= BASE[device] else "warn"
        hint = "free memory, or raise the container's limit: a unit may be killed" if status == "warn" else ""
        about, needed = f"{free / (1 << 30):.1f} GiB free, {cores_here()} cores", f"{BASE[device] / (1 << 30):.1f} GiB"
        needs = f"{needed} for a unit on {device}, and 4 times its weights"
        checks.append(Check(BUILDING, "memory", status, about, needs, hint))
    if not is_remote(store):
        hint = "name a folder that can be written: --store, or AOTC_STORE"
        checks.append(check_folder(BUILDING, "store's folder", Path(store), hint, "fail"))
    return checks
