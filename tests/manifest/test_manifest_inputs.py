"""How a manifest's inputs are taken apart into leaves, and put together again."""

from __future__ import annotations

import pytest

from aotc.manifest.inputs import ConstantInput, TensorInput, parse_inputs, tensors_in
from aotc.models.calls import fill
from aotc.records import PadRule


def test_mappings_with_shape_are_tensors_others_nest_and_the_rest_are_constants() -> None:
    trees, leaves = parse_inputs(
        {
            "x": {"shape": ["batch", 4], "dtype": "int64", "init": "ones", "layout": "contiguous"},
            "deep": {"ids": {"shape": [2]}, "flags": [True, None, {"shape": []}]},
            "scale": 0.5,
        }
    )
    assert trees == {"deep": {"flags": [0, 1, 2], "ids": 3}, "scale": 4, "x": 5}
    assert leaves == (
        ConstantInput("deep.flags[0]", True),
        ConstantInput("deep.flags[1]", None),
        TensorInput("deep.flags[2]", ()),
        TensorInput("deep.ids", (2,)),
        ConstantInput("scale", 0.5),
        TensorInput("x", ("batch", 4), "int64", "ones"),
    )


def test_the_order_of_names_does_not_matter() -> None:
    one = parse_inputs({"a": {"shape": [1]}, "b": {"d": 1, "c": 2}})
    other = parse_inputs({"b": {"c": 2, "d": 1}, "a": {"shape": [1]}})
    assert one == other


def test_empty_lists_and_mappings_keep_their_place() -> None:
    assert parse_inputs({"a": [], "b": {}}) == ({"a": [], "b": {}}, ())


def test_a_mapping_of_tuple_alone_is_a_tuple() -> None:
    inputs = {"shapes": [{"tuple": [1, {"tuple": []}, {"shape": [2]}]}], "tuple": 3}
    trees, leaves = parse_inputs(inputs)
    assert trees == {"shapes": [["tuple", 0, ["tuple"], 1]], "tuple": 2}
    assert [leaf.path for leaf in leaves] == ["shapes[0][0]", "shapes[0][2]", "tuple"]
    assert fill(trees["shapes"], "abc") == [("a", (), "b")]


def test_a_pad_is_a_value_or_the_last_slice() -> None:
    _, (leaf,) = parse_inputs({"x": {"shape": ["a", "b", "c"], "pad": {"a": 0, "b": "edge", "c": True}}})
    assert isinstance(leaf, TensorInput)
    assert leaf.pad == {"a": PadRule(value=0), "b": PadRule(edge=True), "c": PadRule(value=True)}


@pytest.mark.parametrize("form", [{"dtype": "int64"}, {"init": "ones"}, {"shape": [1], "pad": {"a": "left"}}])
def test_a_tensor_that_cannot_be_read_is_refused(form: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the input `x`"):
        parse_inputs({"x": form})


def test_a_parameter_may_be_named_like_a_key_of_a_tensor() -> None:
    inputs = {"shape": {"shape": [2]}, "dtype": 3}
    assert parse_inputs(inputs) == ({"dtype": 0, "shape": 1}, (ConstantInput("dtype", 3), TensorInput("shape", (2,))))
    assert list(tensors_in(inputs)) == [(("shape",), {"shape": [2]})]
