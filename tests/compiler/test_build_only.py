"""What forward does in its trace alone is told: printing, drawing from generators that compiled code does not have."""

from __future__ import annotations

import random

import pytest
import torch

from aotc.compiler.capture.analysis.build_only import build_only_effects


def forward(x: torch.Tensor) -> torch.Tensor:
    print("seen", x.shape)
    return x + 1 if random.random() < 2 else x


def test_a_print_and_a_random_branch_are_told_once() -> None:
    with build_only_effects() as effects:
        torch.export.export(Forward(), (torch.ones(2),))
        forward(torch.ones(2))
    printed, drawn = effects
    line = forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} " in printed and "Python's `random`" in drawn


def test_a_model_that_does_neither_is_told_nothing() -> None:
    with build_only_effects() as effects:
        torch.export.export(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout()), (torch.ones(2, 2),))
    assert effects == []


class Scored(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, 1.0).log_prob(2 * x)


def test_checks_of_distributions_are_left_out_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In eager, before and after, they are made."""
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)  # torch.compile unsets it for good
    x = torch.ones(2)
    with build_only_effects() as effects:
        exported = torch.export.export(Scored(), (x,))
    assert [effect.startswith("torch.distributions checks arguments") for effect in effects] == [True]
    torch.testing.assert_close(exported.module()(x), Scored()(x))
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        Scored()(x * torch.nan)


class Forward(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return forward(x)
