"""Compile one unit in this process: model spec, bucket and target become an artifact with one variant.

The worker process runs `compile_unit`; `capture_unit` is its part before the compile.
"""

from __future__ import annotations

import itertools
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from aotc.compiler.autotune.picker import Picker, describe
from aotc.compiler.autotune.shared_picks import SharedPicks
from aotc.compiler.capture.analysis.build_only import build_only_effects
from aotc.compiler.capture.analysis.custom_operators import Registrations
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.unit_graph import export, subject_of
from aotc.compiler.codegen.aot_inductor import LIBRARY, CompiledFiles, compile_capture
from aotc.compiler.codegen.graph_key import graph_key
from aotc.compiler.codegen.inductor_options import inductor_options, options_of_the_model_undone
from aotc.compiler.codegen.stored_code import stored_code
from aotc.compiler.cross_compile.capture import export_for_absent_gpu
from aotc.compiler.messages import Autotuned, Job
from aotc.compiler.patches.machinery.graph_operators import dtypes_by_operator
from aotc.compiler.planning.key import code_key, triton_version
from aotc.compiler.planning.model_sources import model_sources
from aotc.compiler.publish.unit_record import BuiltUnit, CapturedUnit, take_snapshot, write_record
from aotc.compiler.rank_kinds import ranks_of_code, with_own_regions
from aotc.compiler.toolchain.triton_compilers import begin_triton_compilers
from aotc.compiler.training.training_compile import BACKWARD, compile_halves, differentiable_arguments, split
from aotc.errors import BuildError
from aotc.machine.cpp_compiler import is_foreign
from aotc.machine.targets import Target
from aotc.models.calls import modes_of
from aotc.models.factory import build_module
from aotc.models.fake_ranks import make_meshes_on
from aotc.picks import PICKS_SCHEMA_VERSION, PickFile, UnitPicks
from aotc.provenance import both_operators
from aotc.reads.modes import take_ambient
from aotc.reads.sources import BY_DIGEST
from aotc.records import tuned_dims
from aotc.store.layout.units import Shared

SHARED_PICKS = "picks"

OnStage = Callable[[str], None]


def capture_unit(job: Job, stage: OnStage) -> CapturedUnit:
    """Make the unit's module and capture its graph. `stage` is called as by `compile_unit`, and exceptions pass
    through as there."""
    with options_of_the_model_undone() as notes:
        captured = _captured(job, stage)
    return captured._replace(notes=(*captured.notes, *notes))


def _captured(job: Job, stage: OnStage) -> CapturedUnit:
    spec, target = job.unit.spec, job.unit.target
    registrations = Registrations()
    # What needs values runs on the CPU where the GPU is absent.
    runs_on = Target("cpu", "cpu") if job.unit.gpu else target
    make_meshes_on(runs_on.device)
    stage("model")
    with registrations.watched():
        made = build_module(spec, Path(job.folder), dummy_weights=job.settings.dummy_weights, rank=job.rank)
        model = made.to(runs_on.device)
    job = with_own_regions(job, model)
    snapshot = take_snapshot(job.unit, model)  # before a run of the model, which may change the model
    subject = subject_of(job, model, runs_on)
    kept = KeptObjects(model)
    leaves, other_leaves = (subject.leaves_at(tuned_dims(job.unit.bucket), seed) for seed in (0, 1))
    kept.put_back()
    with modes_of(spec, runs_on.device):
        stage("export")
        with build_only_effects() as effects:
            exported = export(job, subject, leaves, other_leaves, kept, runs_on)
            parallel, other_ranks = ranks_of_code(job, snapshot, subject, exported, runs_on)
        _raise_if_edited(job, model)
    notes = (*effects, *other_ranks)
    return CapturedUnit(
        job,
        runs_on,
        model=model,
        snapshot=snapshot,
        subject=subject,
        leaves=leaves,
        exported=exported,
        parallel=parallel,
        registrations=registrations,
        notes=notes,
    )


