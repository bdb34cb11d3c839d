"""The sizes at which a bucket is verified: each of them dispatched to it, its edges and its inside among them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_artifact import small_artifact

from aotc.call_table.dispatch import Dispatcher
from aotc.records import Bucket, Output, PadRule, Signature, SizeRange, TensorLeaf, Variant
from aotc.verify.cases import VerifyStep, describe_sizes, sizes_at_extremes, sizes_to_verify, steps_of


def dispatcher(buckets: list[Bucket], *shape: str, pad: tuple[str, ...] = ()) -> Dispatcher:
    leaf = TensorLeaf("x", "float32", shape, pad={name: PadRule() for name in pad})
    empty = Variant({}, library="", files=(), arguments=(), outputs=(Output(index=0),), output_tree=0)
    variants = tuple(msgspec.structs.replace(empty, bucket=bucket, padded=pad) for bucket in buckets)
    artifact = small_artifact(signature=Signature((), (leaf,)), variants=variants)
    return Dispatcher(artifact.signature, artifact.variants)


def verified(made: Dispatcher, index: int, dim: str = "seq") -> list[int]:
    return sorted({sizes[dim] for sizes in sizes_to_verify(made, index)})


def test_a_range_is_verified_at_its_ends_beside_them_and_around_eight() -> None:
    assert verified(dispatcher([{"seq": SizeRange(1, 512, tune_at=256)}], "seq"), 0) == [1, 2, 7, 8, 9, 256, 511, 512]


def test_a_range_of_multiples_is_verified_at_multiples() -> None:
    sizes = verified(dispatcher([{"seq": SizeRange(8, 64, multiple_of=8, tune_at=64)}], "seq"), 0)
    assert sizes == [8, 16, 56, 64]


def test_a_bucket_without_padding_is_verified_at_its_own_sizes() -> None:
    assert sizes_to_verify(dispatcher([{"batch": 2, "seq": 8}], "batch", "seq"), 0) == [{"batch": 2, "seq": 8}]


def test_a_padded_bucket_is_verified_at_both_edges_and_strictly_inside() -> None:
    made = dispatcher([{"seq": 8}, {"seq": 64}], "seq", pad=("seq",))
    assert verified(made, 0) == [1, 4, 7, 8]
    assert verified(made, 1) == [9, 36, 63, 64]


def test_a_padded_range_is_verified_at_what_is_padded_into_it_too() -> None:
    made = dispatcher([{"seq": SizeRange(16, 64, multiple_of=8, tune_at=32)}], "seq", pad=("seq",))
    assert verified(made, 0) == [1, 15, 16, 17, 24, 32, 56, 63, 64]


def test_a_model_without_dims_is_verified_once() -> None:
    assert sizes_to_verify(dispatcher([{}]), 0) == [{}]


def test_a_bucket_that_nothing_is_dispatched_to_has_no_sizes() -> None:
    assert sizes_to_verify(dispatcher([{"seq": 8}, {"seq": 8}], "seq"), 1) == []


def test_live_weights_are_verified_with_others_after_all_buckets_and_frozen_ones_are_not() -> None:
    made = dispatcher([{"seq": 8}, {"seq": 64}], "seq")
    own, extremes = [VerifyStep(0), VerifyStep(1)], [VerifyStep(0, extremes=True), VerifyStep(1, extremes=True)]
    artifact = small_artifact(weights="frozen")
    assert steps_of(artifact, made) == [*own, *extremes]
    artifact = msgspec.structs.replace(artifact, weights="live")
    assert steps_of(artifact, made) == [
        *own,
        VerifyStep(0, "other"),
        VerifyStep(1, "other"),
        VerifyStep(0, "swapped"),
        *extremes,
    ]


@pytest.mark.parametrize(
    ("bucket", "sizes"),
    [
        (SizeRange(1, 512, tune_at=256), 65),
        (SizeRange(2, 40, tune_at=40), 33),
        (SizeRange(2, 400, tune_at=8), 9),
        (SizeRange(2, 4, tune_at=4), 3),
        (SizeRange(200, 300, tune_at=256), 256),
        (SizeRange(8, 64, multiple_of=8, tune_at=64), 64),
        (12, 12),
    ],
)
def test_extreme_inputs_have_a_length_that_is_no_vector_s(bucket: Any, sizes: int) -> None:
    assert sizes_at_extremes(dispatcher([{"seq": bucket}], "seq"), 0) == {"seq": sizes}


def test_extreme_inputs_have_a_size_that_is_dispatched_to_their_bucket() -> None:
    made = dispatcher([{"seq": 65}, {"seq": SizeRange(1, 100, tune_at=65)}], "seq")
    assert sizes_at_extremes(made, 0) == {"seq": 65}
    assert sizes_at_extremes(made, 1) == {"seq": 1}
    assert sizes_at_extremes(dispatcher([{"seq": 8}, {"seq": 8}], "seq"), 1) is None


sizes = st.integers(1, 9)
ranges = st.builds(lambda low, width: SizeRange(low, low + width, tune_at=low), st.integers(0, 9), st.integers(1, 9))


@given(
    st.lists(st.fixed_dictionaries({"a": sizes | ranges, "b": sizes | ranges}), min_size=1, max_size=5),
    st.lists(st.sampled_from(["a", "b"]), unique=True),
)
def test_every_size_is_one_that_dispatch_gives_to_the_bucket(buckets: list[Any], pad: list[str]) -> None:
    made = dispatcher(buckets, "a", "b", pad=tuple(pad))
    for index in range(len(buckets)):
        chosen = sizes_to_verify(made, index)
        assert len({tuple(dims.items()) for dims in chosen}) == len(chosen)
        for dims in chosen:
            plan = made.plan((dims["a"], dims["b"]))
            assert plan is not None
            assert plan.variant == index


def test_sizes_are_described_by_their_dims_in_order() -> None:
    assert describe_sizes({"seq": 8, "batch": 2}) == "batch=2,seq=8"
    assert describe_sizes({}) == "-"
