"""Arguments reach the model's leaves as Python itself would bind them."""

from __future__ import annotations

import inspect
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import msgspec
import pytest
import torch
from hand_built import make_compiled, tensor
from hypothesis import given
from hypothesis import strategies as st
from torch import ones

from aotc.call_table.bind import StructureMismatch, make_binder
from aotc.call_table.values import describe
from aotc.errors import MissError
from aotc.records import ConstantLeaf, Parameter, Signature, TensorLeaf
from aotc.runtime.conversions.default_tensors import makers_of, with_defaults

KINDS = {
    "positional": inspect.Parameter.POSITIONAL_ONLY,
    "either": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
}


@st.composite
def signatures(draw: st.DrawFn) -> tuple[Signature, inspect.Signature]:
    """The same parameters as a record and as Python's own signature."""
    counts = {kind: draw(st.integers(0, 3)) for kind in KINDS}
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    positional = counts["positional"] + counts["either"]
    first_default = draw(st.integers(0, positional))
    record, python = [], []
    for index, kind in enumerate(kinds):
        defaulted = index >= first_default if index < positional else draw(st.booleans())
        name = f"p{index}"
        record.append(Parameter(name, index, kind, 100 + index if defaulted else msgspec.UNSET))
        python.append(
            inspect.Parameter(name, KINDS[kind], default=100 + index if defaulted else inspect.Parameter.empty)
        )
    leaves = tuple(ConstantLeaf(parameter.name, 0) for parameter in record)
    return Signature(tuple(record), leaves), inspect.Signature(python)


calls = st.tuples(
    st.lists(st.integers(0, 9), max_size=9),
    st.dictionaries(st.sampled_from([f"p{i}" for i in range(9)] + ["other"]), st.integers(10, 19), max_size=5),
)


@given(signatures(), calls)
def test_a_call_binds_where_python_binds_it_and_to_the_same_values(
    both: tuple[Signature, inspect.Signature], call: tuple[list[int], dict[str, int]]
) -> None:
    record, python = both
    args, kwargs = call
    bind = make_binder(record)
    try:
        bound = python.bind(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError):
            bind(args, kwargs)
        return
    bound.apply_defaults()
    assert bind(args, kwargs) == list(bound.arguments.values())


@given(signatures(), st.data())
def test_a_complete_call_binds_in_any_form_that_python_accepts(
    both: tuple[Signature, inspect.Signature], data: st.DataObject
) -> None:
    record, _ = both
    values = list(range(len(record.parameters)))
    most = sum(parameter.kind != "keyword" for parameter in record.parameters)
    least = sum(parameter.kind == "positional" for parameter in record.parameters)
    given_by_position = data.draw(st.integers(least, most))
    rest = data.draw(st.permutations(range(given_by_position, len(values))))
    kwargs = {record.parameters[index].name: values[index] for index in rest}
    assert make_binder(record)(values[:given_by_position], kwargs) == values


def nested_binder(**takes: bool) -> Any:
    parameters = (
        Parameter("batch", {"ids": 0, "extra": {"mask": 1}}),
        Parameter("caches", [2, [3, 4]]),
        Parameter("flag", 5, default=False),
    )
    return make_binder(Signature(parameters, tuple(ConstantLeaf(str(index), 0) for index in range(6))), **takes)


def test_nested_mappings_and_lists_are_flattened_by_the_records_tree() -> None:
    batch = {"ids": "i", "extra": {"mask": "m"}}
    assert nested_binder()([batch, ["a", ["b", "c"]]], {"flag": True}) == ["i", "m", "a", "b", "c", True]
    other = {"extra": {"mask": "m"}, "ids": "i"}
    bind = nested_binder(any_sequence=True, any_order=True)
    assert bind([other, ("a", ["b", "c"])], {"flag": True}) == ["i", "m", "a", "b", "c", True]


class Text(str):
    __slots__ = ()


