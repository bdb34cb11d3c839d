"""Decide whether a template is fused with its neighbour."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from aotc.compiler.autotune.algorithm_selection import candidates_of
from aotc.compiler.autotune.picker import UNMEASURED, Hook, Picker, with_time
from aotc.compiler.patches.shared.inductor import inductor
from aotc.picks import Candidate, Pick

FUSED, SEPARATE = "fused", "separate"

LAUNCH_MS = 0.001
"""The gap before a separate kernel on a GPU, which its own time does not include. Measured on an H200, with the
profiler: 0.1 to 1.3 µs in a CUDA graph, 1.3 to 2.0 launched directly."""


class FusionRace:
    """The times that are measured while one fusion is decided."""

    def __init__(self, question: Pick, on_gpu: bool = False) -> None:
        self.question = question
        self.on_gpu = on_gpu
        self.fused: list[tuple[Any, float]] = []
        self.alone_ms = math.inf
        self.neighbour_ms: float | None = None
        self.taken: Any = None
        self.measured_here = False
        self.measured_in: set[str] = set()

    def measured(self) -> Pick:
        """The question, with the names of the units that measured it, if this unit did not."""
        others = "" if self.measured_here else ", ".join(sorted(self.measured_in))
        return msgspec.structs.replace(self.question, measured_in=others)


def fusion_hooks(picker: Picker) -> list[Hook]:
    """Hooks for the fusion of a template whose implementation is still open: whether to fuse, and with which one."""
    scheduler, ir = inductor("scheduler"), inductor("ir")
    decide = scheduler.Scheduler.speedup_by_fusion
    running: list[FusionRace] = []

    def decided(self: Any, node1: Any, node2: Any) -> Any:
        templates = [node.get_template_node() for node in (node1, node2)]
        template = next((node for node in templates if isinstance(node, ir.MultiTemplateBuffer)), None)
        if template is None:
            return decide(self, node1, node2)
        question = _fusion_question(node1, node2)
        candidates = candidates_of(template.choices)
        if (pin := picker.pin_for(question)) and (answer := _pinned_fusion(pin, template, candidates)):
            picker.take(pin)
            template.choice_timings()  # the race that the fusion is compared with, which has its own pin
            # Decide at the same moment as a build that measures: some fusions are decided at the end of a round.
            return at_the_end(answer) if pin.detail.get("deferred") else scheduler.FusionResult.fuse(answer())
        race = FusionRace(question, node1.get_device().type != "cpu")
        result = during(race, lambda: decide(self, node1, node2))
        if result.callable_fn is None:
            _keep_fusion(picker, race, candidates, bool(result.should_fuse))
            return result
        race.question = msgspec.structs.replace(question, detail={"deferred": True})
        # Preliminary: `later` is not called if an earlier fusion has taken the template, and the nodes stay separate.
        picker.keep(race.question, (Candidate(SEPARATE),), Candidate(SEPARATE))

        def later() -> bool:
            fused = bool(during(race, result.callable_fn))
            _keep_fusion(picker, race, candidates, fused)
            return fused

        return at_the_end(later)

    def at_the_end(decide: Callable[[], bool]) -> Any:
        """A deferred result with its own future: of results with one future, which equal kernels share, Inductor asks
        only one."""
        return scheduler.FusionResult.from_callable(decide, SimpleNamespace(future=object()))

    def during(race: FusionRace, function: Callable[[], Any]) -> Any:
        running.append(race)
        try:
            return function()
        finally:
            running.pop()

    return [
        (scheduler.Scheduler, "speedup_by_fusion", decided),
        (scheduler, "as_completed", list),  # in the order of the graph, not in the order in which compilations end
        *fusion_timers(picker, running),
    ]


def fusion_timers(picker: Picker, running: Sequence[FusionRace]) -> list[Hook]:
    """Hooks that add the scheduler's measurements to the running race."""
    scheduler, ir = inductor("scheduler").Scheduler, inductor("ir").MultiTemplateBuffer
    kernels = inductor("codegen.triton").TritonScheduling
    module, nodes, kernel = (
        scheduler.benchmark_codegened_module,
        scheduler.benchmark_fused_nodes,
        kernels.benchmark_codegened_module,
    )
    swap, finalize, fastest = ir.swap_as_triton_caller, ir.finalize_as_triton_caller, ir.get_min_choice
    swapped: list[Any] = []

    @contextmanager
    def swapping(self: Any, caller: Any) -> Iterator[None]:
        swapped.append(caller)
        try:
            with swap(self, caller):
                yield
        finally:
            swapped.pop()

    def forbidden() -> bool:
        return bool(running) and picker.must_not_measure(running[-1].question)

    def timed_kernel(self: Any, mod: Any, n_spills_threshold: int = 0, node_names: Any = None) -> Any:
        """Time generated code. The time depends on the source alone, so it is shared with other units.

        Kernels with many spilled registers are timed, too: Inductor skips those with more than eight, but one may be
        the fastest.
        """
        form = ["time", Path(mod.__file__).stem]
        if known := picker.find_shared(form):
            picker.shared_times += 1
            if running:
                running[-1].measured_in.add(known.measured_in)
            return math.inf if known.winner.ms is None else known.winner.ms, mod.__file__
        picker.measurements += 1
        ms, path = kernel(self, mod, sys.maxsize, node_names)
        if running:
            running[-1].measured_here = True
        timed = with_time(Candidate("kernel"), ms)
        picker.share(Pick(kind="fusion", subject=Path(mod.__file__).stem, candidates=(timed,)), form)
        return ms, path

    def timed_module(*args: Any, **kwargs: Any) -> Any:
        if forbidden():
            return UNMEASURED, ""
        ms, path = module(*args, **kwargs)
        if running and swapped:
            running[-1].fused.append((swapped[-1], ms))
        return ms, path

    def timed_nodes(*args: Any, **kwargs: Any) -> Any:
        if forbidden():
            return UNMEASURED, ""
        ms, path = nodes(*args, **kwargs)
        if running:
            ms += LAUNCH_MS * running[-1].on_gpu
            running[-1].neighbour_ms = ms
        return ms, path

    def finalized(self: Any, caller: Any) -> Any:
        if running:
            running[-1].taken = caller
        return finalize(self, caller)

    def chosen_alone(*args: Any, **kwargs: Any) -> Any:
        choice, ms = fastest(*args, **kwargs)
        if running:
            running[-1].alone_ms = ms
        return choice, ms

    return [
        (scheduler, "benchmark_codegened_module", timed_module),
        (scheduler, "benchmark_fused_nodes", timed_nodes),
        (kernels, "benchmark_codegened_module", timed_kernel),
        (ir, "swap_as_triton_caller", swapping),
        (ir, "finalize_as_triton_caller", finalized),
        (ir, "get_min_choice", chosen_alone),
    ]


