"""The gradients of a call with example inputs, to compare compiled code with eager."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.models.calls import arguments_of, state_put_back
from aotc.records import Signature


def gradients_of(
    module: nn.Module,
    signature: Signature,
    written: Collection[str],
    leaves: Sequence[Any],
    with_gradients: Collection[int],
    seed: int = 0,
    call: Callable[..., Any] | None = None,
) -> list[Tensor | None]:
    """The gradients of the module's parameters, then of the leaves `with_gradients`; None where it has none.

    They are those of the sum of all results, each weighted by random numbers that depend on its place only. The state
    called `written` is as before afterwards. `call` is what is called in the place of the module.
    """
    values = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    of: list[Tensor] = [each for each in module.parameters() if each.requires_grad]
    of += [values[index].requires_grad_() for index in sorted(with_gradients)]
    args, kwargs = arguments_of(signature, values)
    with torch.enable_grad(), state_put_back(module, written):
        torch.manual_seed(seed)
        results = [each for each in pytree.tree_leaves((call or module)(*args, **kwargs)) if _is_differentiable(each)]
        weights = [_weights(each, place) for place, each in enumerate(results)]
        found = torch.autograd.grad(results, of, weights, allow_unused=True)
    return list(found)


def names_of_gradients(module: nn.Module, signature: Signature, with_gradients: Collection[int]) -> list[str]:
    """What each part of a result of `gradients_of` is, for a message."""
    names = [f"the gradient of `{name}`" for name, each in module.named_parameters() if each.requires_grad]
    return names + [f"the gradient of the input `{signature.leaves[i].path}`" for i in sorted(with_gradients)]


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _weights(result: Tensor, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(place)
    weights = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    return weights.to(device=result.device, dtype=result.dtype)
