"""From a manifest to the units to compile."""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from aotc.compiler.autotune.picks_file import pins_for
from aotc.compiler.capture.regions.equal_regions import RegionPart, find_regions, regions_of
from aotc.compiler.capture.regions.padded_calls import padded_calls
from aotc.compiler.messages import DEFAULTS, Factors, Pins, Settings, Unit
from aotc.compiler.planning.key import (
    NOT_A_REGION,
    absence_factors,
    further_ranks,
    model_factors,
    region_factors,
    unit_factors,
    unit_key,
)
from aotc.compiler.planning.model_sources import model_sources
from aotc.errors import (
    AotcError,
    BuildError,
    CorruptError,
    EnvironmentMismatchError,
    Issue,
    ManifestError,
    NotFoundError,
)
from aotc.machine.cpp_compiler import (
    compiler_name,
    compiler_version,
    has_cross_compiler,
    how_to_install,
    is_foreign,
)
from aotc.machine.environment import cpu_features
from aotc.machine.gpus import Gpu, gpu_for, known_targets
from aotc.machine.native_target import resolve_target
from aotc.machine.resources import memory_here
from aotc.machine.targets import CPU_FEATURES, Target, parse_target
from aotc.manifest import Manifest, ModelSpec
from aotc.manifest.findings import did_you_mean, nearest
from aotc.models.factory import build_module, visit_modules
from aotc.models.fake_ranks import become_rank, parallel_of
from aotc.models.regions import region_paths
from aotc.picks import PickFile
from aotc.reads.module_check import read_issues
from aotc.reads.sources import Trees
from aotc.reads.state_specs import submodules
from aotc.reads.tensors import plain_state
from aotc.records import Bucket, Dims, Reads, Region, Variant, decode, part_name
from aotc.store.layout.bundle import CONFIG_LIMIT
from aotc.store.layout.units import StoredUnits


@dataclass(frozen=True)
class ModelFacts:
    """What the plan needs of a model's module: the spec with its inputs, the key's factors that all units of the model
    have in common, and the bytes of the parameters and buffers.

    `changed` lists the values that the captures of stored units read and that have changed since, by the digest of the
    file."""

    spec: ModelSpec
    factors: Factors
    state_bytes: int
    changed: Mapping[str, Sequence[Issue]]


WORTH = 1.5
"""Seconds of a factory from which its module is kept. The process that keeps it for the units imports the compiler,
which takes two to three, and saves each unit two calls of the factory."""


class InspectedModels(NamedTuple):
    """The facts of each model, or why it cannot be planned; and modules that were slow to make."""

    facts: dict[str, ModelFacts | AotcError]
    slow: dict[str, nn.Module]


def inspect_models(
    manifest: Manifest, stored: StoredUnits | None, dummy_weights: bool = False, all_slow: bool = False
) -> InspectedModels:
    """Build every model's module, one after the other, and compare it with what the captures of `stored` units read.

    A module that was slow to make is kept where the model is by regions and so is run by the plan; with `all_slow`,
    where it is not, too: but further ones only while they all take no more memory than is left. Raises ManifestError as
    `visit_modules` does.
    """
    inspected = InspectedModels({}, {})
    trees: Trees = {}

    def look(spec: ModelSpec, module: nn.Module, seconds: float) -> None:
        try:
            inspected.facts[spec.name] = facts_of(spec, module, manifest.folder, stored, dummy_weights, trees)
        except (BuildError, ManifestError) as error:
            inspected.facts[spec.name] = error.with_traceback(None)  # whose frames hold the module
        if seconds < WORTH or not (all_slow or spec.regions):
            return
        together = sum(map(_state_bytes, (*inspected.slow.values(), module)))
        if dummy_weights or not inspected.slow or together <= memory_here():
            inspected.slow[spec.name] = module

    visit_modules(manifest, look, dummy_weights=dummy_weights)
    return inspected


def facts_of(
    spec: ModelSpec,
    module: nn.Module,
    folder: Path,
    stored: StoredUnits | None,
    dummy_weights: bool = False,
    trees: Trees | None = None,
) -> ModelFacts:
    """Raises BuildError, ManifestError for a model that cannot be planned."""
    changed = {} if stored is None else changed_reads(stored, spec.name, module)
    factors = _common_factors(spec, module, folder, dummy_weights, {} if trees is None else trees)
    return ModelFacts(spec, factors, _state_bytes(module), changed)


