"""Results are compared by what they hold: a cache or a configuration is equal to itself alone, and says nothing."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn

from aotc.tensors.contents import contents, same_values


class Layer:
    def __init__(self, seed: int) -> None:
        self.keys, self.length = torch.full((2,), float(seed)), 2
        self._hidden = {"values": torch.ones(3)}


class Slots:
    __slots__ = ("one", "unset")

    def __init__(self) -> None:
        self.one = 1


@dataclasses.dataclass
class Output:
    logits: Any
    cache: Any = None


Pair = namedtuple("Pair", "left right")


def paths(value: Any) -> list[str]:
    return [path for path, part in contents(value).items() if not isinstance(part, type)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(2), [""]),
        ((1, [None, "a"]), ["[0]", "[1][0]", "[1][1]"]),
        (OrderedDict(b=1, a={3: 4}), [".b", ".a[3]"]),
        (UserDict(x=1), [".x"]),
        (Pair(1, 2), ["[0]", "[1]"]),
        (Output(1, Layer(0)), [".logits", ".cache.keys", ".cache.length", ".cache._hidden.values"]),
        (Slots(), [".one"]),
        (torch.topk(torch.ones(3), 1), ["[0]", "[1]"]),
        ({1, 2}, [""]),
        (nn.Linear(2, 2), [""]),
    ],
    ids=lambda part: type(part).__name__,
)
def test_every_part_has_a_path(value: Any, expected: list[str]) -> None:
    assert paths(value) == expected


def test_a_container_is_given_by_its_class() -> None:
    assert contents(([],)) == {"": tuple, "[0]": list}
    assert contents(Output(1))[""] is Output


def test_an_object_that_holds_itself_ends() -> None:
    layer = Layer(0)
    layer.again = layer  # type: ignore[attr-defined]
    assert contents(layer)[".again"] is layer


def test_an_array_is_given_as_a_tensor() -> None:
    numpy = pytest.importorskip("numpy")
    assert torch.equal(contents([numpy.ones(2)])["[0]"], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (1, 1, True),
        (1, 2, False),
        (1, True, False),
        ("a", "a", True),
        (float("nan"), float("nan"), True),
        (tuple, list, False),
        (torch.float32, torch.float64, False),
        (Slots(), Slots(), True),
        (iter([1]), iter([2]), True),
        (Layer(0).__init__, Layer(1).__init__, True),  # type: ignore[misc]
        ({1}, {2}, False),
    ],
    ids=lambda part: type(part).__name__,
)
def test_what_is_no_tensor_is_equal_by_value_or_by_its_class(one: Any, other: Any, same: bool) -> None:
    assert same_values(one, other) is same