Pair = namedtuple("Pair", ["key", "value"])
BATCH, CACHES = {"ids": 1, "extra": {"mask": 1}}, [2, [3, 4]]
OTHER_FORMS = {
    "another order": ({"extra": {"mask": 1}, "ids": 1}, CACHES, "any_order"),
    "a tuple": (BATCH, (2, [3, 4]), "any_sequence"),
    "a size": (BATCH, [2, torch.Size([3, 4])], "any_sequence"),
    "a named tuple": (BATCH, [2, Pair(3, 4)], None),
    "an ordered dict": (OrderedDict(BATCH), CACHES, None),
    "a dict with defaults": ({"ids": 1, "extra": defaultdict(int, mask=1)}, CACHES, None),
    "another mapping": (UserDict(BATCH), CACHES, None),
    "keys of a subclass": ({Text("ids"): 1, "extra": {"mask": 1}}, CACHES, None),
}


@pytest.mark.parametrize("form", OTHER_FORMS)
def test_a_container_of_another_form_binds_only_where_the_model_was_seen_to_do_the_same(form: str) -> None:
    """Eager asks for the type and iterates in order; a dict that is none of Python's own may do anything."""
    batch, caches, allowing = OTHER_FORMS[form]
    for takes in ({}, {"any_order": True}, {"any_sequence": True}):
        bind = nested_binder(**takes)
        if allowing in takes:
            assert bind([batch, caches], {}) == [1, 1, 2, 3, 4, False]
            continue
        with pytest.raises(StructureMismatch) as caught:
            bind([batch, caches], {})
        assert caught.value.hint.startswith("pass ")


@pytest.mark.parametrize("came", [[1, (2,)], (1, [2]), Pair(1, (2,)), (1,)], ids=["list", "inner", "named", "short"])
def test_a_tuple_of_the_manifest_binds_to_tuples_alone(came: Any) -> None:
    """As `img_shapes=[(1, 4, 4)]` of QwenImage, for which a list within the list is a batch."""
    parameter = Parameter("shapes", [["tuple", 0, ["tuple", 1]]])
    signature = Signature((parameter,), (ConstantLeaf("shapes[0][0]", 1), ConstantLeaf("shapes[0][1][0]", 2)))
    bind = make_binder(signature)
    assert bind([[(1, (2,))]], {}) == [1, 2] == bind([[(1, torch.Size([2]))]], {})
    with pytest.raises(StructureMismatch, match="a tuple of") as caught:
        bind([[came]], {})
    assert caught.value.hint.startswith("pass tuple(…)") is (came != (1,))
    if type(came) is not Pair and len(came) == 2:
        assert make_binder(signature, any_sequence=True)([[came]], {}) == [1, 2]


@pytest.mark.parametrize("tree", [1, {}])
def test_none_and_an_empty_dict_bind_alike_only_where_the_model_was_seen_to_do_the_same(tree: Any) -> None:
    leaves = (ConstantLeaf("x", 0), *([ConstantLeaf("options", None)] if tree == 1 else []))
    signature = Signature((Parameter("x", 0), Parameter("options", tree, default=None)), leaves)
    alike = make_binder(signature, empty_is_none={"options"})
    for args in ([0], [0, None], [0, {}]):
        assert alike(args, {}) == [0, None][: len(leaves)]
    if tree == 1:
        assert make_binder(signature)([0, {}], {}) == [0, {}]  # which its guard refuses
        assert alike([0, {"scale": 1}], {}) == [0, {"scale": 1}]
        return
    with pytest.raises(StructureMismatch, match="an empty dict") as caught:
        make_binder(signature)([0, None], {})
    assert caught.value.hint.startswith("pass {}")
    with pytest.raises(StructureMismatch, match="an empty dict"):
        alike([0, {"scale": 1}], {})


def test_a_tensor_that_is_left_out_is_filled_by_its_default_at_the_sizes_of_the_others() -> None:
    leaves = (TensorLeaf("ids", "int64", ("n", 3)), TensorLeaf("mask", "bool", (2, "n", 1), default=1))
    signature = Signature((Parameter("ids", 0), Parameter("mask", 1, default=None)), leaves)
    bind = with_defaults(make_binder(signature), makers_of(signature, torch.device("cpu")))
    ids, mask = torch.zeros(5, 3, dtype=torch.int64), torch.zeros(2, 5, 1, dtype=torch.bool)
    for args in ([ids], [ids, None]):
        _, made = bind(args, {})
        assert made.dtype is torch.bool
        assert torch.equal(made, torch.ones(2, 5, 1))
    assert bind([ids, mask], {})[1] is mask
    for odd in (None, 3, torch.tensor(3)):  # a miss, which the guards explain
        assert bind([odd], {}) == [odd, None]


