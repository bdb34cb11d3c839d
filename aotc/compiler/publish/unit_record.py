"""Write the record of a compiled unit, and the files beside its library.

The files are not in a store yet, so the record names no blobs; publishing fills them in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import fx, nn

from aotc.compiler.capture.analysis.custom_operators import Registrations
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.unit_graph import Exported, UnitModule
from aotc.compiler.codegen.aot_inductor import LIBRARY, CompiledFiles
from aotc.compiler.codegen.standalone_code import check_runs_standalone
from aotc.compiler.messages import Job, Unit
from aotc.digest import canonical_json, sha256_file
from aotc.machine.elf import needed_versions, newest
from aotc.machine.environment import this_environment
from aotc.machine.targets import Target
from aotc.manifest import ModelSpec
from aotc.picks import PickFile
from aotc.provenance import FORMS, BuiltArtifact, BuiltVariant, Report
from aotc.reads.attributes import read_attributes
from aotc.reads.module_identity import ModuleIdentity
from aotc.reads.outside import Outside
from aotc.reads.sources import Trees
from aotc.reads.state_specs import named_constants, state_specs, submodules
from aotc.reads.tensors import dtype_name, named_state, plain_state
from aotc.records import (
    SCHEMA_VERSION,
    Ambient,
    Backward,
    Environment,
    File,
    ModuleGuard,
    OperatorNeed,
    Parallel,
    Reads,
    Region,
    StateSpec,
)
from aotc.store.layout.bundle import CONFIG_LIMIT
from aotc.tensors.constants import encode_constants
from aotc.tensors.subclasses import descriptions, unwrapped, wrappers

ATTRIBUTES = "attributes.json"
READ_VALUES = "reads.json"
CONSTANTS = "constants.safetensors"
REPORT = "report.json"
PICKS = "picks.json"
RECORD = "record.json"


def folder_of_kind(output: Path, rank: int) -> Path:
    """The folder for the files of a further kind of ranks; `rank` is the first of that kind."""
    return output / f"rank{rank}"


class Snapshot(NamedTuple):
    """The facts of the module that a load compares with its own, and the buffers that it takes from the artifact."""

    guarded: nn.Module
    identity: ModuleIdentity
    trees: Trees
    constants: Collection[str]
    constants_file: bytes


def take_snapshot(unit: Unit, model: nn.Module) -> Snapshot:
    instances = [path for region in unit.regions for path in region.instances]
    guarded = submodules(model, instances) if unit.region else model
    constants = named_constants(model) if _takes_all_weights(unit) else {}
    trees: Trees = {}
    return Snapshot(
        guarded,
        ModuleIdentity(guarded, trees).taken(),
        trees,
        frozenset(constants),
        encode_constants(constants),
    )


def _takes_all_weights(unit: Unit) -> bool:
    """Whether a checkpoint can replace the module: every weight is an argument, and no part of the model is eager."""
    return unit.spec.weights == "live" and not unit.region


class CapturedUnit(NamedTuple):
    """A unit before it is compiled. `runs_on` is the CPU where the target's GPU is absent; the report has the notes of
    `exported`, too."""

    job: Job
    runs_on: Target
    model: nn.Module
    snapshot: Snapshot
    subject: UnitModule
    leaves: list[Any]
    exported: Exported
    parallel: Parallel | None
    registrations: Registrations
    notes: tuple[str, ...]


class BuiltUnit(NamedTuple):
    """Everything from which a unit's record is written."""

    captured: CapturedUnit
    options: Mapping[str, Any]
    compiled: CompiledFiles
    operators: tuple[OperatorNeed, ...]
    ambient: Ambient
    graph: str
    picks: PickFile | None
    untuned: tuple[str, ...]
    backward: Backward | None


