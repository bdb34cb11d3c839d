"""What forward reads behind objects of C, and what changes from call to call, is refused with its line; random numbers
of torch, which compiled code draws in each call, are not. Nothing is compiled."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import itertools
import linecache
import os
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aotc.compiler.capture.checks.graph_run import check_traced
from aotc.compiler.capture.checks.hidden_state import check_second_call
from aotc.compiler.capture.checks.repeated_calls import check_repeated_calls
from aotc.compiler.capture.export import capture
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.manifest.types import ModelSpec
from aotc.models.signature import make_signature

DEPTH = contextvars.ContextVar("DEPTH", default=0)
TURNS = collections.deque([1.0, 2.0, 3.0])
CALLS = 0


class Reads(nn.Module):
    """A function of itself and its input, with state of each kind at hand."""

    def __init__(self, function: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)
        self.numbers, self.signs, self.once = itertools.count(), itertools.cycle([1.0, -1.0]), iter([5.0])
        self.lines = (float(number) for number in range(100))
        self.own, self.of_numpy = random.Random(0), np.random.default_rng(0)
        self.counter, self.table = ctypes.c_int(0), np.zeros(4, np.float32)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.file.write(bytes(range(100)))
        self.file.seek(0)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def drawn(self: Any, x: Tensor) -> Tensor:
    return x * random.random()  # read


def drawn_from_its_own(self: Any, x: Tensor) -> Tensor:
    return x * self.own.random()  # read


def drawn_by_numpy(self: Any, x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.rand(4)).float()  # read


def drawn_from_a_generator_of_numpy(self: Any, x: Tensor) -> Tensor:
    return x * self.of_numpy.standard_normal()  # read


def drawn_for_a_rare_branch(self: Any, x: Tensor) -> Tensor:
    return x + 1 if random.random() < 0.3 else x * 2  # read


def drawn_by_the_machine(self: Any, x: Tensor) -> Tensor:
    return x * int.from_bytes(os.urandom(8), "little")  # read


def counted(self: Any, x: Tensor) -> Tensor:
    return x + next(self.numbers)  # read


def in_turns(self: Any, x: Tensor) -> Tensor:
    return x + next(self.signs)  # read


def of_a_python_generator(self: Any, x: Tensor) -> Tensor:
    return x + next(self.lines)  # read


def branching(self: Any, x: Tensor) -> Tensor:
    return x.sin() if next(self.numbers) % 2 else x.cos()  # read


def of_other_sizes(self: Any, x: Tensor) -> Tensor:
    return x.repeat(next(self.numbers) % 3 + 1, 1)  # read


def used_later(self: Any, x: Tensor) -> Tensor:
    number = next(self.numbers)
    return x * number  # read


def timed(self: Any, x: Tensor) -> Tensor:
    return x * time.perf_counter()  # read


def of_a_context(self: Any, x: Tensor) -> Tensor:
    DEPTH.set(DEPTH.get() + 1)
    return x * DEPTH.get()  # read


def of_a_number_of_c(self: Any, x: Tensor) -> Tensor:
    self.counter.value += 1
    return x * self.counter.value  # read


def of_a_file(self: Any, x: Tensor) -> Tensor:
    return x * self.file.read(1)[0]  # read


def of_a_global_deque(self: Any, x: Tensor) -> Tensor:
    TURNS.rotate()
    return x * TURNS[0]  # read


def of_a_global_number(self: Any, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS  # read


def of_an_array(self: Any, x: Tensor) -> Tensor:
    self.table += 1
    return x + torch.from_numpy(self.table)  # read


def of_a_new_tensor(self: Any, x: Tensor) -> Tensor:
    return x + torch.tensor([random.random()])  # read


READING = [
    (drawn, "`aten.mul.Tensor` gets 0."),
    (drawn_from_its_own, "`aten.mul.Tensor` gets 0."),
    (drawn_by_numpy, "a tensor that forward makes of Python's or NumPy's numbers holds others in each call"),
    (drawn_from_a_generator_of_numpy, "`aten.mul.Tensor` gets "),
    (drawn_for_a_rare_branch, "in the call before"),
    (drawn_by_the_machine, "`aten.mul.Tensor` gets "),
    (counted, "`aten.add.Tensor` gets 2 in one call and 3 in the next"),
    (in_turns, "`aten.add.Tensor` gets 1.0 in one call and -1.0 in the next"),
    (of_a_python_generator, "`aten.add.Tensor` gets 2.0 in one call and 3.0 in the next"),
    (branching, "it runs `aten.sin.default` where it ran `aten.cos.default` in the call before"),
    (of_other_sizes, "`aten.repeat.default` gets "),
    (used_later, "`aten.mul.Tensor` gets 2 in one call and 3 in the next"),
    (timed, "`aten.mul.Tensor` gets "),
    (of_a_context, "`aten.mul.Tensor` gets "),
    (of_a_number_of_c, "`aten.mul.Tensor` gets 3 in one call and 4 in the next"),
    (of_a_file, "`aten.mul.Tensor` gets 2 in one call and 3 in the next"),
    (of_a_global_deque, "`aten.mul.Tensor` gets "),
    (of_a_global_number, "`aten.mul.Tensor` gets "),
    (of_an_array, "holds others in each call"),
    (of_a_new_tensor, "holds others in each call"),
]


def checked(function: Callable[[Any, Tensor], Any], before: int = 1) -> Reads:
    """As a build does, whose capture calls the model once `before`. The numbers that are told are those of the second
    and the third of the check's own calls: the first one may fill a cache."""
    random.seed(0)
    module = Reads(function).eval()
    signature = make_signature(
        ModelSpec(name="m", factory="a:b", inputs={"x": {"shape": [2, 4]}}, buckets=({},)), module
    )
    x, kept = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), KeptObjects(module)
    with torch.no_grad():
        for _ in range(before):
            module(x)
        module.calls.zero_()
        check_repeated_calls(module, signature, ["calls"], kept, [x])
    return module


