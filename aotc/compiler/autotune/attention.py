"""Choose which of torch's attention backends a model calls, by a race.

torch decides while it traces, by a rule: cuDNN on Hopper, however small the attention is. cuDNN's kernels are compiled
by the driver in the process that runs them. On an H200 (torch 2.11, cuDNN 9) the first call takes 60 ms, or 600 on a
host that has never had that kernel; each further shape takes 38, or 400 where it needs another kernel; each further
thread takes 38. After that, cuDNN takes between half and all of FlashAttention's time. FlashAttention is precompiled in
torch, and its first call takes 4 ms.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, fx
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotc.compiler.autotune.benchmarks import milliseconds
from aotc.compiler.autotune.picker import Picker, with_time
from aotc.machine.benchmarking import device_alone
from aotc.picks import Candidate, Pick

_log = logging.getLogger("aotc")

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default

COMPILED_AT_RUN_TIME = "cudnn"
WORTH_COMPILING = 0.75
"""The most that a cuDNN kernel compiled at run time (attention, depthwise convolution) may take, as a part of the next
one's time. Saving less than a quarter of one operator is a small part of the model."""


class _Backend(NamedTuple):
    kind: SDPBackend
    is_enabled: Callable[[], bool]
    takes: Callable[[Any], bool]


_BACKENDS = {
    "flash": _Backend(SDPBackend.FLASH_ATTENTION, cuda.flash_sdp_enabled, cuda.can_use_flash_attention),
    "efficient": _Backend(
        SDPBackend.EFFICIENT_ATTENTION, cuda.mem_efficient_sdp_enabled, cuda.can_use_efficient_attention
    ),
    "cudnn": _Backend(SDPBackend.CUDNN_ATTENTION, cuda.cudnn_sdp_enabled, cuda.can_use_cudnn_attention),
    "math": _Backend(SDPBackend.MATH, cuda.math_sdp_enabled, lambda parameters: False),
}
"""In the order in which they are tried; `math`, composed of other operators, is last, and not raced."""


class _Call(NamedTuple):
    """An attention of the graph, with example tensors at the sizes of autotuning."""

    inputs: tuple[Tensor | None, ...]
    options: dict[str, Any]
    any_size: bool

    def fill(self) -> None:
        """Fill the tensors with random numbers, masks of integers or bools with ones."""
        for tensor in self.inputs:
            if tensor is not None:
                memory = tensor if tensor._base is None else tensor._base  # an expanded tensor cannot be written to
                memory.normal_() if memory.is_floating_point() else memory.fill_(1)

    def run(self) -> Tensor:
        query, key, value, mask = self.inputs
        return cast(Tensor, ATTENTION(query, key, value, mask, **self.options))

    @property
    def takers(self) -> list[str]:
        """The backends that support the call. For any size, without the one that compiles for each size at run time, if
        there is another."""
        options, form = self.options, cast(Any, cuda.SDPAParams)
        parameters = form(*self.inputs, options["dropout_p"], options["is_causal"], options["enable_gqa"])
        takers = [name for name, backend in _BACKENDS.items() if backend.takes(parameters)]
        others = [name for name in takers if name != COMPILED_AT_RUN_TIME]
        return others if self.any_size and others else takers

    @property
    def question(self) -> Pick:
        inputs = tuple(_described(tensor) for tensor in self.inputs if tensor is not None)
        arguments = tuple(f"{name}={value}" for name, value in sorted(self.options.items()))
        sizes = ("of any size",) if self.any_size else ()
        return Pick(
            kind="operator",
            subject="scaled_dot_product_attention",
            candidates=(),
            inputs=inputs,
            arguments=(*arguments, *sizes),
        )


@contextmanager
def attention_chosen(graph: fx.GraphModule, picker: Picker, *, race: bool) -> Iterator[None]:
    """While active, each attention of the graph is traced with the fastest backend, or the one that `picker` has
    pinned; without `race`, with torch's choice. For dynamic sizes it is a precompiled backend in either case. Backends
    that are switched off (`torch.backends.cuda.enable_flash_sdp`, …) do not take part."""

    def traced(node: fx.Node) -> Callable[..., Any] | None:
        call = _call_of(node)
        name = _decide(call, picker, race) if call is not None else None
        return _TRACED[name] if name else None

    with attentions_traced_as(graph, traced):
        yield


