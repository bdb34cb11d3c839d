"""Submodules in another training mode than their module: layers of adapters that were added after `eval()`, or frozen
BatchNorm layers of a module that is trained."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from aotc.reads.attributes import OTHER_MODE


def with_modes(module: nn.Module, parts: Iterable[str]) -> nn.Module:
    """The module, of which these submodules are in the other mode in a build."""
    for path in parts:
        vars(module.get_submodule(path))[OTHER_MODE] = True
    return module
