"""Gradients, and ten steps of training: compiled, in eager and in float64, by the rule of `aotc.models.tolerance`.

For gradients that are 0 apart from rounding, see `aotc.models.tolerance.judge_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.errors import LibraryError
from aotc.models.calls import Called, arguments_of, modes_of, signature_leaves
from aotc.models.float64_reference import in_double
from aotc.models.gradients import gradients_of, names_of_gradients
from aotc.models.tolerance import Judgement, error_of, judge, judge_gradients, named, size_of
from aotc.optim import SGD
from aotc.reads.tensors import plain_state
from aotc.records import Dims
from aotc.runtime.compiled import Compiled
from aotc.runtime.training.step import TrainingStep

if TYPE_CHECKING:
    from aotc.verify.comparison import Comparison

STEPS = 10


class Trained(NamedTuple):
    """The gradients of a first call, the loss of each of the steps, and the parameters after them."""

    gradients: list[Tensor | None]
    losses: Tensor
    parameters: list[Tensor]


def compare_training(comparison: Comparison, dims: Dims, steps: int = STEPS) -> list[Judgement]:
    """Judge gradients and some steps of gradient descent at these sizes. Of a model that draws random numbers, compiled
    code has to draw those of eager. All modules are as before afterwards.

    Raises CouldNotRun where the model itself fails; whatever compiled code raises.
    """
    from aotc.verify.comparison import CouldNotRun

    leaves = signature_leaves(comparison.spec, comparison.signature, dims, comparison.device, 0, comparison.folder)
    artifact = comparison.compiled.artifact
    wanted = frozenset[int]()
    if not artifact.regions:
        wanted = wanted.union(*(variant.with_gradients for variant in artifact.variants))
    names = names_of_gradients(comparison.eager, comparison.signature, wanted)
    rate: list[float] = []

    def train(module: nn.Module, call: Callable[..., Any], values: Sequence[Any], *, autocast: bool = True) -> Trained:
        modes = modes_of(comparison.spec, comparison.device.type, autocast=autocast)
        with _put_back(module), modes:
            written = list(plain_state(module))
            gradients = gradients_of(Called(module, comparison.signature, written, values), wanted, call=call)
            rate.extend([_rate_of(module, gradients)] if not rate else [])
            losses, parameters = _descend(comparison, module, call, values, rate[0], steps)
        return Trained(gradients, losses, parameters)

    try:
        eager = train(comparison.eager, comparison.eager, leaves)
    except Exception as error:
        raise CouldNotRun(f"the model cannot be trained in eager: {error}") from error
    drawn = comparison._has_drawn()
    compiled = train(comparison.module, comparison.compiled, leaves)
    exact = eager
    for widening in comparison.widenings[:1]:
        wide = [*map(in_double, leaves)]
        with suppress(Exception), widening():  # its own operators may raise anything
            exact = train(comparison.reference, comparison.reference, wide, autocast=False)
    if drawn and not _are_near(eager.gradients, exact.gradients):  # in float64 it has drawn others
        exact = eager
    found = judge_gradients(names, compiled.gradients, eager.gradients, exact.gradients)
    if not steps:
        return found
    after = [f"{name.removeprefix('the gradient of ')} after {steps} steps" for name in names]
    found.append(named("the losses of the steps", judge(compiled.losses, eager.losses, exact.losses)))
    return found + judge_gradients(after, compiled.parameters, eager.parameters, exact.parameters)


def _descend(
    comparison: Comparison, module: nn.Module, call: Callable[..., Any], leaves: Sequence[Any], rate: float, steps: int
) -> tuple[Tensor, list[Tensor]]:
    """Steps of gradient descent on the mean of all results. Returns the losses, and the parameters."""
    trained = [each for each in module.parameters() if each.requires_grad]
    args, kwargs = arguments_of(comparison.signature, leaves)
    whole = call is comparison.compiled and not comparison.spec.method  # a TrainingStep calls the model itself
    step = _compiled_step(comparison.loaded, trained, rate) if whole and trained else None
    losses = []
    torch.manual_seed(0)
    for _ in range(steps):
        if step is not None:
            losses.append(step(*args, **kwargs))
            continue
        with torch.enable_grad():
            loss = _mean_of(call(*args, **kwargs))
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        losses.append(loss.detach())
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.data.sub_(gradient, alpha=rate)
        torch.clear_autocast_cache()  # it has casts of the parameters before the step
    return torch.stack(losses) if losses else torch.empty(0), [each.detach().clone() for each in trained]


def _compiled_step(compiled: Compiled, trained: Sequence[Tensor], rate: float) -> Callable[..., Tensor]:
    """Whole steps as users run them: on a GPU, as a CUDA graph, where they can be captured."""
    fused = all(each.is_floating_point() for each in trained)
    optimizer = SGD(trained, lr=rate, fused=fused)
    steps = [TrainingStep(compiled, optimizer, loss=_mean_of, cuda_graph=None if fused else False)]

    def step(*args: Any, **kwargs: Any) -> Tensor:
        try:
            return steps[-1](*args, **kwargs)
        except LibraryError:  # nothing was changed
            steps.append(TrainingStep(compiled, optimizer, loss=_mean_of, cuda_graph=False))
            return steps[-1](*args, **kwargs)

    return step


def _mean_of(result: Any) -> Tensor:
    """The sum of the means of all parts of a result that have a gradient."""
    parts = [each for each in pytree.tree_leaves(result) if _has_gradient(each)]
    return torch.stack([each.to(_wider(each)).mean() for each in parts]).sum()


def _rate_of(module: nn.Module, gradients: Sequence[Tensor | None]) -> float:
    """Steps of about a hundredth of the parameters."""
    found = max((size_of(each) for each in gradients), default=0.0)
    weights = max((size_of(each.detach()) for each in module.parameters() if each.requires_grad), default=0.0)
    return 0.01 * weights / found if found else 0.0


def _wider(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.is_floating_point()


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards all parameters and buffers have the values from before."""
    state = plain_state(module)
    before = {name: tensor.detach().clone() for name, tensor in state.items()}
    try:
        yield
    finally:
        for name, tensor in state.items():
            tensor.data.copy_(before[name])


def _are_near(gradients: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> bool:
    """Whether all errors are a hundredth of the largest gradient at most."""
    errors = (size_of(error_of(one, true)) for one, true in zip(gradients, exact, strict=True))
    return max(errors, default=0.0) <= 0.01 * max(map(size_of, exact), default=0.0)
