"""A call gives what the model returns: its structure, its own inputs, its constants."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import msgspec
import pytest
import torch
from hand_built import attach_fakes, make_artifact, make_compiled, specs_of, tensor
from torch import nn
from torch.utils import _pytree as pytree

from aotc.errors import CorruptError
from aotc.records import ConstantLeaf, Output, PadRule, ResultContainer

Point = namedtuple("Point", ["x", "y"])
pytree._register_namedtuple(Point, serialized_type_name="aotc.tests.Point")

FIRST, SECOND = torch.tensor([1.0]), torch.tensor([2.0])
BOTH = (Output(index=0), Output(index=1))


def result_of(sample: Any, outputs: tuple[Output, ...] = BOTH) -> Any:
    compiled = make_compiled(lambda x: (FIRST, SECOND), [tensor("x", 1)], outputs=outputs, output_sample=sample)
    return compiled(torch.zeros(1))


@pytest.mark.parametrize(
    "sample",
    [
        (0, 0),
        [0, 0],
        {"a": 0, "b": 0},
        (0, (0,)),
        [[0], {"deep": (0,)}],
        OrderedDict(b=0, a=0),
        defaultdict(list, b=0, a=0),
        deque([0, 0], 3),
        {1: 0, None: 0},
        torch.return_types.topk((0, 0)),
        {"a": [0], "b": {"c": 0}},
        Point(0, 0),
        (Point(0, 0),),
    ],
    ids=repr,
)
def test_outputs_come_in_the_models_own_structure(sample: Any) -> None:
    expected = pytree.tree_unflatten([FIRST, SECOND], pytree.tree_structure(sample))
    result = result_of(sample)
    assert type(result) is type(expected)
    assert pytree.tree_structure(result) == pytree.tree_structure(expected)
    assert [a is b for a, b in zip(pytree.tree_leaves(result), [FIRST, SECOND], strict=True)] == [True, True]


def test_a_single_tensor_comes_bare_and_a_tuple_of_one_as_a_tuple() -> None:
    def result_of_one(sample: Any) -> Any:
        one = (Output(index=0),)
        return make_compiled(lambda x: FIRST, [tensor("x", 1)], outputs=one, output_sample=sample)(torch.zeros(1))

    assert result_of_one(0) is FIRST
    result = result_of_one((0,))
    assert isinstance(result, tuple)
    assert len(result) == 1
    assert result[0] is FIRST


def test_each_call_gives_a_container_of_its_own() -> None:
    compiled = make_compiled(lambda x: (FIRST, SECOND), [tensor("x", 1)], outputs=BOTH, output_sample={"a": 0, "b": 0})
    compiled(torch.zeros(1))["a"] = None
    assert compiled(torch.zeros(1))["a"] is FIRST


@pytest.mark.parametrize("constant", [None, True, 0, 7, 1.5, "text"])
def test_constants_come_back_with_their_type(constant: Any) -> None:
    result = result_of((0, 0), (Output(index=1), Output(constant=constant)))
    assert result[0] is SECOND
    assert result[1] == constant
    assert type(result[1]) is type(constant)


def test_outputs_may_come_in_another_order_and_twice() -> None:
    a, b, c = result_of((0, 0, 0), (Output(index=1), Output(index=0), Output(index=1)))
    assert (a is SECOND, b is FIRST, c is SECOND) == (True, True, True)


def test_an_input_that_the_model_returns_is_that_very_object_also_where_it_was_padded() -> None:
    compiled = make_compiled(
        lambda x: x + 1,
        [tensor("x", "seq", pad={"seq": PadRule()}), ConstantLeaf("flag", True)],
        [{"seq": 4}],
        outputs=(Output(leaf=0), Output(index=0, dims=("seq",)), Output(leaf=1)),
        output_sample=(0, 0, 0),
    )
    for size in (4, 3):
        x = torch.zeros(size)
        same, added, flag = compiled(x, True)
        assert same is x
        assert added.tolist() == [1.0] * size
        assert flag is True


def test_a_view_of_an_input_is_a_tensor_of_its_own_on_the_inputs_elements() -> None:
    x = torch.zeros(2, requires_grad=True)
    with torch.no_grad():
        view, _ = make_compiled(
            lambda x: x + 1,
            [tensor("x", 2)],
            outputs=(Output(leaf=0, view=True), Output(index=0)),
            output_sample=(0, 0),
        )(x)
        view.add_(1)
    assert view is not x
    assert not view.requires_grad
    assert x.tolist() == [1.0, 1.0]


def test_a_parameter_that_the_model_returns_is_the_modules_own() -> None:
    module = nn.Linear(2, 2, bias=False).eval()
    artifact = make_artifact(
        [tensor("x", 2)],
        state=specs_of(module),
        outputs=(Output(index=0), Output(state="weight")),
        output_sample=(0, 0),
    )
    _, weight = attach_fakes(artifact, lambda x, w: x @ w, module=module)(torch.ones(2))
    assert weight is module.weight


@pytest.mark.parametrize(
    ("sample", "outputs"), [((0, 0), (Output(index=0),)), (0, BOTH), ((0,), ())], ids=["fewer", "more", "none"]
)
def test_a_record_whose_structure_and_outputs_disagree_is_refused_at_load(sample: Any, outputs: Any) -> None:
    with pytest.raises(CorruptError, match="outputs"):
        result_of(sample, outputs)


@pytest.mark.parametrize(
    "items", [(), (0, 0), (1,), (-1,), (0, ResultContainer("list", (0,)))], ids=["none", "twice", "past", "-1", "inner"]
)
def test_a_structure_that_does_not_hold_each_output_once_is_refused_at_load(items: Any) -> None:
    artifact = make_artifact([tensor("x", 1)])
    broken = msgspec.structs.replace(artifact.variants[0], output_tree=ResultContainer("tuple", items))
    with pytest.raises(CorruptError, match="structure"):
        attach_fakes(msgspec.structs.replace(artifact, variants=(broken,)), lambda x: x)


@pytest.mark.parametrize("keys", [(), ("y", "y"), ("y", "z")])
def test_a_dict_with_other_keys_than_items_is_refused_at_load(keys: tuple[str, ...]) -> None:
    artifact = make_artifact([tensor("x", 1)])
    broken = msgspec.structs.replace(artifact.variants[0], output_tree=ResultContainer("dict", (0,), keys))
    with pytest.raises(CorruptError, match="structure"):
        attach_fakes(msgspec.structs.replace(artifact, variants=(broken,)), lambda x: x)


# -- without the model's code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (ResultContainer("far.ModelOutput", (0, 1), context=["a", "b"]), {"a": FIRST, "b": SECOND}),
        (ResultContainer("far.Dataclass", (0, 1), context=[["a", "b"], ["none"]]), {"a": FIRST, "b": SECOND}),
        (ResultContainer("far.Point", (0, 1)), (FIRST, SECOND)),
        (ResultContainer("far.Odd", (0, 1), context=["a"]), (FIRST, SECOND)),
        (ResultContainer("far.Twice", (0, 1), context=["a", "a"]), (FIRST, SECOND)),
        (ResultContainer("far.Own", (0, 1), context={"its": "own"}), (FIRST, SECOND)),
        (
            ResultContainer("list", (0, ResultContainer("far.Cache", (1,), context=["k"]))),
            [FIRST, {"k": SECOND}],
        ),
    ],
)
def test_without_a_module_a_result_of_an_unknown_class_is_a_plain_container(tree: Any, expected: Any) -> None:
    artifact = make_artifact([tensor("x", 1)], outputs=BOTH, output_sample=(0, 0))
    variant = msgspec.structs.replace(artifact.variants[0], output_tree=tree)
    artifact = msgspec.structs.replace(artifact, variants=(variant,))
    with pytest.raises(CorruptError, match="import the package"):
        attach_fakes(artifact, lambda x: (FIRST, SECOND), module=nn.Identity().eval())
    result = attach_fakes(artifact, lambda x: (FIRST, SECOND))(torch.zeros(1))
    assert result == expected
    assert type(result) is type(expected)


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


torch.export.register_dataclass(Pair, serialized_type_name="here.Pair")


def test_without_a_module_a_class_that_is_imported_is_used() -> None:
    assert result_of(Pair(0, 0)) == Pair(FIRST, SECOND)


class Boxed:
    """Registered with a context that is not JSON, and so with what writes and reads it."""

    def __init__(self, items: list[Any], kind: type) -> None:
        self.items, self.kind = items, kind


pytree.register_pytree_node(
    Boxed,
    lambda box: (box.items, box.kind),
    lambda items, kind: Boxed(list(items), kind),
    serialized_type_name="here.Boxed",
    to_dumpable_context=lambda kind: {"kind": kind.__name__},
    from_dumpable_context=lambda context: {"int": int, "str": str}[context["kind"]],
)


def test_a_class_reads_its_own_context() -> None:
    result = result_of((Boxed([0], str), 0))
    assert result[0].kind is str
    assert result[0].items == [FIRST]
    assert result[1] is SECOND
