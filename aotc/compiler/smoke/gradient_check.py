"""The smoke run's comparison of gradients: compiled code against eager, and where they differ by more than 0.01 %,
against float64.

- With random cotangents of all results, then of each result alone: a loss is little beside logits.
- With larger values of inputs, and larger cotangents: code that saturates or clips.
- `first_difference` allows what rounding to 16 bits explains, without a third run: it finds a wrong axis, not an error
  of 1 %.
- So gradients that differ by more than `NEAR` are judged as `aotc verify` does, against the model in float64. A
  gradient counts as wrong only if it is wrong wherever the parameters are moved to (`_PLACES`), and where rounding
  eager's operators otherwise changes it by a quarter as much at most: near a bend (a `relu` at 0, a tie of a maximum)
  rounding decides.
- Of a model that draws random numbers, which compiled code draws otherwise: whether gradients are the slopes of its own
  results.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aotc.errors import LibraryError
from aotc.manifest.inputs import TensorInput, parse_inputs
from aotc.manifest.types import ModelSpec
from aotc.models.calls import Called, has_drawn
from aotc.models.float64_reference import forget_failed_traces, in_double, in_float64
from aotc.models.gradients import change_along, count_of_results, gradients_of, names_of_gradients
from aotc.models.tolerance import TF32, Judgement, judge_gradients, may_use_tf32
from aotc.records import Signature, Variant
from aotc.tensors.rounding import MULTIPLE, Allowed, Result, difference, first_difference, rounded_otherwise, said_of

WIDER, STEEPER = 8.0, 100.0
"""Inputs and gradients of results are so many times as large where code that saturates or clips shows."""

NEAR = 1e-4
"""Gradients that differ from eager's by less, relative to their size, are not judged against float64."""
_NEAR = Allowed(rms=NEAR, spread=0.0, largest=8 * NEAR, floor=4 * torch.finfo(torch.float32).eps, share=0.0)

MOST_NUMBERS = 2**29
"""A model of more numbers is not copied in float64, which takes 8 bytes of each."""

MOST_RESULTS = 8
"""So many results are differentiated by themselves at most."""

_PLACES = 3
"""So many times parameters are moved, where a gradient seems to be wrong."""


def inputs_of_any_value(spec: ModelSpec, signature: Signature) -> list[int]:
    """The inputs of random numbers for which the manifest says no `init`: the model takes any."""
    _, inputs = parse_inputs(spec.inputs)
    free = {each.path for each in inputs if isinstance(each, TensorInput) and each.init is None}
    return [index for index, leaf in enumerate(signature.leaves) if leaf.path in free]


def compare_at_extremes(
    called: Called, variant: Variant, compiled: Callable[..., Any], device: torch.device, wide: Collection[int]
) -> None:
    """As `compare_gradients`, with larger gradients of results, and on a CPU with larger values of the inputs `wide`:
    on a GPU an index that is computed from one and beyond its tensor would end the process. A model that fails there in
    eager is not compared."""

    def widened(index: int, leaf: Any) -> Any:
        is_wide = index in wide and device.type == "cpu" and isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf * WIDER if is_wide else leaf

    called = called._replace(leaves=[widened(index, leaf) for index, leaf in enumerate(called.leaves)])
    try:
        gradients_of(called, variant.with_gradients, scale=STEEPER)
    except Exception:
        traceback.print_exc()
        return
    compare_gradients(called, variant, compiled, device, STEEPER)


def compare_gradients(
    called: Called, variant: Variant, compiled: Callable[..., Any], device: torch.device, scale: float = 1.0
) -> None:
    """Raises LibraryError where the backward's gradients differ from the module's by more than rounding."""
    wanted = variant.with_gradients
    results = count_of_results(called, wanted)
    wide = functools.cache(lambda: _in_float64(called.module))
    for only in (None, *(range(min(results, MOST_RESULTS)) if results > 1 else ())):
        found = _wrong_one(_Run(called, wanted, compiled, device, scale, only), wide)
        if found is None:
            continue
        position, said = found
        name = names_of_gradients(called.module, called.signature, wanted)[position]
        raise LibraryError(
            f"the compiled code does not compute the gradients that the model has: {name} {said}",
            hint="torch's compiler miscompiles the backward of this model: find the operator by removing parts, and "
            "replace it by others, or train only regions of the model",
            miscompiled=True,
        )


class _Run(NamedTuple):
    """What is differentiated, and of which results: all of them, or the one at index `only`."""

    called: Called
    wanted: Collection[int]
    compiled: Callable[..., Any]
    device: torch.device
    scale: float
    only: int | None

    def eager(self, seed: int = 0) -> Result:
        return gradients_of(self.called, self.wanted, seed, None, self.scale, self.only)

    def given(self) -> list[Tensor | None]:
        return gradients_of(self.called, self.wanted, 0, self.compiled, self.scale, self.only)


def _wrong_one(run: _Run, wide: Callable[[], nn.Module | None]) -> tuple[int, str] | None:
    """The position of a wrong gradient, and what is wrong with it."""
    eager = run.eager()
    draws = has_drawn(run.device)
    given = run.given()
    position = first_difference(eager, given, run.eager)
    if position is not None:
        return position, said_of(eager[position], given[position])
    if not draws:
        return _wrong_by_float64(run, wide, eager, given)
    if run.scale != 1 or run.only is not None:
        return None
    position = _wrong_slope(run.called, run.wanted, eager, given, run.compiled)
    return None if position is None else (position, "is not the slope of its results, with the same random numbers")