def changed_reads(stored: StoredUnits, model: str, module: nn.Module) -> dict[str, list[Issue]]:
    """Which values that the captures of the model's stored units read have changed since, by the digest of the file."""
    changed: dict[str, list[Issue]] = {}
    for instances, names, file in stored.reads(model):
        try:
            recorded = decode(stored.store.blobs.load(file, CONFIG_LIMIT), Reads)
            guarded = submodules(module, instances) if instances else module
        except (NotFoundError, CorruptError, AttributeError):  # then the unit cannot be used either
            continue
        changed.setdefault(file.digest, []).extend(read_issues(guarded, names, recorded))
    return changed


def _state_bytes(module: nn.Module) -> int:
    """The bytes of the module's parameters and buffers."""
    state = {id(one): one.numel() * one.element_size() for one in plain_state(module).values()}
    return sum(state.values())


def _common_factors(spec: ModelSpec, module: nn.Module, folder: Path, dummy_weights: bool, trees: Trees) -> Factors:
    def factors_of(module: nn.Module) -> Factors:
        guarded = submodules(module, region_paths(spec, module)) if spec.regions else module
        return model_factors(spec, guarded, model_sources(spec, module, folder, trees))

    factors = factors_of(module)
    if (parallel := parallel_of(spec.parallel)) is None:
        return factors
    others = {
        rank: factors_of(build_module(spec, folder, dummy_weights=dummy_weights, rank=rank))
        for rank in range(1, parallel.size)
    }
    become_rank(parallel)
    return {**factors, **further_ranks(factors, others)}


def plan_units(
    manifest: Manifest,
    inspected: InspectedModels | None = None,
    picks: PickFile | None = None,
    *,
    targets: Collection[str] = (),
    elsewhere: bool = False,
    settings: Settings = DEFAULTS,
    failed: dict[str, AotcError] | None = None,
) -> list[Unit]:
    """Every unit of the manifest, in the manifest's order, each with its pins of `picks`.

    `targets` limits the units to these targets, if it is not empty. With `elsewhere`, units are compiled on other
    machines, and a target that this machine cannot build is accepted. With `settings.untuned`, a unit for a GPU that
    this machine lacks needs no picks. A model by regions is run: its module is taken out of `inspected.slow`, or made
    anew, with `settings.dummy_weights` as in `build_module`.

    A model whose regions cannot be found, or whose target cannot be built here, is put into `failed` with its error.
    Without `failed`, or if no model has units, the first such error is raised with the model's name.

    Raises ManifestError for a factory that fails, EnvironmentMismatchError or BuildError for a target that cannot be
    built here.
    """
    inspected = inspected or inspect_models(manifest, None, settings.dummy_weights)
    specs = manifest.models.values()
    wanted = {checked_target(name) for name in targets}
    found = {spec.name: _targets_of(manifest, spec, wanted) for spec in specs}
    if wanted and not any(found.values()):
        theirs = {name for spec in specs for name in spec.targets}
        raise BuildError(
            f"no model of the manifest is for {', '.join(sorted(wanted))}",
            hint=f"their targets are {', '.join(sorted(theirs))}",
        )
    units: list[Unit] = []
    errors: dict[str, AotcError] = {}
    for spec in specs:
        known = inspected.facts[spec.name]
        if isinstance(known, AotcError):
            errors[spec.name] = known
            continue
        planner = _Planner(known, picks, elsewhere, settings, manifest.folder, inspected.slow)
        try:
            units += [unit for target in found[spec.name] for unit in planner.units(parse_target(target))]
        except (BuildError, ManifestError) as error:
            errors[spec.name] = error
        except EnvironmentMismatchError as error:
            raise _not_here(manifest, spec, error) from None
    if errors and (failed is None or not units):
        name, first = next(iter(errors.items()))
        if not first.message.startswith(f"{name}: ") and f"`{name}`" not in first.message:
            first.message = f"{name}: {first.message}"
        raise first
    if failed is not None:
        failed |= errors
    return units


def checked_target(name: str) -> str:
    """The target's resolved name (`native` → `cpu:…`). Raises BuildError for a name that is not a target."""
    try:
        return parse_target(resolve_target(name)).name
    except ValueError as error:
        raise BuildError(str(error), hint=_target_hint(name)) from None


def _target_hint(name: str) -> str:
    """The nearest target with the same numbers (`x86-64-v2` is not a misspelt `x86-64-v4`), else all targets."""
    alike = [known for known in TARGET_NAMES if re.findall(r"\d+", known) == re.findall(r"\d+", name)]
    if nearest(name, alike):
        return did_you_mean(name, alike)
    cpus = ", ".join(reversed(CPU_FEATURES))
    return f"known, of each architecture from the least capable: {cpus}; cuda:sm_NN; this machine's: native, cuda"


TARGET_NAMES = (*CPU_FEATURES, "native", "cuda", *known_targets())
"""Names to suggest for a misspelt target; of GPUs those that can be built anywhere."""


