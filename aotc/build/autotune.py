"""Where Inductor measures: each decision is answered from a pin, or measured and written down.

Nothing else in a build depends on time:

- `AlgorithmSelectorCache`: which library call or template does a matrix product, a convolution, …
- `Scheduler.speedup_by_fusion`: whether a template is fused with its neighbour
- `pad_mm`: whether a matrix product is padded
- `CachingAutotuner`: the configuration of each Triton kernel
- and aotc's own choice between a direct launch and a CUDA graph, in `aotc.verify.launch`

A pinned decision's candidates are neither compiled nor timed, and the code takes the path that it takes after a
measurement: equal picks give equal code. Nor is what another unit of the build has measured; it answers with every
candidate's time, so that what is decided later by these times is decided as if they had been measured here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch

from aotc.build.picker import Picker
from aotc.picks import Candidate, Identity, Pick
from aotc.records import Scalar

FUSED, SEPARATE = "fused", "separate"
PADDED, UNPADDED = "padded", "as it is"

UNMEASURED = 1.0
"""What a locked build answers instead of a time, until it has found out all that is missing: any equal numbers do."""

Patch = tuple[Any, str, Callable[..., Any]]


@contextmanager
def picking(picker: Picker) -> Iterator[None]:
    """Let `picker` answer and record what Inductor would measure in this context.

    Where this torch's Inductor is not as it is known here, everything is left alone and `picker.unavailable` says why.
    """
    if flaw := _unknown_parts():
        picker.unavailable = f"picks are not available on torch {torch.__version__}: {flaw}"
        yield
        return
    _place_kernel_pins(picker)
    with ExitStack() as stack:
        for owner, name, function in (*_selection(picker), *_fusion(picker), *_padding(picker), *_kernels(picker)):
            stack.enter_context(mock.patch.object(owner, name, function))
        yield


_PARTS = {
    "select_algorithm:AlgorithmSelectorCache.__call__": ("name", "choices", "input_nodes", "layout"),
    "select_algorithm:AlgorithmSelectorCache.make_precompile_fn": ("choices", "name"),
    "select_algorithm:AlgorithmSelectorCache.do_autotuning": ("name", "input_nodes", "layout", "choices"),
    "select_algorithm:AlgorithmSelectorCache.benchmark": ("choices",),
    "select_algorithm:AlgorithmSelectorCache.key_of": ("node",),
    "scheduler:Scheduler.speedup_by_fusion": ("node1", "node2"),
    "scheduler:Scheduler.benchmark_codegened_module": ("module",),
    "scheduler:Scheduler.benchmark_fused_nodes": ("nodes",),
    "scheduler:FusionResult.from_callable": ("callable_fn", "future"),
    "scheduler:as_completed": ("fs",),
    "codegen.triton:TritonScheduling.benchmark_codegened_module": ("mod",),
    "ir:MultiTemplateBuffer.swap_as_triton_caller": ("caller",),
    "ir:MultiTemplateBuffer.finalize_as_triton_caller": ("caller",),
    "ir:MultiTemplateBuffer.get_min_choice": (),
    "fx_passes.pad_mm:get_cached_should_pad": ("key",),
    "fx_passes.pad_mm:is_padded_faster": ("key", "ori_time", "pad_time"),
    "fx_passes.pad_mm:get_do_bench": (),
    "runtime.triton_heuristics:CachingAutotuner.bench": ("launcher",),
    "runtime.triton_heuristics:CachingAutotuner.save_gpu_kernel": ("launcher",),
    "runtime.triton_heuristics:CachingAutotuner._dynamic_scale_rblock": (),
    "async_compile:AsyncCompile.triton": ("kernel_name", "source_code"),
}
"""The parts of Inductor that are hooked, with the parameters that the hooks rely on (torch 2.11 to 2.13)."""


@functools.cache
def _unknown_parts() -> str:
    """What is not as the hooks expect it, or ""."""
    for part, parameters in _PARTS.items():
        module, _, path = part.partition(":")
        try:
            found: Any = functools.reduce(getattr, path.split("."), _inductor(module))
            missing = set(parameters) - set(inspect.signature(inspect.unwrap(found)).parameters)
        except (ImportError, AttributeError, ValueError, TypeError) as error:
            return f"torch._inductor.{module}.{path}: {error}"
        if missing:
            return f"torch._inductor.{module}.{path} has no parameter {', '.join(sorted(missing))}"
    return ""


def _inductor(module: str) -> Any:
    import importlib

    return importlib.import_module(f"torch._inductor.{module}")


# -- operators --------------------------------------------------------------------------------------------------------


def _selection(picker: Picker) -> list[Patch]:
    """Which candidate does an operator: the race in `do_autotuning`, and before it the candidates' compilation."""
    selector = _inductor("select_algorithm").AlgorithmSelectorCache
    call, precompile, tune, benchmark = (
        getattr(selector, name) for name in ("__call__", "make_precompile_fn", "do_autotuning", "benchmark")
    )
    asked: list[Pick] = []
    started: set[Identity] = set()

    def called(self: Any, name: str, choices: Any, input_nodes: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        question = _operator(name, input_nodes, layout)
        asked.append(question)
        try:
            with picker.asking(question) if len(choices) > 1 else nullcontext():
                return call(self, name, choices, input_nodes, layout, *args, **kwargs)
        finally:
            asked.pop()

    def precompiled(self: Any, choices: Any, *args: Any, **kwargs: Any) -> Any:
        here = [candidate for candidate, _ in _candidates(choices)]
        if picker.locked or (
            asked and (picker.pin_for(asked[-1], here) or picker.find_shared(_operator_form(asked[-1], choices)))
        ):
            return lambda *args, **kwargs: {}
        if asked and asked[-1].identity in started:
            # Its race is run when all operators have been asked, and need not be run then: see `answered`.
            return lambda *called_with, **named: precompile(self, choices, *args, **kwargs)(*called_with, **named)
        started.update(question.identity for question in asked[-1:])
        return precompile(self, picker.in_own_order(choices), *args, **kwargs)

    def tuned(
        self: Any,
        name: str,
        inputs: Any,
        layout: Any,
        generators: Any,
        key: Any,
        choices: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        question = _operator(name, inputs, layout)
        candidates = _candidates(choices)
        here = [candidate for candidate, _ in candidates]
        if pin := picker.pin_for(question, here):
            picker.take(pin)
            return _times(pin, candidates)
        if answer := picker.answered(question, here):
            picker.repeat(answer)
            return _times(answer, candidates)
        if picker.must_not_measure(question):
            return {choices[0]: UNMEASURED}
        form = _operator_form(question, choices)
        with picker.asking(question):
            if known := picker.find_shared(form):
                picker.take_shared(known)
                return _times(known, candidates)
            times = tune(self, name, inputs, layout, generators, key, choices, *args, **kwargs)
            _keep_operator(picker, question, candidates, times, form)
            return times

    def counted(*args: Any, **kwargs: Any) -> Any:
        picker.measurements += 1
        return benchmark(*args, **kwargs)

    return [
        (selector, "__call__", called),
        (selector, "make_precompile_fn", precompiled),
        (selector, "do_autotuning", tuned),
        (selector, "benchmark", counted),
    ]


def _operator(name: str, input_nodes: Sequence[Any], layout: Any) -> Pick:
    from torch._inductor.virtualized import V

    hints = V.graph.sizevars.optimization_hints
    output = _tensor(str(layout.dtype), hints(layout.size), hints(layout.stride), 0)
    return Pick(kind="operator", subject=name, candidates=(), inputs=tuple(map(_input, input_nodes)), output=output)


def _operator_form(question: Pick, choices: Sequence[Any]) -> Any:
    """All that the times depend on: the tensors, and each candidate's code with its arguments, as Inductor names it.

    The question alone does not say it: convolutions of other strides may have the same tensors.
    """
    return [question.identity, [choice.hash_key() for choice in choices], torch.get_float32_matmul_precision()]


def _input(node: Any) -> str:
    _, dtype, *numbers, offset = _inductor("select_algorithm").AlgorithmSelectorCache.key_of(node)
    half = len(numbers) // 2
    return _tensor(dtype, numbers[:half], numbers[half:], offset)


def _tensor(dtype: str, size: Sequence[int], stride: Sequence[int], offset: int) -> str:
    at = f" offset {offset}" if offset else ""
    return f"{dtype.removeprefix('torch.')}{list(map(int, size))} stride {list(map(int, stride))}{at}"


def _candidates(choices: Sequence[Any]) -> list[tuple[Candidate, Any]]:
    """The choices under names that another process gives them too; of equal ones each has its number."""
    named: list[tuple[Candidate, Any]] = []
    for choice in choices:
        candidate = _candidate(choice)
        copies = sum(other.name == candidate.name and _is_copy(other, candidate) for other, _ in named)
        config = {**candidate.config, "copy": copies} if copies else candidate.config
        named.append((Candidate(candidate.name, config), choice))
    return named


def _is_copy(other: Candidate, candidate: Candidate) -> bool:
    return {name: value for name, value in other.config.items() if name != "copy"} == candidate.config


def _candidate(choice: Any) -> Candidate:
    name = re.sub(r"_\d+$", "", choice.name)  # a counter of this process
    described = re.findall(r"(\w+)=('[^']*'|[^,]+)", getattr(choice, "description", "") or "")
    return Candidate(name, {key: _scalar(value) for key, value in described})


def _scalar(text: str) -> Scalar:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()
    return value if isinstance(value, int | float | str | None) else text.strip()


def _times(pick: Pick, candidates: Sequence[tuple[Candidate, Any]]) -> dict[Any, float]:
    """The times of the candidates that exist here: the winner first, as the first of equal times is taken."""
    measured = [pick.winner, *(candidate for candidate in pick.candidates if candidate.ms is not None)]
    found = [(timed, choice) for timed in measured for candidate, choice in candidates if candidate.same_code(timed)]
    return {choice: timed.ms or 0.0 for timed, choice in found}


def _keep_operator(
    picker: Picker, question: Pick, candidates: Sequence[tuple[Candidate, Any]], times: Any, form: Any
) -> None:
    """Remember a race as Inductor ends it: of candidates with equal times, which are common, the first timed wins."""
    timed = [(_timed(candidate, times.get(choice, math.inf)), choice) for candidate, choice in candidates]
    if any(candidate.ms is not None for candidate, _ in timed):
        fastest = min(times, key=times.__getitem__)
        taken = next(candidate for candidate, choice in timed if choice is fastest)
        picker.keep(question, [candidate for candidate, _ in timed], taken, form)


def _timed(candidate: Candidate, ms: float) -> Candidate:
    return Candidate(candidate.name, candidate.config, round(float(ms), 6) if math.isfinite(ms) else None)


# -- fusion -----------------------------------------------------------------------------------------------------------


class _FusionRace:
    """What is timed while one fusion is decided."""

    def __init__(self, question: Pick) -> None:
        self.question = question
        self.fused: list[tuple[Any, float]] = []
        self.alone_ms = math.inf
        self.neighbour_ms: float | None = None
        self.taken: Any = None
        self.measured_here = False
        self.measured_in: set[str] = set()

    def measured(self) -> Pick:
        """The question, with the units that measured, if it was not this one."""
        others = "" if self.measured_here else ", ".join(sorted(self.measured_in))
        return msgspec.structs.replace(self.question, measured_in=others)


def _fusion(picker: Picker) -> list[Patch]:
    """Whether a template whose implementation is still open takes its neighbour in, and then with which one."""
    scheduler, ir = _inductor("scheduler"), _inductor("ir")
    decide = scheduler.Scheduler.speedup_by_fusion
    running: list[_FusionRace] = []

    def decided(self: Any, node1: Any, node2: Any) -> Any:
        templates = [node.get_template_node() for node in (node1, node2)]
        template = next((node for node in templates if isinstance(node, ir.MultiTemplateBuffer)), None)
        if template is None:
            return decide(self, node1, node2)
        question = _fusion_question(node1, node2)
        candidates = _candidates(template.choices)
        if (pin := picker.pin_for(question)) and (answer := _pinned_fusion(pin, template, candidates)):
            picker.take(pin)
            template.choice_timings()  # the race that the fusion is compared with: it has its own pin
            # At the same moment as in a build that measures: some fusions are decided at the end of a round.
            return at_the_end(answer) if pin.detail.get("deferred") else scheduler.FusionResult.fuse(answer())
        race = _FusionRace(question)
        result = during(race, lambda: decide(self, node1, node2))
        if result.callable_fn is None:
            _keep_fusion(picker, race, candidates, bool(result.should_fuse))
            return result
        race.question = msgspec.structs.replace(question, detail={"deferred": True})
        # Until it is asked, which it is not where an earlier fusion has taken the template: then they stay separate.
        picker.keep(race.question, (Candidate(SEPARATE),), Candidate(SEPARATE))

        def later() -> bool:
            fused = bool(during(race, result.callable_fn))
            _keep_fusion(picker, race, candidates, fused)
            return fused

        return at_the_end(later)

    def at_the_end(decide: Callable[[], bool]) -> Any:
        """With a future of its own: equal kernels share that of their compilation, and then one alone is asked."""
        return scheduler.FusionResult.from_callable(decide, SimpleNamespace(future=object()))

    def during(race: _FusionRace, function: Callable[[], Any]) -> Any:
        running.append(race)
        try:
            return function()
        finally:
            running.pop()

    return [
        (scheduler.Scheduler, "speedup_by_fusion", decided),
        (scheduler, "as_completed", list),  # in the order of the graph, not in that in which compilations end
        *_fusion_timers(picker, running),
    ]


def _fusion_timers(picker: Picker, running: Sequence[_FusionRace]) -> list[Patch]:
    """What the scheduler times, given to the race that is running."""
    scheduler, ir = _inductor("scheduler").Scheduler, _inductor("ir").MultiTemplateBuffer
    kernels = _inductor("codegen.triton").TritonScheduling
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

    def timed_kernel(self: Any, mod: Any, *args: Any, **kwargs: Any) -> Any:
        """Of generated code, whatever the graph it stands in: an equal source takes an equal time."""
        form = ["time", Path(mod.__file__).stem]
        if known := picker.find_shared(form):
            picker.shared_times += 1
            if running:
                running[-1].measured_in.add(known.measured_in)
            return math.inf if known.winner.ms is None else known.winner.ms, mod.__file__
        picker.measurements += 1
        ms, path = kernel(self, mod, *args, **kwargs)
        if running:
            running[-1].measured_here = True
        timed = _timed(Candidate("kernel"), ms)
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
    """The two nodes, by their names in this unit's graph and the operators that they come from."""
    names = " + ".join(node.get_name() for node in (node1, node2))
    return Pick(kind="fusion", subject=names, candidates=(), inputs=tuple(map(_operators, (node1, node2))))


def _operators(node: Any) -> str:
    found: dict[str, None] = {}
    for part in node.get_nodes():
        for origin in sorted(getattr(part.node, "origins", ()), key=lambda origin: str(origin.name)):
            found[str(origin.name)] = None
    return " ".join(found)


def _pinned_fusion(pin: Pick, template: Any, candidates: Sequence[tuple[Candidate, Any]]) -> Callable[[], bool] | None:
    """What does as the pin says and gives whether the nodes are fused; None where its template is not here."""
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


def _keep_fusion(picker: Picker, race: _FusionRace, candidates: Sequence[tuple[Candidate, Any]], fused: bool) -> None:
    """Remember a race in which something was timed; the rest is decided by rules, and is the same each time."""
    if not race.fused and race.neighbour_ms is None:
        return
    names = {id(choice): candidate for candidate, choice in candidates}

    def as_fused(choice: Any, ms: float) -> Candidate:
        candidate = names[id(choice)]
        return _timed(Candidate(FUSED, {"template": candidate.name, **candidate.config}), ms)

    separate = _timed(Candidate(SEPARATE), race.alone_ms + (race.neighbour_ms or 0.0))
    tried = [as_fused(choice, ms) for choice, ms in race.fused]
    if fused and race.taken is None:
        return
    taken = as_fused(race.taken, math.inf) if fused else separate
    if fused and not any(candidate.same_code(taken) for candidate in tried):
        tried.append(taken)
    picker.keep(race.measured(), (*tried, separate), taken)


# -- padding ----------------------------------------------------------------------------------------------------------


def _padding(picker: Picker) -> list[Patch]:
    """Whether a matrix product is padded to better aligned sizes."""
    pad_mm = _inductor("fx_passes.pad_mm")
    cached, compare, timer = pad_mm.get_cached_should_pad, pad_mm.is_padded_faster, pad_mm.get_do_bench

    def question(key: str) -> Pick:
        return Pick(kind="padding", subject="matrix product", candidates=(), inputs=(str(key),))

    def known(key: str) -> Any:
        if pin := picker.pin_for(question(key)):
            picker.take(pin)
            return pin.winner.name == PADDED
        if shared := picker.find_shared(question(key).identity):
            picker.take_shared(shared)
            return shared.winner.name == PADDED
        return cached(key)

    def compared(key: str, ori_time: float, pad_time: float) -> bool:
        if picker.must_not_measure(question(key)):
            return False
        padded = bool(compare(key, ori_time, pad_time))
        timed = _timed(Candidate(PADDED), pad_time), _timed(Candidate(UNPADDED), ori_time)
        picker.keep(question(key), timed, timed[0] if padded else timed[1], question(key).identity)
        return padded

    def counting() -> Any:
        if picker.locked:
            return lambda function: UNMEASURED
        bench = timer()

        def timed(function: Any) -> Any:
            picker.measurements += 1
            return bench(function)

        return timed

    return [
        (pad_mm, "get_cached_should_pad", known),
        (pad_mm, "is_padded_faster", compared),
        (pad_mm, "get_do_bench", counting),
    ]


# -- Triton kernels ---------------------------------------------------------------------------------------------------


def _kernels(picker: Picker) -> list[Patch]:
    """The configuration of each Triton kernel: block sizes, warps, stages.

    A pinned one is found in a file that `_place_kernel_pins` wrote, since the kernels are compiled in processes of
    Inductor's own; one that another unit has measured, in a file that is written right before the kernel is compiled.
    """
    autotuner = _inductor("runtime.triton_heuristics").CachingAutotuner
    compiler = _inductor("async_compile").AsyncCompile
    bench, save, add_smaller = autotuner.bench, autotuner.save_gpu_kernel, autotuner._dynamic_scale_rblock
    compile = compiler.triton
    times: dict[int, list[Candidate]] = {}
    owners: list[Any] = []  # keeps the ids from being used again
    placed: dict[str, Pick] = {}

    def compiled(self: Any, kernel_name: str, source_code: str, *args: Any, **kwargs: Any) -> Any:
        if not picker.shares:
            return compile(self, kernel_name, source_code, *args, **kwargs)
        source, _ = _inductor("codecache").PyCodeCache.write(source_code)
        picker.about_to_compile(source)
        known = picker.find_shared(_kernel_form(source))
        if known and not any(pin.inputs == known.inputs for pin in picker.pins if pin.kind == "kernel"):
            placed[source] = known
            _place_kernel(known)
        return compile(self, kernel_name, source_code, *args, **kwargs)

    def benched(self: Any, launcher: Any, *args: Any, **kwargs: Any) -> float:
        if picker.locked:
            picker.must_not_measure(_kernel(self))
            return UNMEASURED
        picker.measurements += 1
        ms = float(bench(self, launcher, *args, **kwargs))
        owners.append(self)
        times.setdefault(id(self), []).append(_timed(_configuration(launcher.config), ms))
        return ms

    def saved(self: Any, stream: Any, launcher: Any) -> Any:
        question, taken = _kernel(self), _configuration(launcher.config)
        measured = times.get(id(self))
        source = Path(self.filename or "").stem
        if question.subject.startswith("Placeholder"):
            return save(self, stream, launcher)  # a candidate of a race, which is not part of the unit
        picker.has_compiled(source)
        if measured is None and (pin := picker.pin_for(question)) and pin.winner.same_code(taken):
            picker.take(pin)
        elif measured is None and (known := placed.get(source)) and known.winner.same_code(taken):
            picker.take_shared(known)
        else:
            fastest: dict[str, Candidate] = {}
            for candidate in sorted(measured or [taken], key=lambda c: c.ms if c.ms is not None else math.inf):
                fastest.setdefault(str(candidate.config), candidate)
            fastest.setdefault(str(taken.config), taken)
            picker.keep(question, tuple(fastest.values()), taken, _kernel_form(source) if measured and source else None)
        return save(self, stream, launcher)

    def smaller_added(self: Any) -> None:
        """What was found before is final. torch 2.11 would tune it again: it adds a smaller block to a reduction's, and
        Triton's configurations lose the mark that they are tuned on their way from the process that compiles them."""
        if (self.autotune_cache_info or {}).get("autotune_cache_state") == "hit":
            for result in self.compile_results:
                result.config.found_by_coordesc = True
        else:
            add_smaller(self)

    return [
        (autotuner, "bench", benched),
        (autotuner, "save_gpu_kernel", saved),
        (autotuner, "_dynamic_scale_rblock", smaller_added),
        (compiler, "triton", compiled),
    ]


def _kernel_form(source: str) -> Any:
    """Inductor calls a kernel's file by the hash of its text, in which the sizes and the GPU stand too."""
    return ["kernel", source]


_BEST_CONFIG = ("num_warps", "num_stages", "num_consumer_groups", "num_buffers_warp_spec")


def _configuration(config: Any) -> Candidate:
    extra = {name: getattr(config, name) for name in _BEST_CONFIG if getattr(config, name, 0)}
    return Candidate("triton", {**{str(k): _plain(v) for k, v in sorted(config.kwargs.items())}, **extra})


def _plain(value: Any) -> Scalar:
    return value if isinstance(value, int | float | str | None) else str(value)


def _kernel(autotuner: Any) -> Pick:
    """A kernel by its name and its source; and where Inductor's autotune cache keeps what was found for it."""
    heuristic = getattr(autotuner.heuristic_type, "name", str(autotuner.heuristic_type)).lower()
    detail: dict[str, Scalar] = {"heuristic": heuristic}
    cache = getattr(autotuner.save_cache_hook, "__self__", None)
    if cache is not None and getattr(cache, "local_cache", None):
        file = Path(cache.local_cache[1])
        detail["file"] = f"{file.parent.name}/{file.name}"
        detail["configs_hash"] = cache.configs_hash
    name = str(autotuner.inductor_meta.get("kernel_name", autotuner.fn.__name__))
    source = Path(autotuner.filename or "").stem
    return Pick(
        kind="kernel", subject=name, candidates=(), inputs=(f"source {source}",) if source else (), detail=detail
    )


def _place_kernel_pins(picker: Picker) -> None:
    for pin in picker.pins:
        if pin.kind == "kernel":
            _place_kernel(pin)


def _place_kernel(pin: Pick) -> None:
    """Write a configuration where Inductor looks for what an earlier build found."""
    from torch._inductor.runtime.triton_compat import HAS_WARP_SPEC

    file = str(pin.detail.get("file", ""))
    if not re.fullmatch(r"\w+/\w+\.best_config", file):
        return
    unsaid = dict.fromkeys(_BEST_CONFIG[2:], 0) if HAS_WARP_SPEC else {}
    found = {
        **unsaid,
        **pin.winner.config,
        "configs_hash": pin.detail.get("configs_hash"),
        "found_by_coordesc": True,
        "time_taken_ms": 0,
        "triton_cache_hash": None,
    }
    path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