def compile_unit(job: Job, stage: OnStage) -> Autotuned:
    """Compile the unit into `job.output`, with its record. `stage` is called with the name of each stage at its begin.

    Exceptions of the model, torch.export and Inductor pass through; `aotc.compiler.explain_failure` explains them.
    """
    spec, target = job.unit.spec, job.unit.target
    options = inductor_options(spec, target)
    if target.device == "cuda":
        begin_triton_compilers(options, absent_gpu=job.unit.gpu is not None)
    captured = capture_unit(job, stage)
    job, subject, exported = captured.job, captured.subject, captured.exported
    with modes_of(spec, target.device):
        if job.unit.gpu:
            exported = export_for_absent_gpu(job, subject, captured.model, captured.leaves, exported)
        stage("compile")
        picker, halves = _picker(job, target), None
        operators = {name: tuple(each) for name, each in dtypes_by_operator(exported.captured.graph.graph).items()}
        if spec.train:
            differentiable = differentiable_arguments(spec, subject, captured.leaves)
            halves = split(job, target, exported.captured, differentiable, options, picker)
            exported = exported._replace(captured=halves.forward)
        graphs = [halves.forward, halves.backward] if halves else [exported.captured]
        graph = graph_key(code_key(job.unit.factors), graphs)
        stored = stored_code(job, graph)
        if stored is not None:
            compiled = stored.files
        elif halves is not None:
            compiled = compile_halves(job, target, halves, options, picker)
        else:
            compiled = compile_capture(job, target, exported.captured, options, picker)
        compiled = msgspec.structs.replace(compiled, operators=both_operators(compiled.operators, operators))
        ambient = take_ambient(target.device)
    picker.raise_if_locked_out()
    libraries = (LIBRARY, BACKWARD) if halves else (LIBRARY,)
    needed = (captured.registrations.needed((Path(job.output) / name).with_suffix(".json")) for name in libraries)
    needs = tuple(dict.fromkeys(itertools.chain(*needed)))
    ranks = captured.parallel.ranks if captured.parallel else ()
    write_record(
        BuiltUnit(
            captured._replace(exported=exported),
            options=options,
            compiled=compiled,
            operators=needs,
            ambient=ambient,
            graph=graph,
            picks=_pick_file(job, target, picker, ranks) if stored is None else stored.picks,
            untuned=picker.untuned if stored is None else stored.untuned,
            backward=halves.record(BACKWARD) if halves else None,
        )
    )
    reused = stored.unit if stored is not None else ""
    return _autotuned(picker, compiled, [*_absence(job), *captured.notes, *exported.notes], reused)


def _absence(job: Job) -> list[str]:
    if not job.unit.absent:
        return []
    if is_foreign(job.unit.target.machine):
        here, there = platform.machine(), job.unit.target.machine
        return [
            f"untested: compiled on {here} for {there}, so nothing was measured or run; `aotc export --standalone` "
            "takes it with `--allow-untested`"
        ]
    return [
        f"untested: this CPU has no {', '.join(job.unit.absent)}, so nothing was measured or run; `aotc.load` asks for "
        "`aotc verify --attest` on a machine that has them"
    ]


def _picker(job: Job, target: Target) -> Picker:
    own = job.pins.picks if job.pins else ()
    unit = job.unit
    locked = job.settings.locked or not unit.runs_here
    untuned = unit.untuned and not (job.settings.locked and unit.absent)
    return Picker(own, unit.pins.seeds, locked=locked, untuned=untuned, shared=_shared_picks(job, target))


def _autotuned(picker: Picker, compiled: CompiledFiles, effects: Sequence[str], reused: str) -> Autotuned:
    return Autotuned(
        failed_candidates=picker.failed_candidates,
        pinned=picker.pinned,
        tuned=tuple(describe(pick) for pick in picker.tuned),
        measurements=picker.measurements,
        shared=Shared(len(picker.shared), picker.shared_times, picker.compiled_elsewhere),
        stale=tuple(str(issue) for issue in picker.stale()),
        notes=(*effects, *compiled.left_out),
        reused=reused,
    )


def _raise_if_edited(job: Job, model: nn.Module) -> None:
    """Raises BuildError where a source file is not the one in the key any longer: the graph may come from either.

    Only files that both machines know by digest: a package installed on one may be a plain folder on the other.
    """
    planned = _files(job.unit.factors.get("sources", {}))
    here = _files(model_sources(job.unit.spec, model, Path(job.folder)))
    if changed := sorted(name for name in planned.keys() & here.keys() if planned[name] != here[name]):
        names = ", ".join(f"`{name}`" for name in changed)
        raise BuildError(f"the source of {names} changed while the build ran", hint="build again")


def _files(sources: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in sources.items() if text.startswith(BY_DIGEST)}


def _pick_file(job: Job, target: Target, picker: Picker, ranks: tuple[int, ...]) -> PickFile:
    """The unit's picks, of the code of these ranks.

    If all were pinned, the recorded device is the one on which the pins were measured.
    """
    device = job.pins.device if job.pins and not picker.tuned and not picker.shared else device_name(target.device)
    return PickFile(
        schema=PICKS_SCHEMA_VERSION,
        units=(
            UnitPicks(
                model=job.unit.spec.name,
                bucket=job.unit.bucket,
                region=job.unit.region,
                target=target.name,
                torch=str(torch.__version__),
                triton=triton_version() if target.device == "cuda" else "",
                device=device,
                picks=picker.picks,
                ranks=ranks,
            ),
        ),
    )


def _shared_picks(job: Job, target: Target) -> SharedPicks | None:
    """Measurements shared with the build's other units: those of this target, torch, device and number of threads."""
    if not job.shared:
        return None
    triton = triton_version() if target.device == "cuda" else ""
    context = [target.name, str(torch.__version__), triton, device_name(target.device), torch.get_num_threads()]
    return SharedPicks(Path(job.shared) / SHARED_PICKS, context, job.unit.name)


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's model name in /proc/cpuinfo."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else "unknown"