# -- against float64 --------------------------------------------------------------------------------------------------


def _wrong_by_float64(
    run: _Run, copied: Callable[[], nn.Module | None], eager: Result, given: Sequence[Tensor | None]
) -> tuple[int, str] | None:
    suspected = [
        position
        for position, (one, other) in enumerate(zip(eager, given, strict=True))
        if _all_finite(one) and difference(one, other, _NEAR) > 1
    ]
    if not suspected or (wide := copied()) is None:
        return None
    verdicts = _wrong_at(run, wide, eager, given, suspected, 0)
    for place in range(1, _PLACES + 1):
        if not verdicts:
            return None
        with _moved(run, wide, place) as moved:
            there = _wrong_at(moved, wide, moved.eager(), moved.given(), list(verdicts), place)
        verdicts = {position: each for position, each in verdicts.items() if position in there}
    if not verdicts:
        return None
    position, verdict = next(iter(verdicts.items()))
    return position, f"differs from float64{verdict.detail}"


def _wrong_at(
    run: _Run, wide: nn.Module, eager: Result, given: Sequence[Tensor | None], suspected: Sequence[int], seed: int
) -> dict[int, Judgement]:
    """Of the `suspected` gradients those that are wrong, by position."""
    try:
        exact = _exact(run, wide)
    except Exception:  # its own operators may raise anything
        traceback.print_exc()
        forget_failed_traces()
        return {}
    least = max(NEAR, TF32 if may_use_tf32(run.called.module) else 0.0)
    names = [""] * len(given)
    verdicts = judge_gradients(names, given, eager, exact, least)
    wrong = [each for each in suspected if _all_finite(exact[each]) and not verdicts[each].ok]
    if not wrong:
        return {}
    noise = judge_gradients(names, rounded_otherwise(run.eager, seed), eager, exact, least)
    return {each: verdicts[each] for each in wrong if verdicts[each].error > MULTIPLE * noise[each].error}


def _exact(run: _Run, wide: nn.Module) -> list[Tensor | None]:
    """The gradients in float64; in eager's precision for what the model itself computes in less."""
    called = run.called._replace(module=wide, leaves=[*map(in_double, run.called.leaves)])
    with in_float64(), torch.autocast(run.device.type, enabled=False):
        return gradients_of(called, run.wanted, 0, None, run.scale, run.only)


def _in_float64(module: nn.Module) -> nn.Module | None:
    """A float64 copy; None for a module that is too large, or that cannot be copied."""
    if sum(each.numel() for each in (*module.parameters(), *module.buffers())) > MOST_NUMBERS:
        return None
    try:
        return copy.deepcopy(module).double()
    except Exception:  # parameters of classes of their own; handles and locks
        traceback.print_exc()
        return None


@contextmanager
def _moved(run: _Run, wide: nn.Module, seed: int) -> Iterator[_Run]:
    """While active, each differentiated value is scaled down by up to a fifth, which keeps its sign."""
    generator = torch.Generator().manual_seed(seed)

    def factors(tensor: Tensor) -> Tensor:
        return (1 - 0.2 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)).to(tensor.device)

    own = [each for each in run.called.module.parameters() if each.requires_grad]
    others = [each for each in wide.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in own]
    leaves = [
        (leaf * factors(leaf)).to(leaf.dtype) if index in run.wanted else leaf
        for index, leaf in enumerate(run.called.leaves)
    ]
    try:
        with torch.no_grad():
            for one, other in zip(own, others, strict=True):
                one.copy_(one * factors(one))
                other.copy_(one)
        yield run._replace(called=run.called._replace(leaves=leaves))
    finally:
        with torch.no_grad():
            for one, other, value in zip(own, others, before, strict=True):
                one.copy_(value)
                other.copy_(value)


def _all_finite(tensor: Tensor | None) -> bool:
    return tensor is not None and bool(tensor.detach().isfinite().all())


# -- of random numbers ------------------------------------------------------------------------------------------------


MOST_SLOPES = 8
"""So many gradients are measured at most, each by two calls of eager and two of the compiled code. A wrong mask is seen
in many."""


def _wrong_slope(
    called: Called,
    wanted: Collection[int],
    eager: Sequence[Tensor | None],
    given: Sequence[Tensor | None],
    compiled: Callable[..., Any],
) -> int | None:
    """The position of a gradient that is not the slope of the compiled code's own results, of a model that draws random
    numbers. A dropout whose backward has another mask gives such a gradient.

    Steps of two sizes measure the slope. The tolerance is the largest error of the same measurement in eager. A
    gradient that is 0 apart from rounding, as that of a bias before a normalisation, is below that.
    """
    some = range(0, len(given), -(-len(given) // MOST_SLOPES))
    suspected = list(some)
    for step in (1e-2, 2e-3):
        measured = [change_along(called, wanted, eager, each, step, called.module) for each in some]
        noise = max((each.error for each in measured if each is not None), default=0.0)
        found = [(each, change_along(called, wanted, given, each, step, compiled)) for each in suspected]
        suspected = [
            position
            for position, each in found
            if each is not None and each.error > 5 * noise + 0.03 * abs(each.expected)
        ]
        if not suspected:
            return None
    return suspected[0]
