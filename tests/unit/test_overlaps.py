"""Which tensors lie in one memory, against sets of addresses."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from aotc.tensors.layouts import has_memory
from aotc.tensors.overlaps import Places, overlapping
from aotc.tensors.strides import overlaps_itself

ADDRESSES = torch.arange(80)
views = st.builds(
    lambda shape, stride, offset: ADDRESSES.as_strided(shape, stride, offset),
    st.tuples(*[st.integers(0, 3)] * 2),
    st.tuples(*[st.integers(0, 6)] * 2),
    st.integers(0, 6),
)


@given(st.lists(st.tuples(views, st.booleans()), min_size=2, max_size=4))
def test_overlaps_are_those_of_the_addresses(pairs: list[tuple[torch.Tensor, bool]]) -> None:
    tensors = [tensor for tensor, _ in pairs]
    written = {index for index, (_, each) in enumerate(pairs) if each}
    places = [set(tensor.flatten().tolist()) for tensor in tensors]
    both = [(i, j) for i, j in itertools.combinations(range(len(tensors)), 2) if places[i] & places[j]]
    assert set(overlapping(tensors, written)) == {pair for pair in both if not written.isdisjoint(pair)}
    last = len(tensors) - 1
    assert Places(tensors[:last]).overlapped_by(tensors[last]) == [i for i, j in both if j == last]


@given(views)
def test_a_tensor_of_which_two_elements_lie_at_one_place_overlaps_itself(tensor: torch.Tensor) -> None:
    if len(set(tensor.flatten().tolist())) < tensor.numel():
        assert overlaps_itself(tensor.shape, tensor.stride())
    if tensor.is_contiguous() and tensor.numel():
        assert not overlaps_itself(tensor.shape, tensor.stride())


def test_what_has_no_address_has_no_memory() -> None:
    emptied = torch.ones(2)
    emptied.untyped_storage().resize_(0)
    for tensor in (torch._efficientzerotensor((2,)), torch._to_functional_tensor(torch.ones(2)), emptied):
        assert not has_memory(tensor)
    assert has_memory(torch.ones(2))
    assert not torch.func.vmap(lambda x: x * has_memory(x))(torch.ones(2, 3)).any()
