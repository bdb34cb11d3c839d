"""`aotc verify --bisect` names planted faults: an operator's decomposition, a cast, a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.bisection.ladder import DECOMPOSED, LOWERED, walk
from aotc.bisection.lowering import Lowering
from aotc.machine.targets import parse_target

aten = torch.ops.aten


class Model(nn.Module):
    """Three operators before and after the one in question."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.inner = body, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.inner(x).tanh()) + x.sin()


class Rounding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 3).bfloat16().float() + 1


def exported(body: Any) -> tuple[Any, Sequence[Any]]:
    """The graph of the model, and its inputs: weights first."""
    torch.manual_seed(0)
    module, x = (body if isinstance(body, Rounding) else Model(body)).eval(), torch.randn(8, 16)
    program = torch.export.export(module, (x,))
    return program.graph_module, [*module.state_dict().values(), x]


def lowering(**options: Any) -> Lowering:
    return Lowering(parse_target("cpu:x86-64-v3"), options, frozenset())


def test_a_wrong_decomposition_is_named_with_both_numbers_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import decomposition

    def doubled_at_the_end(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x) * torch.where(x > 0.5, 1.01, 1.0)

    for table in (decomposition.decompositions, decomposition.fast_random_decomps()):
        monkeypatch.setitem(table, aten.silu.default, doubled_at_the_end)
    found = walk(lowering(), *exported(nn.functional.silu))
    assert [(stage.name, stage.outcome) for stage in found.stages] == [(DECOMPOSED, "wrong")]
    assert found.culprit is not None and found.culprit.numbers is not None
    assert (found.culprit.kind, found.culprit.names) == ("operator", ("aten.silu.default",))
    assert "test_bisection.py" in found.culprit.line and "forward" in found.culprit.line
    assert "`doubled_at_the_end` at test_bisection.py:" in found.culprit.note
    numbers = found.culprit.numbers
    assert numbers.eager == pytest.approx(numbers.reference, rel=1e-5)
    assert numbers.compiled == pytest.approx(numbers.eager * 1.01, rel=1e-5)
    assert [(remedy.whole, "aten.silu.default" in remedy.name) for remedy in found.remedies] == [(True, True)]


def test_a_cast_that_inductor_leaves_out_is_named_with_the_option_that_rounds() -> None:
    found = walk(lowering(), *exported(Rounding()))
    assert [(stage.name, stage.outcome) for stage in found.stages] == [(DECOMPOSED, "right"), (LOWERED, "wrong")]
    assert found.culprit is not None and found.culprit.numbers is not None
    assert found.culprit.names == (
        "prims.convert_element_type.default of aten._to_copy.default",
        "prims.convert_element_type.default of aten._to_copy.default",
    )
    assert "forward: return (x * 3).bfloat16().float() + 1" in found.culprit.line
    assert found.culprit.numbers.eager == found.culprit.numbers.reference != found.culprit.numbers.compiled
    (remedy,) = found.remedies
    assert (remedy.write, remedy.whole) == ("options: {emulate_precision_casts: true}", True)
