"""The documented rule of dispatch, example by example and against a reference that is plain and slow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hand_built import make_artifact, make_compiled, tensor
from hypothesis import given
from hypothesis import strategies as st

from aotc.call_table.dispatch import REMEMBERED, Dispatcher
from aotc.call_table.obstacles import obstacles
from aotc.errors import CorruptError
from aotc.records import Bucket, Output, PadRule, Signature, SizeRange, TensorLeaf

PAD = PadRule(value=0)


def dispatcher(
    leaves: list[TensorLeaf], buckets: list[Bucket], conditions: Any = None, padded: Iterable[str] = ()
) -> Dispatcher:
    artifact = make_artifact(leaves, buckets, conditions=conditions, padded=sorted(padded))
    return Dispatcher(artifact.signature, artifact.variants)


def chosen(made: Dispatcher, **sizes: int) -> tuple[int, str] | None:
    plan = made.plan(tuple(sizes[name] for name in made.dims.names))
    return None if plan is None else (plan.variant, plan.kind)


def seq_leaf(**fields: Any) -> TensorLeaf:
    return tensor("x", "batch", "seq", pad={"batch": PAD, "seq": PAD}, **fields)


# -- the rule ---------------------------------------------------------------------------------------------------------


def test_the_exact_bucket_comes_before_any_range_and_any_padding() -> None:
    buckets = [{"batch": 8, "seq": SizeRange(1, 64)}, {"batch": 8, "seq": 64}, {"batch": 8, "seq": 32}]
    assert chosen(dispatcher([seq_leaf()], buckets), batch=8, seq=32) == (2, "exact")


def test_a_padded_bucket_comes_before_a_range() -> None:
    buckets = [{"batch": 8, "seq": SizeRange(1, 64)}, {"batch": 8, "seq": 64}]
    assert chosen(dispatcher([seq_leaf()], buckets), batch=8, seq=32) == (1, "padded")


def test_the_cheapest_padded_bucket_is_the_one_with_the_fewest_input_elements() -> None:
    buckets = [{"batch": 8, "seq": 16}, {"batch": 2, "seq": 63}, {"batch": 1, "seq": 200}]
    assert chosen(dispatcher([seq_leaf()], buckets), batch=2, seq=10) == (1, "padded")  # 126 < 128 elements
    assert chosen(dispatcher([seq_leaf()], buckets), batch=3, seq=10) == (0, "padded")


def test_equally_cheap_padded_buckets_go_by_their_sizes_in_order_whatever_the_order_of_the_artifact() -> None:
    for buckets in itertools.permutations([{"batch": 4, "seq": 16}, {"batch": 8, "seq": 8}, {"batch": 16, "seq": 4}]):
        made = dispatcher([seq_leaf()], list(buckets))
        index, kind = chosen(made, batch=1, seq=3) or (None, None)
        assert kind == "padded"
        assert buckets[index] == {"batch": 4, "seq": 16}


def test_a_dim_that_one_input_using_it_does_not_pad_must_be_equal() -> None:
    leaves = [seq_leaf(), tensor("y", "seq")]
    made = dispatcher(leaves, [{"batch": 8, "seq": 16}])
    assert chosen(made, batch=3, seq=16) == (0, "padded")
    assert chosen(made, batch=8, seq=15) is None


def test_a_request_that_no_bucket_takes_as_it_is_is_padded_to_the_next_size_of_a_range() -> None:
    buckets = [{"batch": 8, "seq": SizeRange(16, 64, multiple_of=8)}, {"batch": 8, "seq": SizeRange(1, 32)}]
    made = dispatcher([seq_leaf()], buckets, padded=("batch", "seq"))
    assert chosen(made, batch=8, seq=17) == (1, "range")
    assert chosen(made, batch=8, seq=33) == (0, "padded")
    assert [pad.size for pad in made.plan((8, 33)).pads] == [40]  # type: ignore[union-attr]
    assert chosen(made, batch=3, seq=5) == (1, "padded")
    assert not obstacles(made, 0, (3, 5))
    assert chosen(made, batch=9, seq=64) is None
    (seq,) = obstacles(made, 0, (3, 65))
    assert (seq.message, seq.expected, seq.hint) == ("seq is 65, the bucket takes 16..64 step 8", "16..64 step 8", "")


def test_the_cheapest_padded_range_has_the_fewest_input_elements_then_the_fewest_sizes() -> None:
    steps = [SizeRange(8, 64, multiple_of=8), SizeRange(6, 60, multiple_of=6), SizeRange(12, 24, multiple_of=12)]
    made = dispatcher([seq_leaf()], [{"batch": 1, "seq": size} for size in steps], padded=("seq",))
    assert chosen(made, batch=1, seq=13) == (0, "padded")  # 16, not 18 or 24
    assert chosen(made, batch=1, seq=11) == (2, "padded")  # 12, as the second one


def test_a_condition_of_the_code_is_asked_of_the_padded_sizes() -> None:
    stepped = SizeRange(8, 64, multiple_of=8)
    made = dispatcher([seq_leaf()], [{"batch": 1, "seq": stepped}], {0: ("seq % 16 == 0",)}, padded=("seq",))
    assert chosen(made, batch=1, seq=9) == (0, "padded")
    assert chosen(made, batch=1, seq=7) is None


def test_a_range_is_padded_only_along_dims_that_its_build_knew_of() -> None:
    """What its outputs carry of others is not known, so they could not be cut back."""
    made = dispatcher([seq_leaf()], [{"batch": 8, "seq": SizeRange(8, 64, multiple_of=8)}], padded=("seq",))
    assert chosen(made, batch=8, seq=5) == (0, "padded")
    assert chosen(made, batch=3, seq=8) is None


def test_a_range_s_input_that_is_not_padded_is_said_with_what_to_do() -> None:
    made = dispatcher([tensor("x", "seq")], [{"seq": SizeRange(8, 64, multiple_of=8)}])
    (issue,) = obstacles(made, 0, (9,))
    assert issue.message == "seq is 9, the bucket takes 8..64 step 8 and its inputs are not padded"
    assert issue.hint == "give the inputs `pad: {seq: …}` in the manifest"
    (issue,) = obstacles(made, 0, (65,))
    assert (issue.message, issue.hint) == ("seq is 65, the bucket takes 8..64 step 8", "")


def test_nothing_is_ever_cut_to_fit() -> None:
    assert chosen(dispatcher([seq_leaf()], [{"batch": 8, "seq": 16}]), batch=9, seq=16) is None


def test_the_tightest_range_is_the_one_with_the_fewest_sizes() -> None:
    ranges = [SizeRange(1, 512, tune_at=512), SizeRange(1, 600, multiple_of=100, tune_at=600), SizeRange(100, 220)]
    made = dispatcher([seq_leaf()], [{"batch": 1, "seq": size} for size in ranges])
    assert chosen(made, batch=1, seq=200) == (1, "range")  # 6 sizes
    assert chosen(made, batch=1, seq=201) == (2, "range")
    assert chosen(made, batch=1, seq=221) == (0, "range")
    assert chosen(made, batch=1, seq=601) is None


def test_equally_tight_ranges_go_to_the_one_tuned_nearest_above_then_to_the_first() -> None:
    tuned = [1, 4, 8, 8, 2]
    made = dispatcher([tensor("x", "seq")], [{"seq": SizeRange(1, 8, tune_at=at)} for at in tuned])
    assert chosen(made, seq=3) == (1, "range")
    assert chosen(made, seq=4) == (1, "range")
    assert chosen(made, seq=5) == (2, "range")
    assert chosen(made, seq=1) == (0, "range")
    assert chosen(made, seq=2) == (4, "range")


def test_a_range_whose_compiled_code_has_a_condition_takes_only_what_meets_it() -> None:
    made = dispatcher(
        [tensor("x", "seq")],
        [{"seq": SizeRange(0, 64)}, {"seq": SizeRange(0, 512)}],
        {0: ("seq % 8 == 0", "64 // seq > 1")},
    )
    assert chosen(made, seq=16) == (0, "range")
    assert chosen(made, seq=12) == (1, "range")
    assert chosen(made, seq=0) == (1, "range")  # a condition that cannot be evaluated does not hold


def test_a_model_without_dims_has_one_bucket_that_is_always_exact() -> None:
    assert chosen(dispatcher([tensor("x", 3)], [{}])) == (0, "exact")


def test_of_two_equal_buckets_the_first_runs() -> None:
    assert chosen(dispatcher([tensor("x", "seq")], [{"seq": 3}, {"seq": 3}]), seq=3) == (0, "exact")


@pytest.mark.parametrize("bucket", [{}, {"seq": 3, "batch": 1}, {"batch": 1}, {"seq": SizeRange(1, 8, multiple_of=0)}])
def test_a_bucket_that_cannot_be_dispatched_on_is_a_corrupt_record(bucket: Bucket) -> None:
    with pytest.raises(CorruptError):
        dispatcher([tensor("x", "seq")], [bucket])


def test_answers_are_the_same_after_more_sizes_than_are_remembered() -> None:
    made = dispatcher([tensor("x", "seq")], [{"seq": SizeRange(1, 10**6)}, {"seq": 5}])
    first = [chosen(made, seq=size) for size in (4, 5, 10**6 + 1)]
    for size in range(REMEMBERED + 10):
        made.plan((size,))
    assert [chosen(made, seq=size) for size in (4, 5, 10**6 + 1)] == first == [(0, "range"), (1, "exact"), None]


def test_every_variant_that_is_not_chosen_can_say_why() -> None:
    made = dispatcher([tensor("x", "seq", "k", pad={"k": PAD})], [{"seq": 8, "k": 4}, {"seq": SizeRange(1, 4), "k": 2}])
    (issue,) = obstacles(made, 0, (4, 7))
    assert (issue.expected, issue.actual, issue.hint) == ("8", "7", "give the inputs `pad: {seq: …}` in the manifest")
    assert [(i.expected, i.actual) for i in obstacles(made, 1, (4, 7))] == [("2", "4"), ("1..4", "7")]


# -- against a reference ----------------------------------------------------------------------------------------------


def reference(
    signature: Signature, buckets: list[Bucket], paddable: set[str], request: dict[str, int]
) -> tuple[int, str] | None:
    """The rule of `aotc.call_table.dispatch` and `padding.rules`, as their docstrings have it."""

    def elements(bucket: Bucket) -> int:
        return sum(
            math.prod(entry if isinstance(entry, int) else int(eval(entry, {}, dict(bucket))) for entry in leaf.shape)
            for leaf in signature.leaves
            if isinstance(leaf, TensorLeaf)
        )

    names = sorted(request)
    fixed = [i for i, bucket in enumerate(buckets) if all(isinstance(size, int) for size in bucket.values())]
    for index in fixed:
        if buckets[index] == request:
            return index, "exact"
    padded = [
        index
        for index in fixed
        if all(
            buckets[index][name] >= request[name] and (name in paddable or buckets[index][name] == request[name])
            for name in names
        )
    ]
    if padded:
        return min(padded, key=lambda i: (elements(buckets[i]), [buckets[i][name] for name in names], i)), "padded"
    holding = [
        index
        for index, bucket in enumerate(buckets)
        if index not in fixed
        and all(
            request[name] in range(size.min, size.max + 1) and request[name] % size.multiple_of == 0
            if isinstance(size, SizeRange)
            else size == request[name]
            for name, size in bucket.items()
        )
    ]

    def rank(index: int, sizes: dict[str, Any] = request) -> tuple[Any, ...]:
        ranges = {name: size for name, size in buckets[index].items() if isinstance(size, SizeRange)}
        count = math.prod(len(range(0, size.max - size.min + 1, size.multiple_of)) for size in ranges.values())
        below = [name for name, size in ranges.items() if size.tune_at < sizes[name]]
        return count, len(below), sum(abs(size.tune_at - sizes[name]) for name, size in ranges.items()), index

    if holding:
        return min(holding, key=rank), "range"
    grown: dict[int, Bucket] = {}
    for index in set(range(len(buckets))) - set(fixed):
        larger = {
            name: [
                other
                for other in (range(size.min, size.max + 1) if isinstance(size, SizeRange) else [size])
                if other >= request[name] and (not isinstance(size, SizeRange) or other % size.multiple_of == 0)
            ]
            for name, size in buckets[index].items()
        }
        if all(larger[name] and (name in paddable or request[name] in larger[name]) for name in names):
            grown[index] = {name: larger[name][0] for name in names}
    if not grown:
        return None
    return min(grown, key=lambda index: (elements(grown[index]), rank(index, dict(grown[index])))), "padded"


sizes = st.integers(1, 12)


@st.composite
def size_ranges(draw: st.DrawFn) -> SizeRange:
    step = draw(st.sampled_from([1, 1, 2, 4]))
    low = draw(st.integers(0, 3)) * step
    high = low + draw(st.integers(1, 4)) * step
    tune_at = draw(st.sampled_from(range(low, high + 1, step)))
    return SizeRange(min=low, max=high, multiple_of=step, tune_at=tune_at)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[TensorLeaf], list[Bucket], set[str]]:
    names = draw(st.sampled_from([("a",), ("a", "b"), ("a", "b", "c")]))
    paddable = set(draw(st.lists(st.sampled_from(names), unique=True)))
    pad = dict.fromkeys(sorted(paddable), PAD)
    leaves = [tensor("x", *names, pad=pad), tensor("y", f"2*{names[0]} + {names[-1]}", 3, pad=pad)]
    buckets = draw(
        st.lists(st.fixed_dictionaries({name: sizes | size_ranges() for name in names}), min_size=1, max_size=8)
        | st.lists(st.fixed_dictionaries(dict.fromkeys(names, sizes)), min_size=1, max_size=8)
    )
    return leaves, buckets, paddable


@given(models(), st.data())
def test_the_variant_and_the_kind_are_those_of_the_reference(
    model: tuple[list[TensorLeaf], list[Bucket], set[str]], data: st.DataObject
) -> None:
    leaves, buckets, paddable = model
    made = dispatcher(leaves, buckets, padded=paddable)
    for request in data.draw(
        st.lists(st.fixed_dictionaries({name: st.integers(0, 13) for name in made.dims.names}), min_size=1, max_size=10)
    ):
        assert chosen(made, **request) == reference(made.signature, buckets, paddable, request)


@given(models(), st.data())
def test_a_plan_runs_at_sizes_that_its_variant_takes_and_wastes_what_it_says(
    model: tuple[list[TensorLeaf], list[Bucket], set[str]], data: st.DataObject
) -> None:
    leaves, buckets, paddable = model
    made = dispatcher(leaves, buckets, padded=paddable)
    request = data.draw(st.fixed_dictionaries({name: st.integers(0, 13) for name in made.dims.names}))
    sizes = tuple(request[name] for name in made.dims.names)
    plan = made.plan(sizes)
    if plan is None:
        assert all(obstacles(made, index, sizes) for index in range(len(buckets)))
        return
    ran = [list(shape or ()) for shape in plan.shapes]
    for pad in plan.pads:
        assert pad.size > ran[pad.leaf][pad.axis]
        ran[pad.leaf][pad.axis] = pad.size
    assert plan.request_elements == sum(math.prod(shape or ()) for shape in plan.shapes)
    assert plan.run_elements == sum(map(math.prod, ran))
    assert (plan.kind == "padded") == bool(plan.pads)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True), st.integers(1, 14), st.integers(1, 3))
def test_outputs_of_a_padded_model_equal_eager_on_the_unpadded_input(buckets: list[int], seq: int, batch: int) -> None:
    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = torch.where(mask[:, None, :], x @ x.transpose(1, 2), float("-inf")).softmax(-1)
        return torch.cat([weights @ x, x], dim=2)

    compiled = make_compiled(
        model,
        [
            tensor("x", "batch", "seq", 2, pad={"seq": PadRule(value=7.5), "batch": PAD}),
            tensor(
                "mask", "batch", "seq", dtype="bool", pad={"seq": PadRule(value=False), "batch": PadRule(value=True)}
            ),
        ],
        [{"seq": size, "batch": 2} for size in buckets],
        outputs=(Output(index=0, dims=("batch", "seq", "")),),
        on_miss=lambda error, *args: "miss",
    )
    torch.manual_seed(seq)
    x, mask = torch.randn(batch, seq, 2), torch.ones(batch, seq, dtype=torch.bool)
    result = compiled(x, mask)
    if seq > max(buckets) or batch > 2:
        assert result == "miss"
    else:
        assert torch.allclose(result, model(x, mask), atol=1e-6)