def _fusion_question(node1: Any, node2: Any) -> Pick:
    """The question for two nodes, by their names in this unit's graph and the operators that they come from."""
    names = " + ".join(node.get_name() for node in (node1, node2))
    return Pick(kind="fusion", subject=names, candidates=(), inputs=tuple(map(_operators, (node1, node2))))


def _operators(node: Any) -> str:
    found: dict[str, None] = {}
    for part in node.get_nodes():
        for origin in sorted(getattr(part.node, "origins", ()), key=lambda origin: str(origin.name)):
            found[str(origin.name)] = None
    return " ".join(found)


def _pinned_fusion(pin: Pick, template: Any, candidates: Sequence[tuple[Candidate, Any]]) -> Callable[[], bool] | None:
    """A function that applies the pin, and returns whether the nodes are fused; None if the pin's template is not among
    the candidates."""
    if pin.winner.name == SEPARATE:
        return lambda: False
    config = dict(pin.winner.config)
    wanted = Candidate(str(config.pop("template", "")), config)
    choice = next((choice for candidate, choice in candidates if candidate.same_code(wanted)), None)
    if choice is None:
        return None

    def fuse() -> bool:
        template.finalize_as_triton_caller(choice)
        return True

    return fuse


def _keep_fusion(picker: Picker, race: FusionRace, candidates: Sequence[tuple[Candidate, Any]], fused: bool) -> None:
    """Record a race in which something was timed; other fusions are decided by rules, which are deterministic."""
    if not race.fused and race.neighbour_ms is None:
        return
    names = {id(choice): candidate for candidate, choice in candidates}

    def as_fused(choice: Any, ms: float) -> Candidate:
        candidate = names[id(choice)]
        return with_time(Candidate(FUSED, {"template": candidate.name, **candidate.config}), ms)

    separate = with_time(Candidate(SEPARATE), race.alone_ms + (race.neighbour_ms or 0.0))
    tried = [as_fused(choice, ms) for choice, ms in race.fused]
    if fused and race.taken is None:
        return
    taken = as_fused(race.taken, math.inf) if fused else separate
    if fused and not any(candidate.same_code(taken) for candidate in tried):
        tried.append(taken)
    picker.keep(race.measured(), (*tried, separate), taken)
