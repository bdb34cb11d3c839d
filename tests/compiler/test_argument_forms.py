"""Which other forms of its containers a model is seen to take and to do the same: it is run with them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from aotc.compiler.capture.analysis.argument_forms import Forms, other_forms
from aotc.compiler.capture.checks.left_out import check_defaults
from aotc.compiler.capture.module_objects import KeptObjects
from aotc.errors import BuildError
from aotc.records import ConstantLeaf, Parameter, Signature, TensorLeaf


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def forms(function: Callable[..., Any], *parameters: Parameter, written: tuple[str, ...] = ()) -> Forms:
    indices: list[int] = []

    def collect(tree: Any) -> None:
        if isinstance(tree, int):
            indices.append(tree)
            return
        for part in tree.values() if isinstance(tree, dict) else tree:
            if part != "tuple":
                collect(part)

    for parameter in parameters:
        collect(parameter.tree)
    names = {index: each.name for each in parameters for index in [each.tree] if isinstance(index, int)}
    forms_of_leaves = [
        ConstantLeaf("n", None) if names.get(index) == "n_kwargs" else TensorLeaf(str(index), "float32", (3,))
        for index in indices
    ]
    signature = Signature(parameters, tuple(forms_of_leaves))
    module = Function(function).eval()
    leaves = [
        None if isinstance(leaf, ConstantLeaf) else torch.full((3,), float(index))
        for index, leaf in enumerate(forms_of_leaves)
    ]
    with torch.no_grad():
        return other_forms(module, signature, written, KeptObjects(module), leaves)


BATCH = Parameter("batch", {"a": 0, "b": 1, "c": 2})
PAIR = Parameter("pair", [0, 1])
TUPLE_PAIR = Parameter("pair", ["tuple", 0, 1])


def test_a_model_is_run_with_lists_in_place_of_the_tuples_of_its_manifest() -> None:
    assert forms(lambda pair: pair[0] + pair[1], TUPLE_PAIR).any_sequence
    assert not forms(lambda pair: pair[0] * 2 if isinstance(pair, tuple) else pair[0] * 3, TUPLE_PAIR).any_sequence


def last_of(batch: dict[str, Tensor]) -> Tensor:
    return list(batch.values())[-1]


def test_what_eager_compiles_by_itself_runs_after_its_forms_were_tried() -> None:
    """Up to torch 2.13, Dynamo never again compiles what it met under a dispatch mode, and `torch.cond` then fails."""
    import torch._dynamo

    def chosen(pair: Any) -> Tensor:
        return torch.cond(pair[0].sum() > 0, lambda x: x.cos(), lambda x: x.sin(), [pair[1]])

    torch._dynamo.reset()
    forms(chosen, PAIR)
    torch.testing.assert_close(chosen([torch.ones(3), torch.ones(3)]), torch.ones(3).cos())


def second_of(batch: dict[str, Tensor]) -> Tensor:
    return batch[list(batch)[1]]


def by_name(batch: dict[str, Tensor]) -> Tensor:
    return batch["a"] * 2 + batch["b"] - batch["c"]


def chosen(batch: dict[str, Tensor]) -> Tensor:
    known = {key: value for key, value in batch.items() if key in ("a", "c")}
    return known["a"] - known["c"]


def in_order(batch: dict[str, Tensor]) -> Tensor:
    return torch.cat(list(batch.values()))


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (by_name, True),
        (chosen, True),
        (last_of, False),
        (second_of, False),
        (in_order, False),
        (lambda batch: {key: value * 2 for key, value in batch.items()}, False),  # the result's keys have an order, too
    ],
)
def test_keys_in_another_order(function: Callable[..., Any], same: bool) -> None:
    assert forms(function, BATCH) == Forms(any_order=same)


def test_of_many_keys_each_is_seen_at_each_place_and_beside_each_other_in_both_orders() -> None:
    batch = Parameter("batch", {name: index for index, name in enumerate("abcdefg")})
    assert forms(lambda batch: batch["a"] + batch["g"], batch).any_order
    assert not forms(lambda batch: list(batch.values())[4] * 2, batch).any_order
    assert not forms(
        lambda batch: batch["c"] if list(batch).index("c") < list(batch).index("d") else batch["d"], batch
    ).any_order


def test_what_goes_through_kwargs_in_another_order() -> None:
    extras = Parameter("p", 0, "extra"), Parameter("q", 1, "extra")
    assert forms(lambda **kw: kw["p"] - kw["q"], *extras) == Forms(any_order=True)
    assert forms(lambda **kw: [value * 2 for value in kw.values()], *extras) == Forms()
    named = Parameter("p", 0, "keyword"), Parameter("q", 1, "keyword")
    assert forms(lambda *, p, q: p - q, *named) == Forms()  # which has no other form: nothing is run


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (lambda pair: pair[0] - pair[1], True),
        (lambda pair: pair[0] + pair[1] if isinstance(pair, tuple) else pair[0] - pair[1], False),
        (lambda pair: pair, False),  # eager gives a tuple then
        (lambda pair: pair.copy()[0] * 2, False),  # eager fails then
    ],
)
def test_a_tuple_in_the_place_of_a_list(function: Callable[..., Any], same: bool) -> None:
    assert forms(function, PAIR) == Forms(any_sequence=same)


def test_each_level_of_lists_within_lists_is_tried() -> None:
    nested = Parameter("caches", [[0, 1], [2, 3]])
    assert forms(lambda caches: caches[0][1] - caches[1][0], nested) == Forms(any_sequence=True)
    assert forms(lambda caches: caches[0][0] * (1 + isinstance(caches[1], tuple)), nested) == Forms()
    mixed = Parameter("batch", {"a": [0, 1], "b": 2})
    assert forms(lambda batch: batch["a"][0] - batch["b"], mixed) == Forms(any_sequence=True, any_order=True)


def test_a_model_without_containers_is_not_run() -> None:
    def fails(x: Tensor) -> Tensor:
        raise AssertionError

    assert forms(fails, Parameter("x", 0)) == Forms()


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (lambda x, n_kwargs=None: x * (n_kwargs or {}).get("scale", 2.0), True),
        (lambda x, n_kwargs=None: x * 2 if n_kwargs is None else x * 3, False),
        (lambda x, n_kwargs=None: x * len(n_kwargs), False),  # eager fails with None then
        (lambda x, n_kwargs=None: (x * 2, n_kwargs), False),  # eager gives the other back
    ],
)
@pytest.mark.parametrize("tree", [1, {}])
def test_an_empty_dict_in_the_place_of_none_and_none_in_the_place_of_an_empty_dict(
    function: Callable[..., Any], same: bool, tree: Any
) -> None:
    found = forms(function, Parameter("x", 0), Parameter("n_kwargs", tree, default=None))
    assert found == Forms(empty_is_none=("n_kwargs",) if same else ())


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda x, mask=None: x if mask is None else x * mask, ""),
        (lambda x, mask=None: F.softmax(x if mask is None else x + (1 - mask) * -9, 0), ""),
        (lambda x, mask=None: x * 2 if mask is None else x * mask, "does something else for None"),
        (lambda x, mask=None: x if mask is None else (x * mask, mask), "does something else for None"),
        (lambda x, mask=None: x * mask, "fails for None: TypeError"),
    ],
)
def test_a_default_is_compared_with_what_the_model_does_for_none(function: Callable[..., Any], problem: str) -> None:
    leaves = TensorLeaf("x", "float32", ("n",)), TensorLeaf("mask", "float32", ("n",), default=1)
    signature = Signature((Parameter("x", 0), Parameter("mask", 1, default=None)), leaves)
    module = Function(function).eval()
    values = [torch.randn(5), torch.tensor([1.0, 0, 1, 0, 1])]
    with torch.no_grad(), pytest.raises(BuildError, match=problem) if problem else nullcontext():
        check_defaults(module, signature, ["seen"], KeptObjects(module), values)


def test_a_mask_that_the_model_makes_of_padding_is_not_taken_for_ones() -> None:
    leaves = TensorLeaf("input_ids", "int64", ("n",)), TensorLeaf("mask", "float32", ("n",), default=1)
    signature = Signature((Parameter("input_ids", 0), Parameter("mask", 1, default=None)), leaves)
    values = [torch.tensor([5, 7, 9]), torch.ones(3)]

    def check(function: Callable[..., Any]) -> None:
        module = Function(function).eval()
        module.config = SimpleNamespace(pad_token_id=0, vocab_size=10)  # type: ignore[assignment]
        with torch.no_grad():
            check_defaults(module, signature, ["seen"], KeptObjects(module), values)

    check(lambda input_ids, mask=None: input_ids + 1 if mask is None else (input_ids + 1) * mask.long())
    with pytest.raises(BuildError, match="does something else for None"):
        check(lambda input_ids, mask=None: (input_ids + 1) * (input_ids != 0 if mask is None else mask.long()))
