"""Results of classes that torch takes apart by itself, and has no names for: its operators' own, and named tuples."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import _paths
from aotc.errors import BuildError
from aotc.records import Parameter, ResultContainer, Signature, TensorLeaf
from aotc.runtime.conversions.result_containers import maker

MODEL = """
from typing import NamedTuple
import torch
from torch import nn

class Best(NamedTuple):
    found: torch.return_types.topk
    scaled: torch.Tensor

class Model(nn.Module):
    def forward(self, x):
        return Best(x.topk(2), x * 2), {"order": x.sort(0)}
"""


def test_results_keep_their_classes(compile_model: Any) -> None:
    compiled, module = compile_model(MODEL, inputs={"x": {"shape": [3, 4]}})
    x = torch.randn(3, 4)
    with torch.no_grad():
        (best, more), (expected, expected_more) = compiled(x), module(x)
    assert type(best) is type(expected)
    assert type(best.found) is torch.return_types.topk
    assert type(more["order"]) is torch.return_types.sort
    assert torch.equal(best.found.values, expected.found.values)
    assert torch.equal(best.found.indices, expected.found.indices)
    assert torch.equal(best.scaled, expected.scaled)
    assert torch.equal(more["order"].indices, expected_more["order"].indices)


class Returns(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, x: Tensor) -> Any:
        return self.result(x + 1)


SIGNATURE = Signature((Parameter("x", 0, "either"),), (TensorLeaf("x", "float32", (4, 4)),))


def tree_of(result: Any) -> int | ResultContainer:
    return capture(Returns(result), SIGNATURE, [torch.eye(4)], None, frozen=False).output_tree


@pytest.mark.parametrize(
    "result",
    [
        *(torch.aminmax, torch.frexp, torch.slogdet, torch.linalg.slogdet, torch.linalg.eigh),
        *(torch.linalg.svd, torch.linalg.qr, torch.linalg.lu),
        *(lambda x: x.median(0), lambda x: x.max(0), lambda x: x.cummin(0), lambda x: x.kthvalue(2)),
    ],
)
def test_what_an_operator_returns_is_read_as_that(result: Any) -> None:
    tree, expected = tree_of(result), pytree.tree_structure(result(torch.eye(4)))
    assert isinstance(tree, ResultContainer)
    assert pytree.tree_structure(maker(tree, plain=False)(range(expected.num_leaves))) == expected


class Point(NamedTuple):
    x: Tensor
    y: Tensor | None


Renamed = collections.namedtuple("Other", ["x"])


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


pytree.register_pytree_node(Box, lambda box: ([box.x], None), lambda children, _: Box(*children))


def test_a_named_tuple_is_found_by_its_name() -> None:
    tree = tree_of(lambda x: Point(x, None))
    assert isinstance(tree, ResultContainer) and tree.type == f"{__name__}.Point"
    assert maker(tree, plain=False)((1, None)) == Point(1, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "hint"),
    [(lambda x: Renamed(x), "top of a module, under its own name"), (lambda x: Box(x), "serialized_type_name=")],
    ids=["renamed", "registered without a name"],
)
def test_a_class_that_could_not_be_found_again_fails_at_export_with_what_to_do(result: Any, hint: str) -> None:
    with pytest.raises(BuildError) as caught:
        tree_of(result)
    assert hint in caught.value.hint
    assert caught.value.stage == "export"


class Unnamed(dict[str, Any]):
    """Registered without names for its items, as the outputs of diffusers are."""


def test_the_outputs_of_a_class_without_names_are_numbered() -> None:
    _, structure = pytree.tree_flatten((Unnamed(a=1, b=2), 3))
    assert _paths(structure) == ("[0]", "[1]", "[2]")
    assert _paths(pytree.tree_structure({"a": 1})) == ("['a']",)


pytree.register_pytree_node(
    Unnamed,
    lambda values: (list(values.values()), list(values)),
    lambda values, names: Unnamed(zip(names, values, strict=True)),
    serialized_type_name="tests.Unnamed",
)