def _not_here(manifest: Manifest, spec: ModelSpec, error: EnvironmentMismatchError) -> EnvironmentMismatchError:
    """The error with the model, its target and the line, and with the command that builds the model's other targets."""
    gpus = [name for name in spec.targets if name.startswith("cuda")]
    if not gpus:
        error.message = f"{spec.name}: {error.message}"
        return error
    others = [name for name in spec.targets if name not in gpus]
    issue = Issue(
        f"`{gpus[0]}`: {error.message}",
        where=manifest.where("models", spec.name, "targets", spec.targets.index(gpus[0])),
        hint=error.hint,
    )
    command = f"aotc build {manifest.path} {' '.join(f'--target {name}' for name in others)}"
    return EnvironmentMismatchError(
        f"{spec.name}: a target cannot be built on this machine",
        issues=(issue,),
        hint=f"to build the others here, run `{command}`" if others else "",
    )


def _targets_of(manifest: Manifest, spec: ModelSpec, wanted: Collection[str]) -> list[str]:
    """The model's targets, resolved. If `wanted` is not empty: those of `wanted` that the model lists, where a listed
    `native` matches every target and `cuda` every GPU."""
    if "native" in spec.targets and wanted:
        return sorted(wanted)
    found = [name for name in sorted(wanted) if "cuda" in spec.targets and name.startswith("cuda:")]
    for name in spec.targets:
        try:
            found.append(resolve_target(name))
        except EnvironmentMismatchError as error:
            if not wanted:  # else the target is left to another machine: `cuda` where there is no GPU
                raise _not_here(manifest, spec, error) from None
    return [name for name in dict.fromkeys(found) if not wanted or name in wanted]


@dataclass(frozen=True)
class _Planner:
    """Plans the units of one model."""

    facts: ModelFacts
    picks: PickFile | None
    elsewhere: bool
    settings: Settings
    folder: Path
    made: dict[str, nn.Module]

    @property
    def spec(self) -> ModelSpec:
        return self.facts.spec

    def units(self, target: Target) -> list[Unit]:
        """The model's units for a target; of a model by regions, one for each region and each bucket that changes the
        region's inputs (code outside regions stays eager).

        Raises BuildError for a target that cannot be built here, EnvironmentMismatchError without such a device.
        """
        spec = self.spec
        if not self.elsewhere:
            check_buildable(spec, target)
        if not spec.regions:
            return [self._unit(target, bucket) for bucket in spec.buckets]
        parts, calls = _regions_on(target, spec, self._module, self.folder)
        regions = regions_of(parts)
        return [self._unit(target, bucket, region.name, regions, calls, sizes) for region, bucket, sizes in parts]

    def _unit(
        self,
        target: Target,
        bucket: Bucket,
        region: str = "",
        regions: tuple[Region, ...] = (),
        calls: tuple[Variant, ...] = (),
        sizes: Dims | None = None,
    ) -> Unit:
        spec, sizes = self.spec, sizes or {}
        pins = pins_for(self.picks, spec.name, bucket, target.name, str(torch.__version__), region)
        gpu = None if self.elsewhere else absent_gpu(target, pins)
        absent = () if self.elsewhere else absent_features(target)
        untuned = bool(absent) or (gpu is not None and (self.settings.untuned or spec.mode == "default"))
        if gpu is not None and not (untuned or pins.own or pins.seeds):
            raise BuildError(
                f"{spec.name}: without a {target.name} GPU here nothing can be measured, and there are no picks for "
                f"{part_name(region, bucket)}",
                hint="give --picks FILE, from `aotc picks REF --export FILE` or `aotc tune` on such a GPU; or accept "
                "Inductor's defaults with --untuned",
            )
        of_region = region_factors(region, regions, calls, sizes) if region else NOT_A_REGION
        further = {**of_region, **absence_factors(gpu, absent, untuned)}
        if is_foreign(target.machine):
            further["compiler"] = compiler_version(target.machine)
        factors = unit_factors(self.facts.factors, bucket, target, pins, further)
        key, size = unit_key(factors), self.facts.state_bytes
        place = region, regions, calls, sizes
        return Unit(spec, bucket, target, factors, key, pins, size, *place, gpu, absent, untuned)

    @cached_property
    def _module(self) -> nn.Module:
        made = self.made.pop(self.spec.name, None)
        if made is not None:
            return made
        return build_module(self.spec, self.folder, dummy_weights=self.settings.dummy_weights)


def absent_gpu(target: Target, pins: Pins) -> Gpu | None:
    """The GPU to compile for where this machine lacks it: the one that the pins were measured on, if it is known, else
    the one that stands for the target. None for another target, and where such a GPU is here."""
    if target.device != "cuda" or _gpu_here() == target.name:
        return None
    return gpu_for(target.name, pins.device)


