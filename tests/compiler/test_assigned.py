"""Which attributes forward sets before it reads them, and what its calls leave in others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.capture.analysis.assigned_attributes import Assigned, assigned_attributes
from aotc.compiler.capture.checks.hidden_state import check_second_call
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.digest import sha256_json
from aotc.models.calls import call_model
from aotc.reads.attributes import module_attributes
from aotc.records import Parameter, Signature, TensorLeaf

ROWS = Signature((Parameter("x", 0),), (TensorLeaf("x", "float32", (4, 4)),))


class Vocoder(nn.Module):
    """With the norms of older checkpoints, whose weights hooks compute at each call."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.first = nn.utils.weight_norm(nn.Linear(4, 4))
        self.second = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


class Anchored(nn.Module):
    """Makes anchors at the first call of a size; notes a size that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shape, self.anchors, self.rows = None, torch.empty(0), 0
        self.stride = torch.tensor([8.0])

    def forward(self, x: Tensor) -> Any:
        self.rows = x.shape[0]
        if self.shape != x.shape:
            self.anchors, self.shape = torch.arange(4) * self.stride, x.shape
        return x + self.anchors


class Masked(nn.Module):
    """Makes a mask where there is none, and takes one that there is; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mask, self.scale, self.calls = None, "auto", 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones_like(x).tril()
        if self.scale == "auto":
            self.scale = 0.5
        return x * self.mask * self.scale


class Checked(nn.Module):
    """Asks for the form of what it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(4, dtype=torch.int64)

    def forward(self, x: Tensor) -> Any:
        if not isinstance(self.table, Tensor) or self.table.shape != (4,):
            self.table = torch.zeros(4, dtype=torch.int64)
        self.table = self.table.clone()
        return x[self.table]


def test_a_model_that_sets_nothing_is_not_called_again() -> None:
    """What torch.export puts in the place of a module's own lists and dicts is not the model's doing."""
    called: list[int] = []

    class Plain(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            called.append(1)
            return super().forward(input)

    module, leaves = Plain(4, 4).eval(), [torch.randn(4, 4)]
    kept = KeptObjects(module)
    vars(module)["_parameters"] = dict(module._parameters)
    result = check_second_call(module, ROWS, (), kept, leaves, leaves)
    assert assigned_attributes(module, ROWS, (), kept, leaves, result) == Assigned()
    assert len(called) == 1


@pytest.mark.parametrize(
    ("make", "first", "left"),
    [
        (Vocoder, ["first.weight", "second.weight"], {}),
        (Anchored, ["anchors", "rows", "shape"], {}),
        (Masked, [], {"mask": None, "scale": 0.5, "calls": 1}),
        (Checked, [], {"table": None}),
        (lambda: nn.Linear(4, 4), [], {}),
    ],
    ids=["weight norm", "anchors", "mask", "form", "nothing"],
)
@torch.no_grad()
def test_what_forward_sets(make: Any, first: list[str], left: dict[str, Any]) -> None:
    module, leaves = make().eval(), [torch.randn(4, 4)]
    before, kept = module_attributes(module), KeptObjects(module)
    result = check_second_call(module, ROWS, (), kept, leaves, [torch.randn(4, 4)])
    found = assigned_attributes(module, ROWS, (), kept, leaves, result)
    assert module_attributes(module) == before
    call_model(module, ROWS, (), leaves)
    after = module_attributes(module)
    wanted = {name: sha256_json(after[""][name] if value is None else value) for name, value in left.items()}
    assert (found.first, found.left) == (first, wanted) if kept.has_changed else found == Assigned()
