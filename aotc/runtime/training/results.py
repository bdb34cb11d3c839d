"""Several results of one call, each with a node of its own in autograd's graph, as in eager.

So a hook on a result runs only where a gradient comes to it. And the gradient of a result on which others depend can be
asked for, as Grad-CAM does of hidden states: by `retain_grad()`, a hook, or `torch.autograd.grad`.

One run of the backward takes the gradients of all results, and most passes have one run. Where gradients of results are
asked for, each node runs it with its own gradient alone, and passes on what comes of that for the results before it. To
such a result comes the sum, perhaps changed by a hook; what of it the runs before have not seen is run next.

A result that is cropped is cropped within its node: what comes to it is the gradient of its real part. That of its pad
is 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from aotc.call_table.dispatch import Crop
from aotc.records import Total
from aotc.runtime.padding.cut_views import without_gaps
from aotc.runtime.padding.padded_tensors import apply_crops, cut

_current_pass: Callable[[], int] = torch._C._current_graph_task_id
_is_asked_for: Callable[[Any], bool] = torch._C._will_engine_execute_node

_probe = torch.empty(0, requires_grad=True)
"""A leaf that no pass asks for: where autograd executes its node all the same, gradients of all leaves are wanted."""

RunBackward = Callable[[list[Tensor | None]], list[Tensor]]
"""From gradients of the results to the backward's outputs; the saved tensors are kept."""


class Pass:
    """The state that the nodes of one call share while autograd goes through them."""

    def __init__(self, totals: Mapping[int, Total], count: int) -> None:
        self._totals, self._count = totals, count
        self._watched: list[tuple[weakref.ref[Tensor], Mapping[int, Any]]] = []
        self._number = -1
        self._step_by_step = False
        self._passed_on: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By result the sum that was passed on, the last part of it as autograd has it, and that part's version."""
        self._only_run: tuple[int, Tensor, list[Tensor]] | None = None
        self.crops: Sequence[Crop] = ()
        """Of the results."""
        self.unpacked: Sequence[Tensor] | None = None
        """The results of hooks on saved tensors in the running pass."""

    def forget_unpacked(self) -> None:
        self.unpacked = None

    def cut(self, result: int, tensor: Tensor) -> Tensor:
        """The real part of a result, or of its gradient: a view; the tensor itself if it is not cropped."""
        return cut(tensor, [crop for crop in self.crops if crop.output == result])

    def padded(self, result: int, gradient: Tensor, size: torch.Size) -> Tensor:
        """The gradient of all of a result."""
        if gradient.shape == size:
            return gradient
        full = gradient.new_zeros(size)
        self.cut(result, full).copy_(gradient)
        return full

    def watch(self, result: Tensor) -> None:
        hook: Any = result.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]
        hook.remove()
        hooks: Any = result._backward_hooks
        self._watched.append((weakref.ref(result), hooks))

    def is_step_by_step(self, probe: Any) -> bool:
        """Whether, in the pass that runs now, gradients of results may be asked for."""
        if (number := _current_pass()) != self._number:
            self._number, self._passed_on, self._only_run = number, {}, None
            results = [(result(), hooks) for result, hooks in self._watched]
            watched = any(hooks or (result is not None and result.retains_grad) for result, hooks in results)
            self._step_by_step = bool(self._totals) and (watched or not _is_asked_for(probe))
        return self._step_by_step

    def not_seen(self, result: int, gradient: Tensor) -> Tensor | None:
        """The part of a result's gradient that no run has taken yet; None where nothing was added or changed."""
        if result not in self._passed_on:
            return gradient
        whole, part, version = self._passed_on[result]
        if gradient.data_ptr() == part.data_ptr() and gradient._version == version:
            return None
        return gradient - whole

    def pass_on(
        self, result: int, gradient: Tensor, to: Sequence[int], run: RunBackward, *, is_needed: bool
    ) -> list[Tensor]:
        """The gradients of the results `to` by a result's gradient. `is_needed`: those of arguments are needed, too."""
        with torch.no_grad():
            outputs = run([gradient if index == result else None for index in range(self._count)])
            found = [self.cut(each, outputs[self._totals[each].output]) for each in to]
            given = [part.clone() for part in found]  # which a hook may write to
            for each, part, copy in zip(to, found, given, strict=True):
                whole = self._passed_on[each][0] + part if each in self._passed_on else part
                self._passed_on[each] = whole, copy, copy._version
        is_first = self._only_run is None
        self._only_run = (result, gradient, outputs if is_needed and is_first else [])
        return given

    def take_outputs(self, gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
        """The outputs for these gradients, if the only run of this pass had them."""
        ran, self._passed_on, self._only_run = self._only_run, {}, None
        if ran is None or not ran[2] or self._number != _current_pass():
            return None
        given = {index: each for index, each in enumerate(gradients) if each is not None}
        result, gradient, outputs = ran
        alone = given.keys() == {result} and given[result].data_ptr() == gradient.data_ptr()
        return outputs if alone else None


def separated(
    results: Sequence[Tensor], order: Sequence[int], totals: Mapping[int, Total], own: Pass, once_only: Any
) -> list[Tensor]:
    """The results, of which those in `order` are differentiable; each is there after those that it depends on."""
    found = list(results)
    apply_crops(found, [crop for crop in own.crops if crop.output not in order])
    with _unsafe_preserve_version_counter(tuple(found[index] for index in order)):
        for index in order:
            before = [each for each in totals if index in totals[each].of]
            inputs = found[index], _probe, *(found[each] for each in before)
            found[index] = _Result.apply(own, index, before, once_only, *inputs)  # type: ignore[no-untyped-call]
    for index in totals:
        own.watch(found[index])
    return found


class _Result(Function):
    """The same tensor, with a node between it and the call's. That node is connected to those of results on which it
    depends, too."""

    @staticmethod
    def forward(
        ctx: Any, own: Pass, index: int, before: list[int], once_only: Any, result: Tensor, *others: Tensor
    ) -> Tensor:
        ctx.own, ctx.index, ctx.before, ctx.once_only = own, index, before, once_only
        ctx.set_materialize_grads(False)
        ctx.size = result.shape
        if any(crop.output == index for crop in own.crops):
            return without_gaps(own.cut(index, result))
        ctx.mark_dirty(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        (step, _), (probe, _), *_ = ctx.next_functions
        parts: Sequence[Tensor | None] = [None] * len(ctx.before)
        if gradient is not None and ctx.own.is_step_by_step(probe):
            gradient = ctx.own.not_seen(ctx.index, gradient)
        if gradient is not None:
            gradient = ctx.own.padded(ctx.index, gradient, ctx.size)
            if ctx.before and ctx.own.is_step_by_step(probe):
                needed = _is_asked_for(step)
                parts = ctx.own.pass_on(ctx.index, gradient, ctx.before, step.code.runner(step), is_needed=needed)
                if torch.is_grad_enabled():
                    parts = ctx.once_only(step, parts, [gradient])
        return None, None, None, None, gradient, None, *parts
