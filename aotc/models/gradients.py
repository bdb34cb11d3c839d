"""The gradients of a call with example inputs, to compare compiled code with eager, or with its own results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.models.calls import Called, arguments_of, state_put_back
from aotc.records import Signature


def gradients_of(
    called: Called,
    with_gradients: Collection[int],
    seed: int = 0,
    call: Callable[..., Any] | None = None,
    scale: float = 1.0,
    only: int | None = None,
) -> list[Tensor | None]:
    """The gradients of the module's parameters, then of the leaves `with_gradients`; None where it has none.

    They are those of the sum of all results, or of the one at the place `only`, each weighted by random numbers that
    depend on its place only, times `scale`. The state that is written to is as before afterwards. `call` is what is
    called in the place of the module.
    """
    values, of = _values(called, with_gradients)
    with state_put_back(called.module, called.written):
        results = _results(call or called.module, called.signature, values, seed)
        chosen = list(enumerate(results)) if only is None else [(only, results[only])]
        weights = [_weights(each, place) * scale for place, each in chosen]
        found = torch.autograd.grad([each for _, each in chosen], of, weights, allow_unused=True)
    return list(found)


def count_of_results(called: Called, with_gradients: Collection[int]) -> int:
    """How many results of a call have gradients."""
    values, _ = _values(called, with_gradients)
    with state_put_back(called.module, called.written):
        return len(_results(called.module, called.signature, values, 0))


class LossChange(NamedTuple):
    """A change of the sum of all results, as a gradient says, and as two calls have measured it."""

    expected: float
    measured: float

    @property
    def error(self) -> float:
        return abs(self.measured - self.expected)


def change_along(
    called: Called,
    with_gradients: Collection[int],
    gradients: Sequence[Tensor | None],
    position: int,
    step: float,
    call: Callable[..., Any] | None = None,
) -> LossChange | None:
    """How the sum of all results changes along one of its `gradients`.

    Two calls with the same random numbers measure it, at `step` times the size of the tensor to both sides. None where
    there is no gradient, or another one than a dense one that is not 0.
    """
    values, of = _values(called, with_gradients)
    gradient, tensor = gradients[position], of[position].detach()
    if gradient is None or gradient.layout != torch.strided or not gradient.any():
        return None
    exact, before = gradient.double(), tensor.clone()
    length = step * (float(tensor.double().norm()) or tensor.numel() ** 0.5) / float(exact.norm())
    sums, places = [], []
    try:
        for side in (length, -length):
            tensor.add_(gradient, alpha=side)
            places.append(tensor.double())
            with state_put_back(called.module, called.written):
                results = _results(call or called.module, called.signature, values, 0)
                weighted = ((each.detach() * _weights(each, place)).double() for place, each in enumerate(results))
                sums.append(sum(float(each.sum()) for each in weighted))
            tensor.copy_(before)
    finally:
        tensor.copy_(before)
    expected = float(((places[0] - places[1]) * exact).sum())  # the steps as the dtype has them
    return LossChange(expected, sums[0] - sums[1])


def _values(called: Called, with_gradients: Collection[int]) -> tuple[list[Any], list[Tensor]]:
    """Copies of the leaves, and all tensors whose gradients are computed."""
    values = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in called.leaves]
    of: list[Tensor] = [each for each in called.module.parameters() if each.requires_grad]
    return values, of + [values[index].requires_grad_() for index in sorted(with_gradients)]


def _results(function: Callable[..., Any], signature: Signature, values: Sequence[Any], seed: int) -> list[Tensor]:
    """The results that have gradients."""
    args, kwargs = arguments_of(signature, values)
    with torch.enable_grad():
        torch.manual_seed(seed)
        return [each for each in pytree.tree_leaves(function(*args, **kwargs)) if is_differentiable(each)]


def names_of_gradients(module: nn.Module, signature: Signature, with_gradients: Collection[int]) -> list[str]:
    """Names for messages: what each part of a result of `gradients_of` is."""
    names = [f"the gradient of `{name}`" for name, each in module.named_parameters() if each.requires_grad]
    return names + [f"the gradient of the input `{signature.leaves[i].path}`" for i in sorted(with_gradients)]


def is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _weights(result: Tensor, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(place)
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    return weights.to(device=result.device, dtype=result.dtype)
