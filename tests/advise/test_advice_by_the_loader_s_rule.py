"""The loader's rule, from a manifest alone: the same bucket and the same sizes as the loader chooses."""

from __future__ import annotations

import random

import pytest

from aotc.call_table.dispatch import Dispatcher
from aotc.records import Bucket, PadRule, Signature, Size, SizeRange, TensorLeaf, Variant
from aotc.tools.advise.bucket_dispatch import Dispatch


@pytest.mark.parametrize(
    "padded", [set(), {"seq"}, {"batch", "seq"}], ids=lambda names: ",".join(sorted(names)) or "none"
)
def test_the_rule_is_the_loaders(padded: set[str]) -> None:
    draw = random.Random(7)
    chosen = 0
    for _ in range(60):
        buckets: list[Bucket] = [{"batch": size(draw, 6), "seq": size(draw, 24)} for _ in range(draw.randint(1, 6))]
        loader, ours = rules(buckets, padded)
        shapes = sorted({(draw.randint(1, 7), draw.randint(1, 26)) for _ in range(40)})
        for shape, found in zip(shapes, ours.choose(shapes), strict=True):
            plan = loader.plan(shape)
            assert (plan is None) == (found is None), (buckets, shape)
            if plan and found:
                assert found[0] == plan.variant, (buckets, shape)
                assert found[1][0] * found[1][1] == plan.run_elements
                chosen += 1
    assert chosen > 100


def size(draw: random.Random, largest: int) -> Size:
    if draw.random() < 0.6:
        return draw.randint(1, largest)
    low, high = sorted(draw.sample(range(1, largest + 1), 2))
    step = draw.choice((1, 1, 2, 4))
    first, last = -(-low // step) * step, high // step * step
    return SizeRange(first, last, step, last) if first < last else max(first, 1)


def rules(buckets: list[Bucket], padded: set[str]) -> tuple[Dispatcher, Dispatch]:
    pad = {dim: PadRule(0.0) for dim in padded}
    leaf = TensorLeaf("x", "float32", ("batch", "seq"), pad=pad)
    variants = [
        Variant(bucket, library="", files=(), arguments=(), outputs=(), output_tree=0, padded=tuple(sorted(padded)))
        for bucket in buckets
    ]
    ours = Dispatch(buckets, ("batch", "seq"), frozenset(padded), lambda shape: shape[0] * shape[1])
    return Dispatcher(Signature((), (leaf,)), variants), ours
