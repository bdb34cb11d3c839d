"""Models of op_db.py: operators of torch's own `op_db`, each a result of its own, with a sample of torch's as input.

Tensors that get gradients are parameters, and the others are buffers, so that compiled code takes all of them as
arguments.
"""

from __future__ import annotations

import functools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SAMPLES = 8
"""So many samples of an operator are looked at, for one that eager can differentiate."""


def do_without_expecttest() -> None:
    """torch's tests import it, and their samples do not need it."""
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub


@functools.cache
def operators() -> dict[str, Any]:
    """Those that have a gradient in float32, by name."""
    do_without_expecttest()
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        each.full_name: each
        for each in op_db
        if each.supports_autograd and torch.float32 in each.supported_dtypes("cpu")
    }


def samples(name: str, seed: int = 0) -> Iterator[tuple[list[Any], Any]]:
    """The first samples of an operator: leaves, and how its arguments are made of them."""
    operator = operators()[name]
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _, sample in zip(range(SAMPLES), operator.sample_inputs("cpu", torch.float32, True), strict=False):
            yield pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))


def sample_of(name: str) -> int | None:
    """The place of the first sample with results and gradients in eager, all finite and without random numbers; None
    where there is none."""
    try:
        for place, (leaves, tree) in enumerate(samples(name)):
            tensors = [each for each in leaves if isinstance(each, Tensor)]
            if all(each.numel() for each in tensors) and _is_differentiable(Operator(name, place), tree):
                return place
    except Exception:  # of the samples themselves
        return None
    return None


def _is_differentiable(operator: Operator, tree: Any) -> bool:
    try:
        with _Undrawn():
            results = [each for each in pytree.tree_leaves(operator()) if isinstance(each, Tensor)]
        results = [each for each in results if each.requires_grad]
        found = torch.autograd.grad([each.abs().sum() for each in results], [*operator.parameters()], allow_unused=True)
    except Exception:  # of the operator
        return False
    dense = [each for each in (*results, *found) if each is not None]
    return any(each is not None for each in found) and all(bool(each.isfinite().all()) for each in dense)


class _Undrawn(TorchDispatchMode):
    """Refuses random numbers: `op_db` draws them within a generator's state of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(f"{func} draws random numbers")
        return func(*args, **(kwargs or {}))


class Operator(nn.Module):
    """One operator with one of its samples."""

    def __init__(self, name: str, place: int, seed: int = 0) -> None:
        super().__init__()
        self.name = name
        leaves, self.tree = next(each for at, each in enumerate(samples(name, seed)) if at == place)
        self.leaves: list[Any] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                value = leaf.detach().clone()
                if leaf.requires_grad:
                    self.register_parameter(f"tensor{index}", nn.Parameter(value))
                else:
                    self.register_buffer(f"tensor{index}", value)
            self.leaves.append(None if isinstance(leaf, Tensor) else leaf)

    def forward(self) -> Any:
        leaves = [getattr(self, f"tensor{index}", leaf) for index, leaf in enumerate(self.leaves)]
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return operators()[self.name].op(*args, **kwargs)


class Operators(nn.Module):
    """Several of them: a list of the tensors that each returns."""

    def __init__(self, chosen: Sequence[tuple[str, int]], seed: int = 0) -> None:
        super().__init__()
        self.operators = nn.ModuleList(Operator(name, place, seed) for name, place in chosen)

    def forward(self) -> list[list[Tensor]]:
        return [
            [each for each in pytree.tree_leaves(operator()) if isinstance(each, Tensor)] for operator in self.operators
        ]


def some_operators(chosen: Sequence[tuple[str, int]], seed: int = 0) -> nn.Module:
    return Operators(chosen, seed)
