"""Numbers in a module that calls add to are found by trying, and told from those that calls read."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from remembered_nets import Counted
from torch import Tensor, nn

from aotc.reads.attributes import module_attributes
from aotc.tools.recording.seen_calls import SeenTensor
from aotc.tools.remembering.building.counting_attributes import Counting, CountProbe, counters_of, example_calls


class Adds(nn.Module):
    """Each attribute is used as its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.once = self.twice = self.down = 0
        self.compared = self.multiplied = self.formatted = self.indexed = self.tested = self.sized = (
            self.alternating
        ) = 0
        self.fraction, self.text, self.flag = 0.0, "", False

    def forward(self, x: Tensor) -> Tensor:
        self.once += 1
        self.twice = 1 + self.twice + 1
        self.down -= 1
        for name in ("compared", "multiplied", "formatted", "indexed", "tested", "alternating"):
            setattr(self, name, getattr(self, name) + 1)
        self.sized += len(x)
        self.fraction += 0.5
        self.text, self.flag = f"{self.formatted}", self.tested == 1
        x = x * self.multiplied if self.compared < 100 else x
        return x + x[self.indexed % 2] + (1 if self.tested else 0) + self.alternating % 2


NAMES = [name for name in vars(Adds()) if not name.startswith("_") and name != "training"]


def found(module: nn.Module, names: list[str], argument: str = "x") -> dict[str, int]:
    call = {argument: SeenTensor((3, 8), "float32")}
    return counters_of(module, example_calls(module, call, nullcontext), names)


def test_what_is_only_added_to_is_a_counter() -> None:
    module = Adds()
    assert found(module, [*NAMES, "missing"]) == {"once": 1, "twice": 2, "down": -1}
    assert type(module.once) is int  # it has its own numbers again


def test_counters_of_parts_and_calls_that_take_no_other_size() -> None:
    assert found(nn.Sequential(Counted()), ["0.seen"], "input") == {"0.seen": 1}

    class Fixed(Counted):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(3, 8))

    assert found(Fixed(), ["seen"]) == {}  # what it adds may depend on the size


def test_counters_are_not_compared_and_go_on_counting() -> None:
    module = nn.Sequential(Counted())
    counting = Counting(module, {"0.seen": 2})
    assert "seen" not in module_attributes(module)["0"] and "factor" in module_attributes(module)["0"]
    counting.add()
    counting.add()
    assert module[0].seen == 4
    module[0].seen = None  # the program's own
    counting.add()
    assert module[0].seen is None


@pytest.mark.parametrize(
    "read", [bool, str, hash, int, float, lambda probe: probe == 1, lambda probe: torch.ones(2) * probe]
)
def test_a_number_that_is_read_is_found_out(read: object) -> None:
    with pytest.raises(TypeError):
        read(CountProbe())  # type: ignore[operator]
