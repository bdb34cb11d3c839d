"""Find models whose calls depend on values that change from call to call and are held by C objects: random numbers of
Python or NumPy, clocks, iterators, positions of files. A capture makes such a value a constant.

So the model is called again with equal inputs, its own Python objects and state as before the first call, and torch's
generator seeded: the same operators must run on the same numbers. What operators compute is not compared: compiled code
runs them in each call, random ones too, and a kernel may round otherwise.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from traceback import FrameSummary
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.analysis.build_only import generator_states
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.operator_trace import OperatorTrace
from aotc.compiler.explain_failure import lines_shown, stack_of
from aotc.errors import BuildError
from aotc.models.calls import call_model
from aotc.reads.tensors import named_state, plain_state
from aotc.records import Signature
from aotc.tensors.contents import contents
from aotc.tensors.layouts import has_memory
from aotc.tensors.rounding import uncompiled

_log = logging.getLogger("aotc")

REPEATS_OF_RANDOM = 15
"""Calls after the first one of a model that draws from Python's or NumPy's generator, perhaps for a rare branch."""


def check_repeated_calls(
    module: nn.Module, signature: Signature, written: Collection[str], kept: KeptObjects, leaves: Sequence[Any]
) -> None:
    """Raises BuildError where a repeated call runs other operators, or the same ones on other numbers that do not come
    from the inputs, the module's state or an operator.

    Nothing is said of a model that fails when it is called so. Afterwards the state called `written` and the objects of
    `kept` are restored.
    """
    state = {**named_state(module), **plain_state(module)}
    drawn: list[str] = []

    def traced(before: Sequence[_Step] = ()) -> _Repeat:
        traces: list[_Repeat] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            traces.append(trace := _Repeat(pytree.tree_leaves((args, kwargs)), state, before))
            with uncompiled(), trace:
                result = module(*args, **kwargs)
            trace.returns(result)
            return result

        kept.put_back()
        call_model(module, signature, written, leaves, call=call)
        return traces[0]

    def difference() -> _Difference | None:
        generators = generator_states()
        one = traced()
        drawn[:] = [name for name, now in generator_states().items() if now != generators.get(name, now)]
        for repeat in range(REPEATS_OF_RANDOM if drawn else 1):
            other = traced(one.steps)
            if other.difference and not repeat:  # perhaps of a cache that the first call has filled
                one, other = other, traced(other.steps)
            if other.difference:
                return other.difference
        return None

    try:
        found = difference()
    except Exception:  # whatever the model raises, or operators that take no dispatch mode
        _log.info("the model was not called again", exc_info=True)
        return
    finally:
        kept.put_back()
    if found:
        raise _changes(found, found.line or _begin_of(module.forward), drawn)


_Step = Sequence[str]
"""An operator and its arguments, as text; or of its results what a model reads without an operator."""

_RESULT, _RETURNED = "result", "returned"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, torch.dtype)


class _Difference(NamedTuple):
    """The first step that differs from the call before, with the model's line; "" of what forward returns."""

    before: _Step
    now: _Step
    line: str


class _Repeat(OperatorTrace):  # type: ignore[no-untyped-call]
    """Records a call, and compares it with the steps of the call before, if any are given."""

    supports_higher_order_operators = True

    def __init__(self, leaves: Iterable[Any], state: Mapping[str, Tensor], before: Sequence[_Step]) -> None:
        super().__init__(leaves, state)
        self._before, self._is_equal = before, bool(before)
        self.difference: _Difference | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._compare()
        self.steps.append([_RESULT, *(_read_of(value) for value in pytree.tree_leaves(result))])
        self._compare()
        return result

    def returns(self, result: Any) -> None:
        self.steps.append([_RETURNED, *(self._text(part) for part in contents(result).values())])
        self._compare()

    def _compare(self) -> None:
        place = len(self.steps) - 1
        now, before = self.steps[place], self._before[place] if place < len(self._before) else [_RETURNED]
        if self._is_equal and now != before:
            self._is_equal = False  # what follows differs by this
            if now[0] != _RESULT:
                line = "" if now[0] == _RETURNED else lines_shown(stack_of(sys._getframe(1)))
                self.difference = _Difference(before, now, line)

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            known = self._name_of(value) is not None or has_memory(value)
            return super()._text(value) if known else f"{type(value).__name__} {list(value.shape)}"
        return super()._text(value) if isinstance(value, _PLAIN) else type(value).__name__


def _read_of(result: Any) -> str:
    return str(list(result.shape)) if isinstance(result, Tensor) else repr(result) if isinstance(result, _PLAIN) else ""


def _begin_of(forward: Any) -> str:
    """The first line of a function; "" where it has no code in Python."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return lines_shown([FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)]) if code else ""


def _changes(found: _Difference, source: str, drawn: Sequence[str]) -> BuildError:
    draws = f" (it draws from {' and '.join(drawn)})" if drawn else ""
    return BuildError(
        "forward reads what changes from call to call outside of its inputs and of the module's attributes"
        f"{draws}, and compiled code would keep the value of the build: with equal inputs, {_told(found)}",
        hint="draw random numbers by torch, as `torch.rand(())`, which compiled code does in each call; let forward "
        "take a time, a counter, or what an iterator or a file gives as an input; or count in a buffer, to which "
        "forward writes: `self.calls += 1`",
        stage="export",
        source=source,
    )


def _told(found: _Difference) -> str:
    (before, *were), (now, *are) = found.before, found.now
    if before != now or len(were) != len(are):
        ran = "returned" if before == _RETURNED else f"ran `{before}`"
        return f"it {'returns' if now == _RETURNED else f'runs `{now}`'} where it {ran} in the call before"
    one, other = next(pair for pair in zip(were, are, strict=True) if pair[0] != pair[1])
    what = "it returns" if now == _RETURNED else f"`{now}` gets"
    if one.startswith("constant ") and other.startswith("constant "):
        return "a tensor that forward makes of Python's or NumPy's numbers holds others in each call"
    if any(text.startswith(_TENSORS) for text in (one, other)):
        return f"{what} another tensor in each call"
    numbers = [text.partition(" ")[2] for text in (one, other)]
    return f"{what} {numbers[0]:.60} in one call and {numbers[1]:.60} in the next"


_TENSORS = ("constant ", "result ", "state ", "leaf ")
