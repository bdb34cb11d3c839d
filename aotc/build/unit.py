"""Compiling one unit, in this process: from a model's manifest part, a bucket and a target to a one-variant artifact.

`compile_unit` is what the worker process runs. The files lie beside the record, not yet in any store, so their blobs
are still unnamed; publishing fills them in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import fx, nn

from aotc.build.axes import output_dims, padded_dims
from aotc.build.capture import Capture, capture
from aotc.build.compile import LIBRARY, CompiledFiles, compile_capture, inductor_options
from aotc.build.edges import LeavesAt, check_edges
from aotc.build.kept_objects import KeptObjects
from aotc.build.key import triton_version
from aotc.build.operators import Registrations
from aotc.build.origins import origins_read
from aotc.build.picker import Picker, describe
from aotc.build.ranges import conditions, constraints_explained, dynamic_shapes
from aotc.build.second_call import check_second_call
from aotc.build.sharing import SharedPicks
from aotc.build.signature import make_signature
from aotc.build.sources import imported_files, model_sources
from aotc.constants import encode_constants
from aotc.digest import canonical_json, sha256_file, sha256_json
from aotc.environment import this_environment
from aotc.errors import BuildError
from aotc.manifest import ModelSpec
from aotc.manifest.calls import modes_of, signature_leaves
from aotc.manifest.factory import build_module
from aotc.manifest.regions import example_leaves_of
from aotc.picks import PICKS_SCHEMA_VERSION, Pick, PickFile, UnitPicks
from aotc.records import (
    FORMS,
    SCHEMA_VERSION,
    Ambient,
    Artifact,
    Bucket,
    Dims,
    Environment,
    File,
    Kernel,
    ModuleGuard,
    OperatorNeed,
    Output,
    Record,
    Region,
    Report,
    Signature,
    StateSpec,
    Variant,
    part_name,
    tuned_dims,
)
from aotc.snapshot import (
    BY_DIGEST,
    dtype_name,
    module_attributes,
    named_constants,
    named_state,
    source_digests,
    state_specs,
    submodules,
    take_ambient,
)
from aotc.store import Shared
from aotc.targets import Target, parse_target

ATTRIBUTES = "attributes.json"
CONSTANTS = "constants.safetensors"
REPORT = "report.json"
PICKS = "picks.json"
RECORD = "record.json"
SHARED_PICKS = "picks"

Stage = Callable[[str], None]


class Job(Record, frozen=True):
    """What a worker is asked to do: one unit.

    `pins` are the picks made for this unit, `seeds` those of other units of its target; `locked`: measure nothing.
    `shared` is the folder in which the units of a build keep their answers for each other; without, there are none.
    `precompile`: there are so many units that headers are precompiled for them, in that folder.
    `region` names the one of `regions` that is compiled, with what it is given when the model runs at `sizes`.
    `sources` are those that the key was computed from.
    """

    spec: ModelSpec
    folder: str
    bucket: Bucket
    target: str
    key: str
    output: str
    pins: UnitPicks | None = None
    seeds: tuple[Pick, ...] = ()
    locked: bool = False
    shared: str = ""
    precompile: bool = False
    region: str = ""
    regions: tuple[Region, ...] = ()
    sizes: Dims = msgspec.field(default_factory=dict)
    sources: dict[str, str] = msgspec.field(default_factory=dict)


class Subject(NamedTuple):
    """What a unit compiles: the model, or one of its regions."""

    module: nn.Module
    signature: Signature
    leaves_at: LeavesAt
    region: Region | None = None


class Autotuned(Record, frozen=True):
    """What autotuning did in a unit: how many candidates failed and were dropped, how many decisions were pinned, which
    were measured, with how many measurements, and what other units had made already; which pins are stale;
    `unavailable` says why picks are not recorded."""

    failed_candidates: int = 0
    pinned: int = 0
    tuned: tuple[str, ...] = ()
    measurements: int = 0
    shared: Shared = Shared()
    stale: tuple[str, ...] = ()
    unavailable: str = ""


def compile_unit(job: Job, stage: Stage) -> Autotuned:
    """Compile the unit into `job.output`, the record included; `stage` is told the name of each stage as it begins.

    Raises whatever the model, torch.export or Inductor raises: `aotc.build.failure` explains it.
    """
    target = parse_target(job.target)
    output = Path(job.output)
    registrations = Registrations()
    stage("model")
    with registrations.watched():
        model = _module(job, target)
    snapshot = _snapshot(job, model)  # before the model runs, which may change it
    subject = _subject(job, model, target)
    kept = KeptObjects(model)
    leaves, other_leaves = (subject.leaves_at(tuned_dims(job.bucket), seed) for seed in (0, 1))
    kept.put_back()
    with modes_of(job.spec, target.device):
        stage("export")
        exported = _export(job, subject, leaves, other_leaves, kept, target)
        _raise_if_edited(job, model)
        stage("compile")
        own = job.pins.picks if job.pins else ()
        picker = Picker(own, job.seeds, locked=job.locked, shared=_shared_picks(job, target))
        shared = Path(job.shared) if job.shared else None
        compiled = compile_capture(
            exported.captured, job.spec, target, output, picker, shared, precompile=job.precompile
        )
        ambient = take_ambient(target.device)
    picker.raise_if_locked_out()
    _write(output / REPORT, _report(compiled.kernels, exported.captured))
    _write(output / FORMS, canonical_json(_forms(exported.captured)))
    if not picker.unavailable:
        _write(output / PICKS, canonical_json(_pick_file(job, target, picker)))
    _write(output / ATTRIBUTES, canonical_json(snapshot.attributes))
    if snapshot.constants_file:
        _write(output / CONSTANTS, snapshot.constants_file)
    operators = registrations.needed((output / LIBRARY).with_suffix(".json"))
    variant = _variant(job, exported, compiled, operators, has_picks=not picker.unavailable)
    artifact = _artifact(job, target, model, snapshot, subject, exported.captured, variant, ambient)
    _write(output / RECORD, artifact.encode())
    return Autotuned(
        failed_candidates=compiled.failed_candidates,
        pinned=picker.pinned,
        tuned=tuple(describe(pick) for pick in picker.tuned),
        measurements=picker.measurements,
        shared=Shared(len(picker.shared), picker.shared_times, picker.compiled_elsewhere, compiled.shared_objects),
        stale=tuple(str(issue) for issue in picker.stale()),
        unavailable=picker.unavailable,
    )


def _raise_if_edited(job: Job, model: nn.Module) -> None:
    """Raises BuildError where a file is no longer the one that is in the key: the graph may be of either.

    Files only: what is installed on one machine may lie in its folder on another one.
    """
    planned, here = _files(job.sources), _files(model_sources(job.spec, model, Path(job.folder)))
    if changed := sorted(name for name in planned.keys() & here.keys() if planned[name] != here[name]):
        names = ", ".join(f"`{name}`" for name in changed)
        raise BuildError(f"the source of {names} changed while the build ran", hint="build again")


def _files(sources: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in sources.items() if text.startswith(BY_DIGEST)}


class ModuleSnapshot(NamedTuple):
    """What a load compares with its own module, and the buffers that it takes from the artifact."""

    guarded: nn.Module
    sources: dict[str, str]
    imports: dict[str, str]
    attributes: Mapping[str, Any]
    constants: Collection[str]
    constants_file: bytes


def _snapshot(job: Job, model: nn.Module) -> ModuleSnapshot:
    guarded = submodules(model, [path for region in job.regions for path in region.instances]) if job.region else model
    constants = named_constants(model) if _takes_all_weights(job) else {}
    return ModuleSnapshot(
        guarded,
        source_digests(guarded),
        imported_files(guarded),
        module_attributes(guarded),
        frozenset(constants),
        encode_constants(constants),
    )


def _takes_all_weights(job: Job) -> bool:
    """Whether a checkpoint may stand for the module: every weight is an argument, and nothing of the model is eager."""
    return job.spec.weights == "live" and not job.region


class Exported(NamedTuple):
    """The graph of a unit, and what of its sizes, its outputs' axes and its module's origins it holds good for."""

    captured: Capture
    conditions: tuple[str, ...]
    padded: tuple[str, ...]
    outputs: tuple[Output, ...]
    origins: Collection[str]


def _export(
    job: Job, subject: Subject, leaves: list[Any], other_leaves: list[Any], kept: KeptObjects, target: Target
) -> Exported:
    module, signature = subject.module, subject.signature
    shapes = dynamic_shapes(signature, job.bucket)
    with constraints_explained(signature, job.bucket), origins_read(module) as origins:
        try:
            captured = capture(module, signature, leaves, shapes, frozen=job.spec.weights == "frozen")
        except Exception:  # which may be of what torch makes of a buffer that is none at first
            check_second_call(module, signature, dict(module.named_buffers()), kept, leaves, other_leaves)
            raise
    sizes_needed = conditions(captured.guards, signature, job.bucket)
    check_second_call(module, signature, captured.mutated_state, kept, leaves, other_leaves)
    check_edges(module, signature, job.bucket, captured, subject.leaves_at)
    if job.region:  # its inputs are not padded, so its outputs need not be cut
        return Exported(captured, sizes_needed, (), captured.outputs, origins)
    outputs = output_dims(job.spec, module, signature, job.bucket, captured, target, Path(job.folder))
    return Exported(captured, sizes_needed, padded_dims(signature, job.bucket), outputs, origins)


def _variant(
    job: Job, exported: Exported, compiled: CompiledFiles, operators: tuple[OperatorNeed, ...], *, has_picks: bool
) -> Variant:
    output, captured = Path(job.output), exported.captured
    return Variant(
        bucket=job.bucket,
        key=job.key,
        library=LIBRARY,
        files=tuple(staged_file(output, name) for name in compiled.files),
        arguments=captured.arguments,
        outputs=exported.outputs,
        output_tree=captured.output_tree,
        conditions=exported.conditions,
        mutated_leaves=captured.mutated_leaves,
        mutated_state=captured.mutated_state,
        operators=operators,
        report=staged_file(output, REPORT),
        picks=staged_file(output, PICKS) if has_picks else None,
        region=job.region,
        origins=tuple(sorted(exported.origins)),
        padded=exported.padded,
    )


def _artifact(
    job: Job,
    target: Target,
    model: nn.Module,
    snapshot: ModuleSnapshot,
    subject: Subject,
    captured: Capture,
    variant: Variant,
    ambient: Ambient,
) -> Artifact:
    output = Path(job.output)
    state = _state(job.spec, subject.module, captured, snapshot.constants)
    options = inductor_options(job.spec, target)
    if options.get("cpp.dynamic_threads") is False:
        ambient = msgspec.structs.replace(ambient, num_threads=torch.get_num_threads())
    return Artifact(
        schema=SCHEMA_VERSION,
        aotc=aotc_version(),
        model=job.spec.name,
        target=target.name,
        environment=_needs(target, [output / file.name for file in variant.files], job.spec.ptx),
        weights=job.spec.weights,
        signature=make_signature(job.spec, model),
        state=() if job.region else state,
        module=ModuleGuard(
            class_name=type(snapshot.guarded).__qualname__,
            training=snapshot.guarded.training,
            sources=snapshot.sources,
            attributes=sha256_json(snapshot.attributes),
            attributes_file=staged_file(output, ATTRIBUTES),
            imports=snapshot.imports,
        ),
        ambient=ambient,
        variants=(variant,),
        options=_plain_options(options),
        manifest=msgspec.to_builtins(job.spec),
        constants=staged_file(output, CONSTANTS) if snapshot.constants_file else None,
        unused=_unused(subject.module, state, snapshot.constants) if _takes_all_weights(job) else (),
        regions=tuple(_with_state(region, state) if region is subject.region else region for region in job.regions),
    )


def aotc_version() -> str:
    import aotc

    return aotc.__version__


def staged_file(folder: Path, name: str) -> File:
    """The record of a file that is not yet in a store."""
    path = folder / name
    return File(name=name, digest=sha256_file(path), size=path.stat().st_size, blob="", blob_size=0)


def _module(job: Job, target: Target) -> nn.Module:
    return build_module(job.spec, Path(job.folder)).to(target.device)


def _subject(job: Job, model: nn.Module, target: Target) -> Subject:
    spec, folder, signature = job.spec, Path(job.folder), make_signature(job.spec, model)
    if not job.region:

        def leaves_at(dims: Mapping[str, int], seed: int = 0) -> list[Any]:
            return signature_leaves(spec, signature, dims, target.device, seed, folder)

        return Subject(model, signature, leaves_at)
    region = next(region for region in job.regions if region.name == job.region)
    return Subject(
        model.get_submodule(region.name),
        region.signature,
        lambda dims, seed=0: example_leaves_of(spec, model, signature, region, {**job.sizes, **dims}, folder, seed),
        region,
    )


def _with_state(region: Region, state: tuple[StateSpec, ...]) -> Region:
    return msgspec.structs.replace(region, state=state)


def _state(spec: ModelSpec, module: nn.Module, captured: Capture, constants: Collection[str]) -> tuple[StateSpec, ...]:
    """Live: what the library takes. Frozen: every parameter and buffer, since any of them may be folded in."""
    state, frozen = named_state(module), spec.weights == "frozen"
    specs = state_specs(state, list(state) if frozen else sorted(captured.state), digests=frozen)
    return tuple(msgspec.structs.replace(each, persistent=each.name not in constants) for each in specs)


def _unused(module: nn.Module, state: Collection[StateSpec], constants: Collection[str]) -> tuple[str, ...]:
    taken = {name for spec in state for name in (spec.name, *spec.aliases)}
    return tuple(sorted(named_state(module).keys() - taken - set(constants)))


def _report(kernels: tuple[Kernel, ...], captured: Capture) -> bytes:
    operators = sum(node.op == "call_function" for node in captured.graph.graph.nodes)
    return canonical_json(Report(kernels, operators))


def _forms(captured: Capture) -> list[tuple[str, list[int | None]]]:
    """The dtype and shape of each output of the graph at the sizes that are tuned at; None for a size that the values
    of the inputs decide."""
    (values,) = captured.graph.graph.output_node().args
    forms: list[tuple[str, list[int | None]]] = []
    for value in cast("tuple[fx.Node, ...]", values):
        tensor: torch.Tensor = value.meta["val"]
        sizes: list[int | None] = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
        forms.append((dtype_name(tensor.dtype), sizes))
    return forms


def _pick_file(job: Job, target: Target, picker: Picker) -> PickFile:
    """The unit's picks; where all of them were pinned, measured where the pins were."""
    device = job.pins.device if job.pins and not picker.tuned and not picker.shared else device_name(target.device)
    return PickFile(
        schema=PICKS_SCHEMA_VERSION,
        units=(
            UnitPicks(
                model=job.spec.name,
                bucket=job.bucket,
                region=job.region,
                target=target.name,
                torch=str(torch.__version__),
                triton=triton_version() if target.device == "cuda" else "",
                device=device,
                picks=picker.picks,
            ),
        ),
    )