@contextmanager
def attentions_traced_as(
    graph: fx.GraphModule, traced: Callable[[fx.Node], Callable[..., Any] | None]
) -> Iterator[None]:
    """While active, each attention of the graph is traced as the function that `traced` gives for its node; None leaves
    it to torch."""
    parts = [part for part in graph.modules() if isinstance(part, fx.GraphModule)]
    nodes = [node for part in parts for node in part.graph.nodes if node.target is ATTENTION]
    try:
        for node in nodes:
            node.target = traced(node) or ATTENTION
        _recompile(parts)
        yield
    finally:
        for node in nodes:
            node.target = ATTENTION
        _recompile(parts)


def _recompile(parts: Sequence[fx.GraphModule]) -> None:
    for part in parts:
        part.recompile()


def _decide(call: _Call, picker: Picker, race: bool) -> str | None:
    """The name of the backend; None where torch decides, or where measuring is not allowed."""
    names = call.takers
    if len(names) < 2 or not race:
        return names[0] if names and call.any_size else None
    question, here = call.question, [Candidate(name) for name in names]
    if pin := picker.pin_for(question, here):
        picker.take(pin)
        return pin.winner.name
    if answer := picker.answered(question, here):
        picker.repeat(answer)
        return answer.winner.name
    if picker.must_not_measure(question):
        return None
    form = [question.identity, names]  # a model may switch some off
    with picker.asking(question):
        if known := picker.find_shared(form):
            picker.take_shared(known)
            return known.winner.name
        call.fill()
        times = {name: _time(name, call) for name in names}
        picker.measurements += len(times)
        winner = fastest(times)
        candidates = {name: with_time(Candidate(name), ms) for name, ms in times.items()}
        picker.keep(question, list(candidates.values()), candidates[winner], form)
        return winner


def fastest(times: dict[str, float]) -> str:
    """The fastest by milliseconds; the one that is compiled at run time must save enough (WORTH_COMPILING)."""
    return min(times, key=lambda name: times[name] / (WORTH_COMPILING if name == COMPILED_AT_RUN_TIME else 1.0))


def _time(name: str, call: _Call) -> float:
    """Milliseconds of a backend; infinite where it fails, or cannot be captured as a CUDA graph."""
    with torch.no_grad(), sdpa_kernel(_BACKENDS[name].kind), device_alone(f"cuda:{torch.cuda.current_device()}"):
        try:
            ms = milliseconds(call.run)
        except RuntimeError as error:
            _log.warning("the attention by %s is left out: %s", name, error)
            ms = None
    return math.inf if ms is None else ms


# -- the graph's calls ------------------------------------------------------------------------------------------------


def _traced_as(name: str) -> Callable[..., Any]:
    """An attention that prefers this backend; where it does not support the traced call, torch decides."""

    def attention(*args: Any, **kwargs: Any) -> Any:
        others = [other for other in _BACKENDS if other != name and _BACKENDS[other].is_enabled()]
        with sdpa_kernel([_BACKENDS[each].kind for each in (name, *others)], set_priority=True):
            return ATTENTION(*args, **kwargs)

    attention.__name__ = attention.__qualname__ = f"{name}_attention"
    return attention


_TRACED = {name: _traced_as(name) for name in _BACKENDS}


def _call_of(node: fx.Node) -> _Call | None:
    """The call of a node. None for one that is not autotuned: unknown sizes, or a query that is not on a GPU."""
    given = {parameter.name: parameter.default_value for parameter in ATTENTION._schema.arguments}
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    values = [_value(given.pop(name)) for name in ("query", "key", "value", "attn_mask")]
    if not isinstance(values[0], Tensor) or values[0].device.type != "cuda":
        return None
    sizes = [size for value in values if value is not None for size in (*value.shape, *value.stride())]
    options = {name: _number(value) for name, value in given.items()}
    try:
        inputs = tuple(None if value is None else _like(value) for value in values)
    except _UnknownSizeError:
        return None
    return _Call(inputs, options, any(isinstance(size, torch.SymInt) for size in sizes))


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _number(value: Any) -> Any:
    """The value itself; for one that depends on a symbolic size, its value at the sizes of autotuning."""
    value = _value(value)
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat) else value


class _UnknownSizeError(Exception):
    pass


def _like(value: Tensor) -> Tensor:
    """A tensor of the same shape, strides and dtype, without values. Raises _UnknownSizeError where a size is unknown
    or 0."""
    shape, strides = [_number(size) for size in value.shape], [_number(stride) for stride in value.stride()]
    if not all(isinstance(number, int) for number in (*shape, *strides)) or 0 in shape:
        raise _UnknownSizeError
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.empty(extent, dtype=value.dtype, device=value.device).as_strided(shape, strides)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} stride {list(tensor.stride())}"