def test_what_goes_through_kwargs_keeps_its_order_and_named_parameters_come_in_any() -> None:
    kinds = {"x": "either", "a": "keyword", "b": "keyword", "p": "extra", "q": "extra"}
    parameters = tuple(Parameter(name, index, kind) for index, (name, kind) in enumerate(kinds.items()))
    signature = Signature(parameters, tuple(ConstantLeaf(name, 0) for name in kinds))
    bind = make_binder(signature)
    assert bind([], {"b": 2, "p": 3, "a": 1, "q": 4, "x": 0}) == [0, 1, 2, 3, 4]
    other = {"b": 2, "q": 4, "a": 1, "p": 3, "x": 0}
    with pytest.raises(StructureMismatch) as caught:
        bind([], other)
    assert (caught.value.path, caught.value.expected) == ("**kwargs", "p, q in this order")
    assert list(caught.value.came) == ["q", "p"]
    assert make_binder(signature, any_order=True)([], other) == [0, 1, 2, 3, 4]


def test_an_optional_constant_that_a_call_leaves_out_is_the_compiled_one() -> None:
    for kind, default in (("either", None), ("extra", msgspec.UNSET)):
        parameters = (Parameter("x", 0), Parameter("use_cache", 1, kind, default, optional=True))
        bind = make_binder(Signature(parameters, (tensor("x", 2), ConstantLeaf("use_cache", False))))
        assert bind((1,), {}) == [1, False] == bind((1,), {"use_cache": False})
        assert bind((1,), {"use_cache": True}) == [1, True]


@pytest.mark.parametrize(
    ("batch", "caches", "path", "came"),
    [
        ({"ids": 1}, [2, [3, 4]], "batch", "a dict of ids"),
        ({"ids": 1, "extra": {"mask": 1}, "more": 1}, [2, [3, 4]], "batch", "more"),
        ({"ids": 1, "extra": {"musk": 1}}, [2, [3, 4]], "batch.extra", "musk"),
        ({"ids": 1, "extra": 7}, [2, [3, 4]], "batch.extra", "int 7"),
        ({"ids": 1, "extra": {"mask": 1}}, [2], "caches", "a list of 1"),
        ({"ids": 1, "extra": {"mask": 1}}, [2, (3, 4, 5)], "caches[1]", "a tuple of 3"),
        (None, [2, [3, 4]], "batch", "None"),
        ({"ids": 1, "extra": {"mask": 1}}, "ab", "caches", "str 'ab'"),
    ],
)
def test_other_containers_than_the_records_are_named_by_their_path(
    batch: Any, caches: Any, path: str, came: str
) -> None:
    with pytest.raises(StructureMismatch) as caught:
        nested_binder()([batch, caches], {})
    assert caught.value.path == path
    assert came in describe(caught.value.came)


def test_a_call_of_the_wrong_structure_is_a_miss_and_one_that_does_not_bind_a_type_error() -> None:
    compiled = make_compiled(
        lambda a, b: a + b,
        [tensor("xs.a", 2), tensor("xs.b", 2)],
        parameters=[Parameter("xs", {"a": 0, "b": 1})],
    )
    assert compiled(xs={"a": ones(2), "b": ones(2)}).tolist() == [2, 2]
    with pytest.raises(MissError, match="`xs` must be a dict of a, b, a dict of a came") as caught:
        compiled({"a": ones(2)})
    assert "name those there, and build again" in str(caught.value) and "add a bucket" not in str(caught.value)
    with pytest.raises(TypeError, match="xs"):
        compiled()
    with pytest.raises(TypeError, match="argument: 'xs', and got an unexpected keyword argument 'sx'"):
        compiled(sx={"a": ones(2), "b": ones(2)})
    with pytest.raises(TypeError, match="ys"):
        compiled({"a": ones(2), "b": ones(2)}, ys=1)
    assert compiled.stats().misses == 1