def absent_features(target: Target) -> tuple[str, ...]:
    """The features of the target's CPU that this machine lacks: its code would end the process here."""
    return tuple(sorted(set(target.cpu_features) - cpu_features()))


def _gpu_here() -> str:
    """The target of this machine's GPU; "" without one."""
    try:
        return resolve_target("cuda")
    except EnvironmentMismatchError:
        return ""


def _regions_on(
    target: Target, spec: ModelSpec, module: nn.Module, folder: Path
) -> tuple[list[RegionPart], tuple[Variant, ...]]:
    """The model's regions and its padded calls, found by running the model on the target's device; on the CPU where
    that is absent."""
    device = target.device if target.device == "cpu" or _gpu_here() == target.name else "cpu"
    if parallel := parallel_of(spec.parallel):  # the factory of another model may have made other ranks
        become_rank(parallel)
    try:
        module.to(device)
        return find_regions(spec, module, folder), padded_calls(spec, module, folder)
    finally:
        if device != "cpu":
            module.to("cpu")
            torch.cuda.empty_cache()  # the units' processes need the memory


def check_buildable(spec: ModelSpec, target: Target, *, measuring: bool = False) -> None:
    """Raises BuildError for a target that this machine cannot build, or, with `measuring`, cannot measure;
    EnvironmentMismatchError without such a device."""
    if measuring and target.device == "cuda" and (here := resolve_target("cuda")) != target.name:
        raise BuildError(
            f"{spec.name}: the target is {target.name}, the GPU here is {here}; kernels are tuned by running them",
            hint=f"build on a machine with a {target.name.removeprefix('cuda:')} GPU",
        )
    if (issue := why_not_buildable(spec, target)) is not None:
        raise BuildError(f"{spec.name}: {issue.message}", hint=issue.hint)


def why_not_buildable(spec: ModelSpec, target: Target) -> Issue | None:
    """Why this machine cannot build the model for the target; None where it can, if need be without such a GPU.

    Raises EnvironmentMismatchError where torch here has no CUDA.
    """
    if is_foreign(target.machine) and (issue := _why_not_cross_compiled(spec, target)) is not None:
        return issue
    if target.device == "cuda":
        here = _gpu_here()
        if here == target.name:
            return None
        if not torch.version.cuda:
            raise EnvironmentMismatchError(
                f"the target is {target.name}, and torch here ({torch.__version__}) is built without CUDA",
                hint="install torch's CUDA build, which needs no GPU here; then build with `--picks FILE --locked` "
                "from `aotc tune` on such a GPU, or with Inductor's defaults: --untuned",
            )
        if gpu_for(target.name) is None:
            return Issue(
                f"the target is {target.name}, the GPU here is {here or 'none'}, and the properties of such a GPU are "
                "not known",
                expected=target.name,
                actual=here,
                hint=f"build on a machine with a {target.name.removeprefix('cuda:')} GPU; known: "
                f"{', '.join(known_targets())}",
            )
        if spec.weights == "frozen":
            return Issue(
                f"frozen weights are folded by running parts of the model on the GPU, and the GPU here is "
                f"{here or 'none'}, not {target.name}",
                expected=target.name,
                actual=here,
                hint="use `weights: live`, or build on a machine with such a GPU",
            )
        return None
    if is_foreign(target.machine):  # without oneDNN, so that frozen weights are packed for no CPU
        return None
    here = resolve_target("native") if spec.weights == "frozen" else target.name
    if spec.weights != "frozen" or not here.startswith("cpu:") or here == target.name:
        return None
    return Issue(
        f"oneDNN packs frozen weights for this machine's {here}, the target is {target.name}",
        expected=target.name,
        actual=here,
        hint=f"use `weights: live` for {target.name}, or build it on such a CPU",
    )


def _why_not_cross_compiled(spec: ModelSpec, target: Target) -> Issue | None:
    """Why the model cannot be built for a machine of another architecture, if it cannot."""
    here = platform.machine()
    if spec.runtime != "standalone":
        return Issue(
            f"the target is {target.name}, for machines of {target.machine}, and this one is {here}: code that calls "
            f"torch takes the torch of {target.machine}",
            expected="runtime: standalone",
            actual=f"runtime: {spec.runtime}",
            hint=f"write `runtime: standalone`, or give the model targets of {here} alone",
        )
    if not has_cross_compiler(target.machine):
        return Issue(
            f"the target is {target.name}, this machine is {here}, and there is no `{compiler_name(target.machine)}`",
            expected=compiler_name(target.machine),
            actual="none on PATH",
            hint=how_to_install(target.machine),
        )
    return None
