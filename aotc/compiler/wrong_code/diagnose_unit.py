"""What a unit's third process does, where the second found wrong results or crashed: capture the model again, at the
sizes of the smoke run, and find the smallest part of the graph that torch's compiler makes wrong code of."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.unit_graph import subject_of
from aotc.compiler.codegen.inductor_options import inductor_options, options_of_the_model_undone
from aotc.compiler.messages import Job, WrongPart
from aotc.compiler.training.halves import draws
from aotc.compiler.training.training_compile import differentiable_arguments
from aotc.compiler.wrong_code.ladder import Walk, walk, whole_of
from aotc.compiler.wrong_code.lowering import Lowering
from aotc.compiler.wrong_code.search import difference
from aotc.compiler.wrong_code.subgraphs import values_of
from aotc.compiler.wrong_code.trials import CpuBudget
from aotc.models.calls import modes_of
from aotc.models.extreme_inputs import Freedom, extreme_leaves, freedoms, freedoms_of_region
from aotc.models.factory import build_module
from aotc.models.fake_ranks import make_meshes_on
from aotc.records import tuned_dims

NOTHING = WrongPart("", "", "no part of it is wrong by itself")

EVERY_LIBRARY = WrongPart("", "", "a library of one operator crashes, too: set CXX to another compiler")
UNFINISHED = WrongPart(
    "", "", "the CPU time of the search is spent, and no part of it was found that is wrong by itself"
)

CPU_SECONDS = 180.0
"""The budget of the search. Each try compiles a part of the model."""
SHOWN = 6
"""Operators that a message names."""


def wrong_part(job: Job) -> WrongPart:
    """The smallest part of the unit's graph that is wrong, and what mends it. Raises what the model and torch do."""
    spec, target = job.unit.spec, job.unit.target
    if job.crashed:
        torch.set_num_threads(1)  # parts are tried in forks, which have none of OpenMP's threads
    make_meshes_on(target.device)
    with options_of_the_model_undone():
        made = build_module(spec, Path(job.folder), dummy_weights=job.settings.dummy_weights, rank=job.rank)
    subject = subject_of(job, made.to(target.device), target)
    extremes = job.extremes
    leaves = subject.leaves_at(tuned_dims(job.unit.bucket) if extremes is None else extremes, 0)
    frozen = spec.weights == "frozen"
    with modes_of(spec, target.device):
        module, signature = subject.module, subject.signature
        captured = capture(module, signature, leaves, None, frozen, subject.outside, train=spec.train)
        if any(map(draws, captured.graph.graph.nodes)):  # compiled code draws other numbers than eager
            return NOTHING
        budget = CpuBudget(CPU_SECONDS)
        lowering = Lowering(
            target,
            inductor_options(spec, target),
            spec.patches_off,
            extremes=extremes is not None,
            crashes=job.crashed,
            budget=budget,
            standalone=spec.runtime == "standalone",
        )
        if job.crashed and _every_library_crashes(lowering):
            return EVERY_LIBRARY
        if extremes is not None:
            free = freedoms(spec, signature) if subject.region is None else freedoms_of_region(leaves)
            return _said(walk(lowering, captured.graph, _with_extremes(captured, leaves, free)), budget)
        wanted = differentiable_arguments(spec, subject, leaves) if spec.train else ()
        places = [place for place, each in enumerate(captured.arguments) if each in wanted]
        return _said(walk(lowering, captured.graph, captured.examples, places), budget)


def _every_library_crashes(lowering: Lowering) -> bool:
    x = torch.ones(64)
    return difference(lowering, "lowered", whole_of(make_fx(lambda x: [x.exp()])(x), [x])) is not None


def _with_extremes(captured: Capture, leaves: Sequence[Any], free: Sequence[Freedom]) -> list[Any]:
    """The inputs of the graph, with the extreme values of the smoke run; without those of wide integers where its
    operators do not take them."""
    for wide_integers in (True, False):
        values = extreme_leaves(leaves, free, "extreme", wide_integers=wide_integers)
        inputs = [
            example if argument.leaf is None else values[argument.leaf]
            for argument, example in zip(captured.arguments, captured.examples, strict=True)
        ]
        try:
            values_of(captured.graph, inputs)
            break
        except Exception:  # an index
            traceback.print_exc()
    return inputs


def _said(found: Walk, budget: CpuBudget) -> WrongPart:
    if (culprit := found.culprit) is None:
        mended = "; ".join(remedy.write or remedy.name for remedy in found.remedies)
        if mended:
            return WrongPart("", "", f"it is right with {mended}")
        return UNFINISHED if budget.is_spent else NOTHING
    names = culprit.names
    if len(names) > SHOWN:
        names = (*names[: SHOWN - 1], f"… ({len(names) - SHOWN} more)", names[-1])
    where = " → ".join(names)
    if culprit.inputs:
        where += f" of {', '.join(culprit.inputs)}"
    if culprit.note:
        where += f" ({culprit.note})"
    whole = [remedy.write or remedy.name for remedy in found.remedies if remedy.whole]
    hint = f"it is right with {whole[0]}; or write" if whole else "write"
    return WrongPart(where, culprit.line, f"{hint} that line with other operators")
