"""With `train=True`, a module has two memories: of calls in training mode, and of the others."""

from __future__ import annotations

import time
from types import MethodType
from typing import Any

from torch import nn

from aotc.tools.remembering.call_counts import CallCounts, summed
from aotc.tools.remembering.compile_context import CompileContext
from aotc.tools.remembering.compile_options import Options
from aotc.tools.remembering.compile_state import CompileState
from aotc.tools.remembering.remembering import Remembering


def remembering_of(module: nn.Module, method: MethodType | None, options: Options) -> Remembering | ByMode:
    """The calls of a module, or of its method, as the options ask."""
    evaluating = Remembering(module, method, options._replace(train=False))
    if not options.train:
        return evaluating
    training = Remembering(module, method, options)
    evaluating.context.by_calls = training.context.by_calls  # what calls change, they change for both
    evaluating.context.makers = training.context.makers
    return ByMode(training, evaluating)


def remembering_like(of: Remembering | ByMode, module: nn.Module, method: MethodType | None) -> Remembering | ByMode:
    """The calls of a copy of a module, or of its method: the same code runs them, as long as both are alike."""
    context = of.context
    made = remembering_of(module, method, context.options._replace(retry=False))
    made.context.by_calls.update(context.by_calls)  # what calls have changed in the copied module, too
    return made


class ByMode:
    """With `train=True`: calls in training mode, and the others, which other code runs."""

    def __init__(self, training: Remembering, evaluating: Remembering) -> None:
        self.module, self.training, self.evaluating = training.module, training, evaluating

    @property
    def context(self) -> CompileContext:
        """Of calls in training mode; what calls change is that of both."""
        return self.training.context

    @property
    def of_mode(self) -> Remembering:
        return self.training if self.module.training else self.evaluating

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.of_mode(*args, **kwargs)

    def state(self) -> CompileState:
        return self.of_mode.state()._replace(calls=self.stats())

    def stats(self) -> CallCounts:
        """Of both modes."""
        return summed(each.stats() for each in (self.training, self.evaluating))

    def wait(self, timeout: float | None = None) -> bool:
        """Of both modes, as far as calls in them were seen."""
        ends = None if timeout is None else time.monotonic() + timeout
        is_built = True
        for each in (self.training, self.evaluating):
            if each is self.of_mode or each.state().forms:
                left = None if ends is None else max(0.0, ends - time.monotonic())
                is_built = each.wait(left) and is_built
        return is_built