def write_record(built: BuiltUnit) -> None:
    """Write the files that a load reads into `job.output`, beside the compiled files; the record comes last. Raises
    BuildError for a record that `runtime: standalone` excludes."""
    captured = built.captured
    output, snapshot, exported = Path(captured.job.output), captured.snapshot, captured.exported
    (output / REPORT).write_bytes(_report(built.compiled, exported.captured))
    (output / FORMS).write_bytes(canonical_json(_forms(exported.captured)))
    if built.picks:
        (output / PICKS).write_bytes(canonical_json(built.picks))
    if len(attributes := canonical_json(snapshot.identity.attributes)) <= CONFIG_LIMIT:  # else a reader would refuse it
        (output / ATTRIBUTES).write_bytes(attributes)
    outside = Outside(snapshot.guarded).values(exported.outside)
    reads = Reads(read_attributes(snapshot.guarded, exported.reads), outside)
    (output / READ_VALUES).write_bytes(canonical_json(reads))
    if snapshot.constants_file:
        (output / CONSTANTS).write_bytes(snapshot.constants_file)
    artifact = _artifact(built, _variant(built))
    if captured.job.unit.spec.runtime == "standalone":
        check_runs_standalone(artifact)
    (output / RECORD).write_bytes(artifact.encode())


def _variant(built: BuiltUnit) -> BuiltVariant:
    job, exported, compiled = built.captured.job, built.captured.exported, built.compiled
    unit, output, captured = job.unit, Path(job.output), exported.captured
    return BuiltVariant(
        bucket=unit.bucket,
        key=unit.key,
        library=LIBRARY,
        files=tuple(staged_file(output, name, mapped=name in compiled.mapped) for name in compiled.files),
        arguments=captured.arguments,
        outputs=exported.outputs,
        output_tree=captured.output_tree,
        conditions=exported.conditions,
        mutated_leaves=captured.mutated_leaves,
        storage_leaves=captured.storage_leaves,
        mutated_state=captured.mutated_state,
        operators=built.operators,
        report=staged_file(output, REPORT),
        picks=_if_written(output, PICKS),
        region=unit.region,
        origins=tuple(sorted(exported.origins)),
        padded=exported.padded,
        any_sequence=exported.forms.any_sequence,
        any_order=exported.forms.any_order,
        empty_is_none=exported.forms.empty_is_none,
        assigned=tuple(sorted(at for name in exported.assigned.first for at in _places(unit, name))),
        left={at: value for name, value in exported.assigned.left.items() for at in _places(unit, name)},
        reads=tuple(sorted(exported.reads)),
        read_values=staged_file(output, READ_VALUES),
        asked=dict(sorted(exported.asked.items())),
        untested=not unit.runs_here,
        untuned=built.untuned,
        backward=built.backward,
        imports=compiled.imports,
        graph=built.graph,
    )


def _places(unit: Unit, attribute: str) -> list[str]:
    """The attribute's paths in the model that a load compares: for a region, one in each of its instances."""
    instances = [path for region in unit.regions if region.name == unit.region for path in region.instances]
    return [f"{path}.{attribute}" for path in instances] if unit.region else [attribute]


def _artifact(built: BuiltUnit, variant: BuiltVariant) -> BuiltArtifact:
    captured, ambient = built.captured, built.ambient
    unit, snapshot, subject = captured.job.unit, captured.snapshot, captured.subject
    target, output = unit.target, Path(captured.job.output)
    state = _state(unit.spec, subject.module, captured.exported.captured, snapshot.constants)
    if built.options.get("cpp.dynamic_threads") is False:
        ambient = msgspec.structs.replace(ambient, num_threads=torch.get_num_threads())
    return BuiltArtifact(
        schema=SCHEMA_VERSION,
        aotc=aotc_version(),
        model=unit.spec.name,
        target=target.name,
        environment=_needs(target, [output / file.name for file in variant.files], unit.spec.ptx),
        weights=unit.spec.weights,
        signature=subject.model_signature,
        state=() if unit.region else state,
        module=ModuleGuard(
            class_name=snapshot.identity.class_name,
            training=snapshot.guarded.training,
            sources=snapshot.identity.sources,
            attributes=snapshot.identity.attributes_digest,
            attributes_file=_if_written(output, ATTRIBUTES),
            imports=snapshot.identity.imports,
            trees=dict(sorted(snapshot.trees.items())),
            training_differs=snapshot.identity.training_differs,
        ),
        ambient=ambient,
        variants=(variant,),
        options=dict(json.loads(json.dumps(built.options, default=str, sort_keys=True))),
        manifest=msgspec.to_builtins(unit.spec),
        constants=staged_file(output, CONSTANTS) if snapshot.constants_file else None,
        method=unit.spec.method,
        parallel=captured.parallel,
        unused=_unused(subject.module, state, snapshot.constants) if _takes_all_weights(unit) else (),
        regions=tuple(_with_state(region, state) if region is subject.region else region for region in unit.regions),
        calls=unit.calls,
    )