def _shared_picks(job: Job, target: Target) -> SharedPicks | None:
    """The answers of the build's other units, to questions that this unit may ask: of its target, on such a device."""
    if not job.shared:
        return None
    triton = triton_version() if target.device == "cuda" else ""
    context = [target.name, str(torch.__version__), triton, device_name(target.device), torch.get_num_threads()]
    return SharedPicks(
        Path(job.shared) / SHARED_PICKS, context, f"{job.spec.name} {part_name(job.region, job.bucket)} {target.name}"
    )


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's as Linux gives it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else "unknown"


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(options, default=str, sort_keys=True)))


# -- what the code needs ----------------------------------------------------------------------------------------------

_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)")


def _needs(target: Target, files: list[Path], ptx: bool) -> Environment:
    """The environment that a variant needs: the target's CPU features or GPU, and the newest glibc symbol it uses."""
    here = this_environment(target.device)
    symbols = [
        (int(major), int(minor))
        for path in files
        if path.suffix == ".so"
        for major, minor in _GLIBC.findall(path.read_bytes())
    ]
    newest = max(symbols, default=None)
    return Environment(
        os=here.os,
        machine=here.machine,
        torch=here.torch,
        libc=f"{newest[0]}.{newest[1]}" if newest else "",
        cpu_features=target.cpu_features,
        cuda_capability=target.capability,
        cuda=here.cuda if target.device == "cuda" else "",
        gpu=here.gpu if target.device == "cuda" else "",
        ptx=ptx and target.device == "cuda",
    )
