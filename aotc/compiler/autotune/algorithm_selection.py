"""Choose the candidate that computes an operator, a library call or a template, by a race."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from aotc.compiler.autotune.attention import WORTH_COMPILING
from aotc.compiler.autotune.picker import UNMEASURED, Hook, Picker, with_time
from aotc.compiler.patches.shared.convolutions import is_depthwise, is_of_any_size
from aotc.compiler.patches.shared.inductor import inductor
from aotc.compiler.toolchain.triton_compilers import wait_for_triton_compilers
from aotc.digest import sha256_json
from aotc.picks import Candidate, Identity, Pick
from aotc.records import Scalar


def operator_hooks(picker: Picker) -> list[Hook]:
    """Hooks for the choice of an operator's candidate: the race in `do_autotuning`, and the compilation before it."""
    selector = inductor("select_algorithm").AlgorithmSelectorCache
    call, precompile, tune, benchmark = (
        getattr(selector, name) for name in ("__call__", "make_precompile_fn", "do_autotuning", "benchmark")
    )
    asked: list[Pick] = []
    started: set[Identity] = set()

    def called(self: Any, name: str, choices: Any, input_nodes: Any, layout: Any, *args: Any, **kwargs: Any) -> Any:
        if len(choices) == 1:
            return call(self, name, choices, input_nodes, layout, *args, **kwargs)
        question = _operator(name, choices, input_nodes, layout)
        asked.append(question)
        try:
            with picker.asking(question):
                return call(self, name, choices, input_nodes, layout, *args, **kwargs)
        finally:
            asked.pop()

    def precompiled(self: Any, choices: Any, *args: Any, **kwargs: Any) -> Any:
        here = [candidate for candidate, _ in candidates_of(choices)]
        if picker.locked or (
            asked and (picker.pin_for(asked[-1], here) or picker.find_shared(_operator_form(asked[-1], choices)))
        ):
            return lambda *args, **kwargs: {}
        if asked and asked[-1].identity in started:
            # An equal question is compiling already. Compile on demand: its answer may be reused (`answered`).
            return lambda *called_with, **named: precompile(self, choices, *args, **kwargs)(*called_with, **named)
        started.update(question.identity for question in asked[-1:])
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            wait_for_triton_compilers()
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
        question = _operator(name, choices, inputs, layout)
        candidates = candidates_of(choices)
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
            picker.failed_candidates += failed_among(choices, times or {})
            if not times:
                return times
            winner = _winner(inputs, times)
            _keep_operator(picker, question, candidates, times, winner, form)
            return _won_by(winner, times)

    def counted(*args: Any, **kwargs: Any) -> Any:
        picker.measurements += 1
        return benchmark(*args, **kwargs)

    return [
        (selector, "__call__", called),
        (selector, "make_precompile_fn", precompiled),
        (selector, "do_autotuning", tuned),
        (selector, "benchmark", counted),
    ]


def failed_among(choices: Sequence[Any], times: Mapping[Any, float]) -> int:
    """The number of candidates that failed to compile or run: Inductor drops them, and logs the reasons."""
    return sum(choice.failed or not math.isfinite(times.get(choice, 0.0)) for choice in choices)


def _operator(name: str, choices: Sequence[Any], input_nodes: Sequence[Any], layout: Any) -> Pick:
    from torch._inductor.virtualized import V

    hints = V.graph.sizevars.optimization_hints
    output = _tensor(str(layout.dtype), hints(layout.size), hints(layout.stride), 0)
    inputs, arguments = tuple(map(_input, input_nodes)), _arguments(choices)
    if any(_is_compiled_at_run_time(choice, input_nodes) for choice in choices) and is_of_any_size(input_nodes):
        arguments = (*arguments, "of any size")  # the rule for the winner differs
    return Pick(kind="operator", subject=name, candidates=(), inputs=inputs, output=output, arguments=arguments)


