"""What the helpers of the subjects import in their turn."""

from __future__ import annotations

from torch import Tensor

DEPTH = 0.75
CURVE = {"knots": [0.5, 1.5], "kind": "linear"}


def bent(x: Tensor) -> Tensor:
    return x * DEPTH + CURVE["knots"][0]
