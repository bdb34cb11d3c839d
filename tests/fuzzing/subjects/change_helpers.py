"""What the subjects import."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import change_deep
import torch
from change_deep import bent
from torch import Tensor, nn

GAIN = 1.25
LIMITS = [0.1, 0.9]
OPTIONS = {"shift": 0.5, "inner": {"power": 2}, "names": ("first", "second")}
SCALE = float(Path(__file__).with_name("change_scale.txt").read_text())
FROM_ENVIRONMENT = float(os.environ.get("SUBJECT_AT_IMPORT", "0.25"))
OFFSET = torch.full((8,), 0.125)
SMOOTH = nn.Softplus()


def scaled(x: Tensor, by: float = 1.5, *, plus: float = 0.25) -> Tensor:
    return x * by * GAIN + plus


def curved(x: Tensor) -> Tensor:
    return bent(x) + change_deep.CURVE["knots"][1]


def made(factor: float, terms: list[float]) -> Callable[[Tensor], Tensor]:
    """A function with a closure."""

    def inner(x: Tensor) -> Tensor:
        return x * factor + terms[0]

    return inner


def tripled(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator."""
    times = 3.0

    def around(self: nn.Module, x: Tensor) -> Tensor:
        return method(self, x) * times

    return around


def counted(x: Tensor) -> Tensor:
    return x * counted.times


counted.times = 2.0


def __getattr__(name: str) -> float:
    """Names that the module computes."""
    if name in LAZY:
        return LAZY[name]
    raise AttributeError(name)


LAZY = {"COMPUTED": 0.625}


class Tool:
    """A class that is used without an instance."""

    rate = 0.5
    table = {"low": 0.25, "high": 4.0}

    @staticmethod
    def shifted(x: Tensor) -> Tensor:
        return x + 0.5

    @classmethod
    def rated(cls, x: Tensor) -> Tensor:
        return x * cls.rate + cls.table["low"]


class Adder:
    """A callable object."""

    def __init__(self, amount: float) -> None:
        self.amount = amount

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.amount


ADD = Adder(0.375)
