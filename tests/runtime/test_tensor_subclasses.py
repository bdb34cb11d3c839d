"""Weights that keep their values in other tensors: the plain tensors within are used in place, checked and watched."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_built import attach_fakes, make_artifact, specs_of, tensor
from processes import ZOO
from torch import Tensor, nn

from aotc.errors import BindError
from aotc.tensors.subclasses import agrees, describe, inner_tensors

X = torch.ones(1)


@pytest.fixture
def sum_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A Sum as a parameter."""
    monkeypatch.syspath_prepend(str(ZOO))
    from sums import Sum

    def make(a: Any, b: Any, note: str = "") -> nn.Parameter:
        parts = [each if isinstance(each, Tensor) else torch.full((2,), float(each)) for each in (a, b)]
        return nn.Parameter(Sum(*parts, note), requires_grad=False)

    return make


@pytest.fixture
def module(sum_of: Callable[..., Any]) -> nn.Module:
    """`inner.weight` is the sum of 1 and 2; `weight` that of such a sum, of 3 and 4, and 5."""
    module = nn.Module()
    module.inner = nn.Module()
    module.inner.weight = sum_of(1, 2, "two")
    module.weight = sum_of(sum_of(3, 4, "within"), 5)
    module.eval()
    return module


def live(module: nn.Module) -> Any:
    """A callable that gives the first element of each tensor that its library got."""
    artifact = make_artifact([tensor("x", 1)], state=specs_of(module))
    return attach_fakes(artifact, lambda x, *state: torch.stack([each[0] for each in state]), module=module)


def refused(action: Callable[[], Any]) -> BindError:
    with pytest.raises(BindError) as caught:
        action()
    return caught.value


def test_the_plain_tensors_are_used_in_place_under_the_parameters_name_and_their_path(module: nn.Module) -> None:
    compiled = live(module)
    names = [spec.name for spec in compiled.artifact.state]
    assert names == ["weight.a.a", "weight.a.b", "weight.b", "inner.weight.a", "inner.weight.b"]
    assert compiled(X).tolist() == [3, 4, 5, 1, 2]
    module.weight.a.b.add_(6)  # type: ignore[operator, union-attr]
    assert compiled(X).tolist() == [3, 10, 5, 1, 2]


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda module, sum_of: vars(module.inner.weight).update(a=torch.full((2,), 9.0)), [3, 4, 5, 9, 2]),
        (lambda module, sum_of: vars(module.weight).update(a=sum_of(8, 9, "within")), [8, 9, 5, 1, 2]),
        (lambda module, sum_of: setattr(module.inner, "weight", sum_of(7, 8, "two")), [3, 4, 5, 7, 8]),
        (lambda module, sum_of: setattr(module, "weight", sum_of(sum_of(7, 8, "within"), 9)), [7, 8, 9, 1, 2]),
    ],
    ids=["tensor within", "wrapper within", "parameter", "parameter of wrappers"],
)
def test_what_is_put_in_a_place_is_used_by_the_next_call(
    module: nn.Module, sum_of: Callable[..., Any], change: Any, expected: list[float]
) -> None:
    compiled = live(module)
    compiled(X)
    change(module, sum_of)
    assert compiled(X).tolist() == expected


@pytest.mark.parametrize(
    "change, where, message",
    [
        (
            lambda module, sum_of: setattr(module.inner, "weight", sum_of(1, 2, "three")),
            "inner.weight",
            "built for note two, the module's is three",
        ),
        (
            lambda module, sum_of: vars(module.weight).update(a=sum_of(3, 4, "else")),
            "weight",
            "built for a.note within, the module's is else",
        ),
        (
            lambda module, sum_of: setattr(module.inner, "weight", nn.Parameter(torch.ones(2))),
            "inner.weight",
            "built for Sum, the module's is a plain float32 tensor",
        ),
        (
            lambda module, sum_of: setattr(module.inner, "weight", None),
            "inner.weight",
            "a parameter at the load, no parameter now",
        ),
        (
            lambda module, sum_of: vars(module.inner.weight).update(a=torch.ones(2, dtype=torch.float64)),
            "inner.weight.a",
            "built for dtype float32, the module's is float64",
        ),
        (
            lambda module, sum_of: setattr(module.inner, "weight", sum_of(torch.ones(3), torch.ones(3), "two")),
            "inner.weight",
            "built for shape [2], the module's is [3]",
        ),
    ],
    ids=["context", "context within", "plain", "none", "dtype", "shape"],
)
def test_another_class_context_or_form_is_refused_with_both_values_at_each_call(
    module: nn.Module, sum_of: Callable[..., Any], change: Any, where: str, message: str
) -> None:
    compiled = live(module)
    before = module.inner.weight
    change(module, sum_of)
    for _ in range(2):
        (issue,) = refused(lambda: compiled(X)).issues
        assert (issue.where, issue.message) == (where, message)
    if where == "inner.weight":
        module.inner.weight = before
        assert compiled(X).tolist() == [3, 4, 5, 1, 2]


