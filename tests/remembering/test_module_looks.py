"""How calls in eager see whether the module is as it was: seldom, and telling what calls change from the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Scaled
from torch import Tensor, nn

import aotc
from aotc.tools.remembering.building.builds import Builds
from aotc.tools.remembering.module_changes import LOOKS_AFTER
from aotc.tools.remembering.module_look import ModuleLook


class NowAndThen(Scaled):
    """Every seventh call changes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.noted = -1

    def forward(self, x: Tensor) -> Tensor:
        if self.steps.item() % 7 == 6:
            self.noted = int(self.steps)
        self.steps += 1
        return super().forward(x)


class Keeps(dict[str, Any]):
    """Of these any two are equal."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Builds, "wait", lambda *_: True)
    monkeypatch.setattr(Builds, "start", lambda *_: None)
    yield


@torch.no_grad()
def called(model: nn.Module, times: int) -> None:
    x = torch.randn(3, 8)
    for _ in range(times):
        model(x)


def test_a_call_that_changes_nothing_looks_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    holds = ModuleLook.holds
    monkeypatch.setattr(ModuleLook, "holds", lambda look: looks.append(holds(look)) or looks[-1])
    model = aotc.compile(Scaled().eval(), store=tmp_path, build="exit")
    called(model, LOOKS_AFTER)
    looks.clear()
    called(model, 20)
    assert looks == [True] * 20


def test_what_calls_change_now_and_then_is_found(tmp_path: Path) -> None:
    model = aotc.compile(NowAndThen().eval(), store=tmp_path, build="exit")
    called(model, 40)
    name = model.explain().name
    called(model, 40)
    assert model.module.noted == 76 and model.explain().name == name
    assert model.stats().eager == 80


def test_what_a_program_changes_between_calls_is_no_change_of_calls(tmp_path: Path) -> None:
    model = aotc.compile(Scaled().eval(), store=tmp_path, build="exit")
    names = []
    for factor in (1.0, 2.0, 3.0, 2.0, 1.0):
        model.factor = factor
        called(model, 1 + 2 * LOOKS_AFTER)
        names.append(model.explain().name)
    assert len(set(names)) == 3 and names[:2] == names[:2:-1]


def test_each_change_of_a_module_is_seen() -> None:
    module = nn.Sequential(OrderedDict(one=nn.Linear(2, 2), two=nn.Linear(2, 2), scaled=Scaled()))
    scaled = module.scaled
    scaled.kept, scaled.listed = Keeps(a=1), [1, {"b": 2}]
    weight = scaled.linear.weight
    changes = [
        lambda: setattr(scaled, "factor", 2.0),
        lambda: setattr(scaled, "new", 1),
        lambda: scaled.kept.update(a=2),
        lambda: scaled.listed.append(1),
        lambda: scaled.listed[1].update(b=3),
        lambda: module._modules.update(one=module._modules.pop("one")),  # to the end
        lambda: scaled.linear.register_buffer("more", torch.zeros(1)),
        lambda: setattr(weight, "data", weight.data.half()),
        lambda: scaled.register_forward_hook(lambda *_: None),
        lambda: setattr(scaled, "linear", nn.Linear(8, 8)),
    ]
    for number, change in enumerate(changes):
        look = ModuleLook(module)
        assert look.holds()
        change()
        assert not look.holds(), number
