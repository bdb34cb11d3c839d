"""Results that are views of inputs, buffers or constants: said in the record, or refused. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aotc.compiler.capture.export import capture
from aotc.compiler.capture.lifting.lift import Capture
from aotc.compiler.capture.ranges.dynamic_shapes import dynamic_shapes
from aotc.errors import BuildError
from aotc.records import Bucket, Parameter, Signature, SizeRange, StridedView, TensorLeaf

SIGNATURE = Signature(
    (Parameter("x", 0), Parameter("cache", 1)),
    (TensorLeaf("x", "float32", ("n", 6)), TensorLeaf("cache", "float32", (4, "2*n"))),
)


class Returning(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("kept", torch.zeros(4, 6))
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.plain = torch.arange(4.0)
        self.within = [torch.arange(4.0)]

    def forward(self, x: Tensor, cache: Tensor) -> Any:
        return x @ self.weight, self.function(self, x, cache)


def captured(function: Callable[..., Any], bucket: Bucket | None = None, **options: Any) -> Capture:
    leaves = [torch.randn(6, 6), torch.randn(4, 12)]
    shapes = dynamic_shapes(SIGNATURE, bucket or {"n": 6})
    return capture(Returning(function).eval(), SIGNATURE, leaves, shapes, options.pop("frozen", False), **options)


def view_in(found: Capture) -> Any:
    return found.outputs[1].view


RANGE = {"n": SizeRange(4, 64, 2, 6)}


def written(module: Any, x: Tensor, cache: Tensor) -> Tensor:
    cache[:, 2:4] = 1
    return cache[:, 1:]


def test_a_view_of_a_written_input_is_made_of_the_callers_tensor() -> None:
    found = captured(written)
    assert found.outputs[1].leaf == 1 and found.mutated_leaves == (1,)
    assert view_in(found) == StridedView((4, 11), (12, 1), 1)


def test_sizes_of_a_range_are_expressions_over_its_dims() -> None:
    view = view_in(captured(written, RANGE))
    sizes = view.shape[1], view.stride[0]
    assert [eval(str(size), {"n": 10}) for size in sizes] == [19, 20] and view.offset == 1


def test_a_result_of_other_form_specialises_no_range() -> None:
    """Of 6 rows and 6 columns, `x[0]` has the shape of a row; that says nothing of other sizes."""
    found = captured(lambda module, x, cache: x[0], RANGE)
    x = next(node for node in found.graph.graph.nodes if node.name == "x").meta["val"]
    assert isinstance(x.shape[0], torch.SymInt) and not x.shape[0].node.expr.is_Integer


def test_a_view_of_a_written_buffer_is_one_of_the_modules() -> None:
    def function(module: Any, x: Tensor, cache: Tensor) -> Tensor:
        module.kept.add_(1)
        return module.kept.t()[1:]

    found = captured(function)
    assert (found.outputs[1].state, found.mutated_state) == ("kept", ("kept",))
    assert view_in(found) == StridedView((5, 4), (1, 6), 1)


def test_an_old_tensor_of_a_buffer_is_a_copy() -> None:
    def function(module: Any, x: Tensor, cache: Tensor) -> Tensor:
        old = module.kept
        module.kept = module.kept + 1
        return old[1:]

    assert captured(function).outputs[1].index == 1


def test_a_view_whose_sizes_depend_on_values_is_refused_with_its_line() -> None:
    def function(module: Any, x: Tensor, cache: Tensor) -> Tensor:
        cache.add_(1)
        count = x.argmax().item()
        torch._check(count >= 0)
        torch._check(count <= 4)
        return cache.narrow(0, 0, count)

    with pytest.raises(BuildError, match="writes to the input `cache` and returns a view of it") as refused:
        captured(function)
    assert "test_returned_views.py:" in refused.value.fields["source"] and "clone()" in refused.value.hint


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("part", [lambda module: module.plain, lambda module: module.within[0][1:]])
def test_a_constant_is_not_returned(part: Callable[[Any], Tensor], frozen: bool) -> None:
    with pytest.raises(BuildError, match="kept from call to call and is not a buffer") as refused:
        captured(lambda module, x, cache: part(module), frozen=frozen)
    assert "register_buffer" in refused.value.hint
    assert captured(lambda module, x, cache: part(module).clone(), frozen=frozen).outputs[1].index == 1


def test_frozen_weights_are_not_returned() -> None:
    with pytest.raises(BuildError, match="returns the module's `weight`, or a view of it; frozen") as refused:
        captured(lambda module, x, cache: module.weight[0], frozen=True)
    assert "weights: live" in refused.value.hint
    assert captured(lambda module, x, cache: module.weight[0]).outputs[1].state == "weight"


def test_a_tensor_that_forward_makes_of_numbers_is_returned_as_its_own() -> None:
    found = captured(lambda module, x, cache: torch.tensor([1.0, 2.0])[1:], frozen=True)
    assert found.outputs[1].index == 1


def test_in_training_a_view_of_an_input_is_a_copy_with_a_gradient_of_its_own() -> None:
    assert captured(lambda module, x, cache: x[1:], train=True).outputs[1].index == 1