def aotc_version() -> str:
    import aotc

    return aotc.__version__


def staged_file(folder: Path, name: str, *, mapped: bool = False) -> File:
    """The record of a file that is not yet in a store."""
    path = folder / name
    digest, size = sha256_file(path), path.stat().st_size
    return File(name=name, digest=digest, size=size, blob=digest if mapped else "", blob_size=size if mapped else 0)


def _if_written(folder: Path, name: str) -> File | None:
    return staged_file(folder, name) if (folder / name).exists() else None


def _with_state(region: Region, state: tuple[StateSpec, ...]) -> Region:
    return msgspec.structs.replace(region, state=state)


def _state(spec: ModelSpec, module: nn.Module, captured: Capture, constants: Collection[str]) -> tuple[StateSpec, ...]:
    """Live: the parameters and buffers that the library takes. Frozen: all of them, since any may be folded in."""
    named, frozen = named_state(module), spec.weights == "frozen"
    state, subclasses = (named, wrappers(named)) if frozen else (unwrapped(named), descriptions(named))
    names = list(state) if frozen else sorted(captured.state)
    specs = state_specs(state, names, digests=frozen, subclasses=subclasses)
    return tuple(msgspec.structs.replace(each, persistent=each.name not in constants) for each in specs)


def _unused(module: nn.Module, state: Collection[StateSpec], constants: Collection[str]) -> tuple[str, ...]:
    taken = {name for spec in state for name in (spec.name, *spec.aliases)}
    return tuple(sorted(plain_state(module).keys() - taken - set(constants)))


def _report(compiled: CompiledFiles, captured: Capture) -> bytes:
    operators = sum(node.op == "call_function" for node in captured.graph.graph.nodes)
    return canonical_json(Report(compiled.kernels, operators, compiled.patches, compiled.operators))


def _forms(captured: Capture) -> list[tuple[str, list[int | None]]]:
    """The dtype and shape of each output of the graph, at the sizes of autotuning; None for a size that depends on the
    inputs' values."""
    (values,) = captured.graph.graph.output_node().args
    forms: list[tuple[str, list[int | None]]] = []
    for value in cast("tuple[fx.Node, ...]", values):
        tensor: torch.Tensor = value.meta["val"]
        sizes: list[int | None] = [size if isinstance(size, int) else size.node.hint for size in tensor.shape]
        forms.append((dtype_name(tensor.dtype), sizes))
    return forms


# -- the needed environment -------------------------------------------------------------------------------------------


def _needs(target: Target, files: list[Path], ptx: bool) -> Environment:
    """The environment that a variant needs: the target's CPU features or GPU, and the newest symbols it uses of glibc
    and libstdc++."""
    here = this_environment(target.device)
    versions = newest(
        f"{family}_{version}"
        for path in files
        if path.suffix == ".so"
        for family, version in needed_versions(path).items()
    )
    return Environment(
        os=here.os,
        machine=target.machine or here.machine,
        torch=here.torch,
        libc=versions.pop("GLIBC", ""),
        libstdcxx=tuple(f"{family}_{version}" for family, version in sorted(versions.items())),
        cpu_features=target.cpu_features,
        cuda_capability=target.capability,
        cuda=here.cuda if target.device == "cuda" else "",
        gpu=here.gpu if target.device == "cuda" else "",
        ptx=ptx and target.device == "cuda",
    )
