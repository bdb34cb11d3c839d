"""A module's state is as before once it was called, whatever forward did to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from aotc.models.calls import state_put_back, writable_buffers, written_integers_reset


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("shared", torch.ones(1, 2).expand(4, 2))  # no program can write to it
        self.register_buffer("pairs", torch.eye(3).to_sparse())
        with torch.inference_mode():
            self.register_buffer("frozen", torch.ones(2))


def adds(module: Keeps) -> None:
    module.total.add_(1)


def adds_unseen(module: Keeps) -> None:
    module.total.data.add_(1)


def replaces(module: Keeps) -> None:
    module.total = torch.ones(3)


def fails(module: Keeps) -> None:
    module.total.add_(1)
    raise ValueError


@pytest.mark.parametrize("forward", [adds, adds_unseen, replaces, fails])
def test_buffers_are_put_back(forward: Callable[[Keeps], None]) -> None:
    module = Keeps()
    total = module.total
    names = writable_buffers(module)
    assert names == ["total", "shared"]
    try:
        with state_put_back(module, names):
            forward(module)
            assert module.total.tolist() == [1, 1, 1]
    except ValueError:
        assert forward is fails
    assert module.total is total and module.total.tolist() == [0, 0, 0]
    assert module.shared.tolist() == [[1, 1]] * 4


def test_integers_count_anew_in_each_repeated_call_and_floats_are_left() -> None:
    length, keys = torch.tensor(5), torch.zeros(2)
    reset = written_integers_reset([length, keys])
    for _ in range(3):
        reset()
        assert length.item() == 5
        length.add_(4)
        keys.add_(1)
    assert (length.item(), keys.tolist()) == (9, [3.0, 3.0])
    written_integers_reset([keys])()
    assert keys.tolist() == [3.0, 3.0]
