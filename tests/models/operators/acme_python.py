"""Operators written in Python: by `custom_op`, and by torch's own lower layer."""

from __future__ import annotations

import time

import torch

PAUSE = 0.0
"""Seconds in which `scale` lets go of the GIL."""


@torch.library.custom_op("acme::scale", mutates_args=())
def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    time.sleep(PAUSE)
    return x * factor


@scale.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("acme::fill", mutates_args=("out",))
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 3)


@torch.library.custom_op("acme::without_fake", mutates_args=())
def without_fake(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


library = torch.library.Library("acme_low", "DEF")
library.define("add_one(Tensor x) -> Tensor")
library.impl("add_one", lambda x: x + 1, "CompositeExplicitAutograd")


@torch.library.register_fake("acme_low::add_one")
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