def test_a_parameter_that_holds_values_in_other_tensors_is_refused_where_a_plain_one_was_built(
    module: nn.Module, sum_of: Callable[..., Any]
) -> None:
    plain, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    other.weight = sum_of(torch.ones(2, 2), torch.ones(2, 2))
    artifact = make_artifact([tensor("x", 1)], state=specs_of(plain))
    error = refused(lambda: attach_fakes(artifact, lambda x, weight: weight, module=other))
    assert "a plain tensor is expected, the module's is a Sum" in str(error)
    assert "build the model as it is here" in str(error)


def test_weights_are_replaced_within_the_parameter_so_that_eager_has_them_too(
    module: nn.Module, sum_of: Callable[..., Any]
) -> None:
    compiled = live(module)
    outer = module.inner.weight
    compiled.update_weights({"inner.weight": sum_of(7, 8, "two"), "weight.b": torch.full((2,), 9.0)})
    assert compiled(X).tolist() == [3, 4, 9, 7, 8]
    assert module.inner.weight is outer
    assert torch.Tensor.add(torch.zeros(2), module.inner.weight).tolist() == [15, 15]
    error = refused(lambda: compiled.update_weights({"inner.weight": sum_of(7, 8, "other")}))
    assert "inner.weight: built for note two, the checkpoint's is other" in str(error)
    assert compiled(X).tolist() == [3, 4, 9, 7, 8]


def test_int8_weights_that_torchs_product_could_not_read_are_refused_and_not_run() -> None:
    """torch's `_weight_int8pack_mm` ends the process (SIGSEGV) for weights at an address that 16 does not divide."""
    plain, other = nn.Module().eval(), nn.Module().eval()
    plain.register_buffer("weight", torch.zeros(32, dtype=torch.int8))
    other.register_buffer("weight", torch.zeros(40, dtype=torch.int8)[8:])
    artifact = make_artifact([tensor("x", 1)], state=specs_of(plain))
    (issue,) = refused(lambda: attach_fakes(artifact, lambda x, weight: weight, module=other)).issues
    assert "16 does not divide" in issue.message and "clone" in issue.hint


def test_frozen_weights_of_another_context_are_refused(module: nn.Module, sum_of: Callable[..., Any]) -> None:
    artifact = make_artifact([tensor("x", 1)], weights="frozen", state=specs_of(module, digests=True))
    attach_fakes(artifact, lambda x: x, module=module)
    module.inner.weight = sum_of(1, 2, "three")
    (issue,) = refused(lambda: attach_fakes(artifact, lambda x: x, module=module)).issues
    assert issue.message == "built for note two, the module's is three"


class Rounding(enum.Enum):
    NEAREST = "nearest"


@dataclasses.dataclass
class Scaling:
    dim: int
    rounding: Rounding


def test_a_context_is_described_as_plain_data_in_the_form_of_torchaos_headers(sum_of: Callable[..., Any]) -> None:
    context: Any = {"dtype": torch.int4, "size": (1, 32), "scaling": Scaling(-1, Rounding.NEAREST), "other": object()}
    described = describe(sum_of(1, 2, context))
    assert described == {
        "class": "Sum",
        "dtype": "float32",
        "shape": [2],
        "tensors": ["a", "b"],
        "context": {
            "note": {
                "dtype": {"_type": "torch.dtype", "_data": "int4"},
                "size": [1, 32],
                "scaling": {
                    "_type": "Scaling",
                    "_data": {"dim": -1, "rounding": {"_type": "Rounding", "_data": "NEAREST"}},
                },
                "other": {"_type": "object", "_data": None},
            }
        },
    }
    assert agrees(described, {"class": "Sum"}) and not agrees(described, {"class": "Other"})
    assert not agrees(described, None) and not agrees(None, described)


def test_a_plain_tensor_holds_its_own_values() -> None:
    assert inner_tensors(X) == {"": X} and describe(X) is None
