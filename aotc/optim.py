"""AdamW and SGD of `torch.optim`, without its import of torch's compiler.

An optimizer of `torch.optim` imports `torch._dynamo` when it is made, and again in its step (torch 2.13: 1.8 s), only
to tell the compiler to leave it alone. These two are subclasses whose methods do not, and compute with torch's fused
operators. All else is torch's: options, `param_groups`, hooks, schedulers, `GradScaler`, and states, which either class
loads from the other.

They are not compiled: Inductor's code for AdamW is no faster than the fused operator (`tests/benchmarks/RESULTS.md`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

__all__ = ["SGD", "AdamW"]

_HOW = ("foreach", "fused", "capturable", "differentiable")
"""The options that say how a step is computed, and not what."""

if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


class _WithoutCompiler(_Base):
    """In front of a class of `torch.optim`: its methods without the wrappers that import the compiler."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        if not (options.get("foreach") or options.get("differentiable")):
            options.setdefault("fused", True)
        super().__init__(params, *args, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return inspect.unwrap(super().step)(self, closure)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that options of how a step is computed stay: states of other implementations are on other
        devices."""
        given, own = state_dict["param_groups"], self.param_groups
        if len(given) == len(own):  # if not, torch raises
            kept = [{name: group[name] for name in _HOW if name in group} for group in own]
            state_dict = {**state_dict, "param_groups": [{**a, **b} for a, b in zip(given, kept, strict=True)]}
        inspect.unwrap(super().load_state_dict)(self, state_dict)


class AdamW(_WithoutCompiler, torch.optim.AdamW):
    """`torch.optim.AdamW` with its options, of which `fused` is True unless another implementation is asked for.

    Example:
        >>> from aotc.optim import AdamW
        >>> optimizer = AdamW(module.parameters(), lr=3e-4, weight_decay=0.1)
        >>> optimizer.param_groups[0]["fused"]
        True
    """


class SGD(_WithoutCompiler, torch.optim.SGD):
    """`torch.optim.SGD` with its options, of which `fused` is True unless another implementation is asked for.

    Example:
        >>> from aotc.optim import SGD
        >>> optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As torch's, whose fused operator refuses parameters of which only some have a momentum yet, and leaves the
        momentum of a first step that `GradScaler` skips uninitialised."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_momentum = [each for group in self.param_groups if group["momentum"] for each in group["params"]]
        given = [each for each in with_momentum if each.grad is not None]
        first = {each for each in given if self.state.get(each, {}).get("momentum_buffer") is None}
        if first and self._overflowed():
            return loss
        if len(first) in (0, len(given)):
            super().step()
            return loss
        gradients = {each: each.grad for group in self.param_groups for each in group["params"]}
        try:
            for apart in (gradients.keys() - first, first):
                for each, gradient in gradients.items():
                    each.grad = gradient if each in apart else None
                super().step()
        finally:
            for each, gradient in gradients.items():
                each.grad = gradient
        return loss

    def _overflowed(self) -> bool:
        """Whether `GradScaler` has found gradients that are not finite, and the step computes nothing."""
        found = getattr(self, "found_inf", None)
        return found is not None and bool(found)
