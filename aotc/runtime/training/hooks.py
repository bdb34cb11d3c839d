"""Hooks of parameters that get no gradient in a pass.

A call is one node of autograd, which reaches all of the call's parameters. Those on which no result of the loss depends
get None, and autograd calls their hooks with it. In eager it does not reach them, and calls none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


class _Noted:
    """A hook that notes whether a gradient came."""

    came = False

    def __call__(self, gradient: Tensor | None) -> None:
        self.came = gradient is not None


class _OnGradient:
    """A hook on a gradient, where there is one."""

    def __init__(self, hook: Callable[[Tensor], Any]) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self._hook(gradient)


class _AfterGradient:
    """A hook on a parameter after a gradient was added, where one was."""

    def __init__(self, hook: Callable[[Tensor], Any], noted: _Noted) -> None:
        self._hook, self._noted = hook, noted

    def __call__(self, parameter: Tensor) -> Any:
        return self._hook(parameter) if self._noted.came else None


def only_with_gradients(leaf: Any) -> None:
    """Let the hooks of a leaf run where a gradient comes only, from this pass on. They can be removed as before."""
    if after := leaf._post_accumulate_grad_hooks:
        noted = next((each for each in (leaf._backward_hooks or {}).values() if isinstance(each, _Noted)), None)
        if noted is None:
            leaf.register_hook(noted := _Noted())
        for key, hook in after.items():
            if not isinstance(hook, _AfterGradient):
                after[key] = _AfterGradient(hook, noted)
    before = leaf._backward_hooks or {}
    for key, hook in before.items():
        if not isinstance(hook, _Noted | _OnGradient) and not _counts_calls(hook):
            before[key] = _OnGradient(hook)


def _counts_calls(hook: Any) -> bool:
    """Of `register_multi_grad_hook`: it waits for a call of each parameter that autograd reaches, and takes None."""
    return getattr(hook, "__module__", "") == "torch.autograd.graph" and hook.__name__ == "inner_hook"