def _arguments(choices: Sequence[Any]) -> tuple[str, ...]:
    """The parts of a question beside its tensors: a convolution's padding, oneDNN's post-operations, …

    A library call has them as arguments. Without a library call, as for attention, the templates' code stands for them.
    """
    library_call = inductor("select_algorithm").ExternKernelCaller
    calls = [choice.kwargs for choice in choices if isinstance(choice, library_call)]
    if not calls:
        return (f"code {sha256_json(sorted(choice.hash_key() for choice in choices))}",)
    return tuple(sorted({f"{name}={_argument(value)}" for kwargs in calls for name, value in kwargs.items()}))


def _argument(value: Any) -> str:
    """An argument as text; for a symbolic size, its value at the sizes of autotuning."""
    from torch._inductor.virtualized import V

    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return str(V.graph.sizevars.optimization_hints([value])[0] if hasattr(value, "free_symbols") else value)


def _operator_form(question: Pick, choices: Sequence[Any]) -> Any:
    """Everything that the times depend on: the question, the hash of each candidate's code, the matmul precision."""
    return [question.identity, [choice.hash_key() for choice in choices], torch.get_float32_matmul_precision()]


def _input(node: Any) -> str:
    _, dtype, *numbers, offset = inductor("select_algorithm").AlgorithmSelectorCache.key_of(node)
    half = len(numbers) // 2
    return _tensor(dtype, numbers[:half], numbers[half:], offset)


def _tensor(dtype: str, size: Sequence[int], stride: Sequence[int], offset: int) -> str:
    at = f" offset {offset}" if offset else ""
    return f"{dtype.removeprefix('torch.')}{list(map(int, size))} stride {list(map(int, stride))}{at}"


def candidates_of(choices: Sequence[Any]) -> list[tuple[Candidate, Any]]:
    """The choices with names that are the same in every process; equal ones are numbered."""
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


def _winner(inputs: Sequence[Any], times: dict[Any, float]) -> Any:
    """The fastest; but a depthwise convolution of cuDNN wins only for fixed sizes, and if it saves enough."""
    compiled = {choice for choice in times if _is_compiled_at_run_time(choice, inputs)}
    fastest = min(times, key=times.__getitem__)
    others = {choice: ms for choice, ms in times.items() if choice not in compiled and math.isfinite(ms)}
    if fastest not in compiled or not others:
        return fastest
    next_one = min(others, key=others.__getitem__)
    worth_it = not is_of_any_size(inputs) and times[fastest] < WORTH_COMPILING * others[next_one]
    return fastest if worth_it else next_one


def _is_compiled_at_run_time(choice: Any, inputs: Sequence[Any]) -> bool:
    library_call = inductor("select_algorithm").ExternKernelCaller
    depthwise = isinstance(choice, library_call) and is_depthwise(inputs, choice.kwargs.get("groups", 1))
    return depthwise and inputs[0].get_layout().device.type == "cuda"


def _won_by(winner: Any, times: dict[Any, float]) -> dict[Any, float]:
    """The times, changed so that the winner is first and has the least: Inductor takes the first of the fastest. A
    faster candidate was not worth its run-time compilation, or is not the pinned one."""
    others = {choice: max(ms, times[winner]) for choice, ms in times.items() if choice is not winner}
    return {winner: times[winner], **others}


def _times(pick: Pick, candidates: Sequence[tuple[Candidate, Any]]) -> dict[Any, float]:
    """The recorded times of the candidates that exist here, changed so that the pick's winner wins."""
    measured = [pick.winner, *(candidate for candidate in pick.candidates if candidate.ms is not None)]
    found = [(timed, choice) for timed in measured for candidate, choice in candidates if candidate.same_code(timed)]
    return _won_by(found[0][1], {choice: timed.ms or 0.0 for timed, choice in found})


def _keep_operator(
    picker: Picker, question: Pick, candidates: Sequence[tuple[Candidate, Any]], times: Any, winner: Any, form: Any
) -> None:
    """Record a race as Inductor decides it: of candidates with equal times, which are common, the first timed wins."""
    timed = [(with_time(candidate, times.get(choice, math.inf)), choice) for candidate, choice in candidates]
    if any(candidate.ms is not None for candidate, _ in timed):
        taken = next(candidate for candidate, choice in timed if choice is winner)
        picker.keep(question, [candidate for candidate, _ in timed], taken, form)
