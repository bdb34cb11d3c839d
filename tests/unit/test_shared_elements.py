"""Which tensors of a call share memory, and how two calls differ in that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aotc.tensors.sharing import Sharing, differences, kept_in_place, sharing


def shared_by(result: Callable[[Tensor], Tensor], base: Tensor | None = None) -> Sharing:
    base = torch.arange(24.0).view(4, 6) if base is None else base
    return sharing({"output": result(base)}, {"the input `x`": base})


@pytest.mark.parametrize(
    ("eager", "compiled", "said"),
    [
        (lambda x: x[1:], lambda x: x[1:], ""),
        (lambda x: x[1:], lambda x: x[1:].clone(), "output lies in the memory of the input `x` in eager, and not in"),
        (lambda x: x[1:].clone(), lambda x: x[1:], "output lies in the memory of the input `x`, unlike in eager"),
        (lambda x: x[1:], lambda x: x[:3], "output has other elements of the input `x` in compiled code"),
        (lambda x: x.t(), lambda x: x.view(6, 4), "output has other elements"),
        (lambda x: x[0].expand(2, 6), lambda x: x[:2], "output has other elements"),
        (lambda x: x.view(torch.int32), lambda x: x, ""),
        (lambda x: x.view(torch.int16)[:, ::2], lambda x: x.view(torch.int16)[:, 1::2], "output has other elements"),
        (lambda x: x[4:], lambda x: x[4:].clone(), ""),  # no element
    ],
)
def test_results_lie_at_the_same_elements_or_it_is_said(
    eager: Callable[[Tensor], Tensor], compiled: Callable[[Tensor], Tensor], said: str
) -> None:
    found = differences(shared_by(eager), shared_by(compiled))
    assert len(found) == bool(said) and all(said in sentence for sentence in found)


def test_a_result_that_lies_in_a_longer_tensor_shares_the_same_elements() -> None:
    """Compiled code may give its results other strides, and gaps."""
    spaced = torch.zeros(4, 12)[:, ::2]
    assert not differences(shared_by(lambda x: x[1:]), shared_by(lambda x: x[1:], spaced))


def test_a_large_tensor_is_looked_at_by_its_edges() -> None:
    large = torch.zeros(300, 40, 20)
    one, other = (shared_by(lambda x, at=at: x[at:], large) for at in (1, 2))
    assert len(differences(one, other)) == 1


def test_results_share_with_one_another() -> None:
    fresh = torch.zeros(4)
    shared = sharing({"output 0": fresh[:3], "output 1": fresh[1:]}, {})
    apart = sharing({"output 0": fresh[:3], "output 1": fresh[1:].clone()}, {})
    assert differences(shared, apart)[0].startswith("output 0 lies in the memory of output 1 in eager")
    assert differences(shared, apart, {"output 1"}) == []


def test_an_attribute_that_was_assigned_anew_is_no_tensor_to_share_with() -> None:
    kept, old = torch.zeros(2), torch.zeros(2)
    before = {"kept": kept, "seen": kept[1:], "assigned": old, "gone": old}
    after = {"kept": kept, "seen": kept[1:], "assigned": old + 1}
    assert kept_in_place(before, after).keys() == {"kept", "seen"}
