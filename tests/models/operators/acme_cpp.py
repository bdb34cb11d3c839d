"""Loads the compiled operators, as a package with an extension does."""

from __future__ import annotations

import os

import torch

torch.ops.load_library(os.environ["ACME_OPS"])


@torch.library.register_fake("acme_cpp::twice")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