@pytest.mark.parametrize(("function", "said"), READING, ids=[function.__name__ for function, _ in READING])
def test_what_changes_from_call_to_call_is_named_with_its_line(
    function: Callable[[Any, Tensor], Tensor], said: str
) -> None:
    with pytest.raises(BuildError) as caught:
        checked(function)
    assert said in caught.value.message and "torch.rand(())" in caught.value.hint
    file, _, line = caught.value.fields["source"].partition(" in ")[0].partition(":")
    assert file == "test_repeated_calls.py"
    assert linecache.getline(__file__, int(line)).endswith("# read\n")


@pytest.mark.parametrize(
    ("function", "name"), [(drawn, "Python's `random`"), (drawn_by_numpy, "`numpy.random`"), (counted, "")]
)
def test_the_generator_that_was_drawn_from_is_named(function: Callable[[Any, Tensor], Tensor], name: str) -> None:
    with pytest.raises(BuildError) as caught:
        checked(function)
    assert (f"(it draws from {name})" in caught.value.message) is bool(name)
    assert ("it draws from" in caught.value.message) is bool(name)


def returned(self: Any, x: Tensor) -> Any:
    return x, {"number": next(self.numbers)}


def test_a_number_that_is_returned_is_named_with_the_begin_of_forward() -> None:
    with pytest.raises(BuildError, match="it returns 2 in one call and 3 in the next") as caught:
        checked(returned)
    assert caught.value.fields["source"].endswith("in forward: def forward(self, x: Tensor) -> Any:")


def test_an_iterator_that_has_ended_is_found_by_the_trace() -> None:
    """Each call after the capture is equal."""
    module = Reads(lambda self, x: x * next(self.once, 7.0)).eval()
    signature = make_signature(
        ModelSpec(name="m", factory="a:b", inputs={"x": {"shape": [2, 4]}}, buckets=({},)), module
    )
    x, kept = torch.randn(2, 4, generator=torch.Generator().manual_seed(0)), KeptObjects(module)
    with torch.no_grad():
        captured = capture(module, signature, [x], None, frozen=False)
        check_repeated_calls(module, signature, captured.mutated_state, kept, [x])
        result = check_second_call(module, signature, captured.mutated_state, kept, [x], [x])
        with pytest.raises(BuildError, match="output 0 differs from eager"):
            check_traced(module, signature, captured, kept, [x], result, {})


def random_operators(self: Any, x: Tensor) -> Tensor:
    y = F.dropout(x, 0.5, True) + torch.randn(4) + torch.rand_like(x) + torch.bernoulli(x.sigmoid())
    return y[torch.randperm(2)] * torch.randint(1, 3, (4,))


def random_number(self: Any, x: Tensor) -> Tensor:
    return x * torch.rand(())


def random_number_as_pythons(self: Any, x: Tensor) -> Tensor:
    return x * torch.rand(()).item()


def counted_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.calls


def drawn_and_not_used(self: Any, x: Tensor) -> Tensor:
    """As layer drop in evaluation."""
    return x + 1 if self.training and random.uniform(0, 1) < 0.1 else x


def timed_and_not_used(self: Any, x: Tensor) -> Tensor:
    self.seconds = time.perf_counter()
    return x + 1


def with_memory_that_is_not_set(self: Any, x: Tensor) -> Tensor:
    return x + torch.empty(2, 4).fill_(1)


@functools.cache
def positions(count: int) -> Tensor:
    return torch.arange(count)


def cached_by_the_first_call(self: Any, x: Tensor) -> Tensor:
    positions.cache_clear() if next(self.numbers) == 0 else None
    return x + positions(4)


def conditional(self: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


@pytest.mark.parametrize(
    "function",
    [
        *(random_operators, random_number, random_number_as_pythons, counted_in_a_buffer, drawn_and_not_used),
        *(timed_and_not_used, with_memory_that_is_not_set, conditional),
    ],
)
def test_random_numbers_of_torch_and_what_changes_no_operator_are_accepted(
    function: Callable[[Any, Tensor], Tensor],
) -> None:
    module = checked(function)
    assert module.calls == 0 and not hasattr(module, "seconds")  # as before the first call


def test_a_cache_that_the_first_call_fills_is_no_state() -> None:
    """The first of the check's calls is the first of all."""
    checked(cached_by_the_first_call, before=0)


def test_a_model_that_fails_when_it_is_called_is_left_to_other_checks() -> None:
    def fails(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError(str(next(self.numbers)))

    with suppress(RuntimeError):
        checked(fails, before=0)


class Noisy(torch.utils._python_dispatch.TorchDispatchMode):
    """Adds random numbers of Python's to the results of `sin`, as a kernel that rounds otherwise."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result + next(NOISE) * 1e-3 if func is torch.ops.aten.sin.default else result


NOISE = itertools.count()


@pytest.mark.parametrize("read", [lambda x: x, lambda x: x * x.sum().item(), lambda x: x[: (x > 0).nonzero().shape[0]]])
def test_an_operator_that_computes_otherwise_is_no_state(read: Callable[[Tensor], Tensor]) -> None:
    """Nor is what forward reads of its result."""
    with Noisy():
        checked(lambda self, x: read(x.sin()))
