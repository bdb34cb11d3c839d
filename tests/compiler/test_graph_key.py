"""The second key of a unit: equal for code that means the same, different for all that code generation sees."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from aotc.compiler.capture.export import capture
from aotc.compiler.capture.ranges.dynamic_shapes import dynamic_shapes
from aotc.compiler.codegen.graph_key import graph_key
from aotc.compiler.training.halves import halves_of
from aotc.records import Argument, Bucket, Parameter, Signature, SizeRange, TensorLeaf

SIGNATURE = Signature((Parameter("x", 0, "either"),), (TensorLeaf("x", "float32", ("n", 4)),))
RANGE: Bucket = {"n": SizeRange(2, 64)}


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def plain(self: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, self.linear(x), 2.0 * self.table)


def written_otherwise(self: Any, x: Tensor) -> Tensor:
    """As `plain`, with names for what it computes."""
    is_positive = x > 0
    hidden = self.linear(x)
    scaled = 2.0 * self.table
    return torch.where(is_positive, hidden, scaled)


def another_number(self: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, self.linear(x), 2.5 * self.table)


def another_weight(self: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, self.second(x), 2.0 * self.table)


def another_axis(self: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, self.linear(x), 2.0 * self.table).cumsum(1)


def other_axis(self: Any, x: Tensor) -> Tensor:
    return torch.where(x > 0, self.linear(x), 2.0 * self.table).cumsum(0)


def branches(self: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,))


def other_branches(self: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.tan(), (x,))


def key_of(
    forward: Any, *, bucket: Bucket = RANGE, size: int = 8, code: str = "", frozen: bool = False, table: float = 0.0
) -> str:
    module = Model(forward).eval()
    module.table = module.table + table
    leaves = [torch.ones(size, 4)]
    captured = capture(module, SIGNATURE, leaves, dynamic_shapes(SIGNATURE, bucket), frozen)
    return graph_key(code, [captured])


def test_a_graph_that_is_written_otherwise_has_the_same_key() -> None:
    assert key_of(plain) == key_of(written_otherwise) != ""
    assert key_of(branches) != ""


@pytest.mark.parametrize(
    ("declared", "tags"), [("own(Tensor(a!) x) -> Tensor", ()), ("own(Tensor x) -> Tensor", torch.Tag.flexible_layout)]
)
def test_an_operator_that_is_declared_otherwise_has_another_key(declared: str, tags: Any) -> None:
    def key(declared: str, tags: Any) -> str:
        with torch.library._scoped_library("graph_key", "DEF") as library:
            library.define(declared, tags=tags)
            library.impl("own", lambda x: x.clone(), "CompositeExplicitAutograd")
            graph = fx.Graph()
            x = graph.placeholder("x")
            graph.output((graph.call_function(torch.ops.graph_key.own.default, (x,)),))
            module: Any = SimpleNamespace(
                graph=fx.GraphModule(nn.Module(), graph), examples=(torch.ones(2),), guards=(), program=None
            )
            return graph_key("", [module])

    assert key(declared, tags) != key("own(Tensor x) -> Tensor", ()) != ""


def test_the_halves_of_a_training_step_have_a_key_over_a_range_of_sizes() -> None:
    def key(forward: Any) -> str:
        captured = capture(
            Model(forward).train(), SIGNATURE, [torch.ones(8, 4)], dynamic_shapes(SIGNATURE, RANGE), False, train=True
        )
        halves = halves_of(captured, [Argument(state="linear.weight")], 1.0)
        return graph_key("", [halves.forward, halves.backward])

    assert key(plain) == key(written_otherwise) != ""
    assert key(plain) != key(another_number) != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"forward": plain}, {"forward": another_number}),
        ({"forward": plain, "frozen": True}, {"forward": another_weight, "frozen": True}),
        ({"forward": another_axis}, {"forward": other_axis}),
        ({"forward": branches}, {"forward": other_branches}),
        ({"forward": plain}, {"forward": plain, "table": 1.0}),
        ({"forward": plain}, {"forward": plain, "code": "other options"}),
        ({"forward": plain}, {"forward": plain, "bucket": {"n": SizeRange(2, 32)}}),
        ({"forward": plain}, {"forward": plain, "size": 16}),
        ({"forward": plain}, {"forward": plain, "bucket": {"n": 8}}),
    ],
)
def test_what_code_generation_sees_is_in_the_key(one: dict[str, Any], other: dict[str, Any]) -> None:
    keys = [key_of(**one), key_of(**other)]
    assert keys[0] != keys[1] and all(keys)
