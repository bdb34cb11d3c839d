"""Views of inputs that came in another layout, or were padded: eager's own views of the caller's tensor."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest
import torch
from fuzzing.view_chains import SOURCES, chain_of, evaluated
from torch import Tensor

from aotc.errors import CorruptError, LibraryError
from aotc.reads.tensors import dtype_name, same_bits
from aotc.records import Output, StridedView
from aotc.tensors.sharing import differences, sharing
from aotc.tensors.strided_views import make_view


def view_of(base: Tensor, value: Tensor) -> StridedView:
    """What a build writes down of a view."""
    offset = (value.data_ptr() - base.data_ptr()) // value.element_size() if value.numel() else 0
    dtype = "" if value.dtype == base.dtype else dtype_name(value.dtype)
    return StridedView(tuple(value.shape), value.stride(), offset, dtype, value.is_conj(), value.is_neg())


def made(view: StridedView, given: Tensor, ran: Tensor, dims: tuple[str, ...] = (), **sizes: int) -> Tensor:
    make = make_view(Output(leaf=0, view=view, dims=dims), view, lambda leaves: sizes)
    return make(given, ran, [given], [ran])


def spread(tensor: Tensor, random: Random) -> Tensor:
    """The same elements in another layout: in a longer tensor, with the axes in another order."""
    order = random.sample(range(tensor.dim()), tensor.dim())
    last = order[-1]
    longer = torch.cat([tensor, tensor], last) if random.random() < 0.5 else tensor
    lying = longer.permute(order).contiguous().permute([order.index(axis) for axis in range(tensor.dim())])
    return lying.narrow(last, 0, tensor.shape[last])


def alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and same_bits(one, other)


@pytest.mark.parametrize("seed", range(400))
def test_a_chain_of_views_is_eagers_in_every_layout(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    source = random.choice(["x", "q", "z"])
    chain = chain_of(random, source)
    base = SOURCES[source](6)
    expected = evaluated(chain, base)
    if not sharing({"view": expected}, {"base": base}):
        return  # a copy
    view = view_of(base, expected)
    assert alike(made(view, base, base), expected)
    given = spread(base, random)
    found = made(view, given, base)
    assert alike(found, expected)
    try:
        of_given = evaluated(chain, given)
    except RuntimeError:  # `view` refuses it
        return
    if alike(of_given, expected) and sharing({"view": of_given}, {"base": given}):  # `reshape` may copy it
        assert not differences(*(sharing({"view": each}, {"base": given}) for each in (of_given, found)))


@pytest.mark.parametrize(
    ("part", "dims", "at_4"),
    [
        (lambda x: x[:, 1:3], ("n", ""), lambda x: x[:, 1:3]),
        (lambda x: x[1:], ("n + -1", ""), lambda x: x[1:]),
        (lambda x: x.t(), ("", "n"), lambda x: x.t()),
        (lambda x: x.reshape(-1), ("6*n",), lambda x: x.reshape(-1)),
        (lambda x: x.view(torch.int16), ("n", ""), lambda x: x.view(torch.int16)),
        (lambda x: x[2], (), lambda x: x[2]),
    ],
)
def test_a_view_of_a_padded_input_is_one_of_the_callers(part: Any, dims: tuple[str, ...], at_4: Any) -> None:
    given = torch.randn(4, 6)
    ran = torch.cat([given, torch.zeros(3, 6)])
    found, expected = made(view_of(ran, part(ran)), given, ran, dims, n=4), at_4(given)
    assert alike(found, expected)
    assert not differences(*(sharing({"view": each}, {"x": given}) for each in (expected, found)))


def test_a_view_of_padded_elements_is_refused() -> None:
    given = torch.randn(8, 6)[:4]  # which lies in a longer tensor
    ran = torch.cat([given, torch.zeros(3, 6)])
    with pytest.raises(LibraryError, match=r"has the shape \[5, 6\].* caller's tensor of shape \[4, 6\]") as refused:
        made(view_of(ran, ran[:5]), given, ran)
    assert "clone()" in refused.value.hint


def test_sizes_of_a_range_are_those_of_the_call() -> None:
    view = StridedView(("n", "n // 2"), ("2*n", 2), "n - 1")
    base = torch.arange(64.0)
    for n in (3, 5):
        expected = base.as_strided((n, n // 2), (2 * n, 2), n - 1)
        assert torch.equal(made(view, base, base, n=n), expected)


def test_a_view_beyond_its_tensor_is_a_corrupt_record() -> None:
    base, view = torch.zeros(4), StridedView((8,), (1,))
    with pytest.raises(CorruptError, match="does not fit a tensor of shape"):
        made(view, base, base)
    with pytest.raises(CorruptError, match="expression"):
        make_view(Output(leaf=0), msgspec.structs.replace(view, offset="n.x"), lambda leaves: {})
