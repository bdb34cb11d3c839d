"""Which attributes of a module and of its objects a capture reads. Nothing is compiled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aotc.compiler.capture.analysis.attribute_reads import absences, attributes_read
from aotc.reads.attributes import CONFIG_ORIGINS


@dataclasses.dataclass
class Config:
    heads: int = 4
    dtype: Any = None
    inner: Any = None


class Model(nn.Module):
    """As those of transformers are: the configuration is everywhere."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.name_or_path = ""
        self.part = nn.Linear(2, 2)
        self.part.config = config

    def forward(self, read: Callable[[Model], Any]) -> Any:
        return read(self)


Config.__module__ = Model.__module__ = "transformers.library"


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda model: model.config.heads, set()),
        (lambda model: model.part.config.dtype, {"dtype"}),
        (lambda model: model.config.inner.dtype, {"dtype"}),
        (lambda model: model.listed[0].dtype, {"dtype"}),
        (lambda model: getattr(model.config, "architectures", None), {"architectures"}),
        (lambda model: hasattr(model.config, "transformers_version"), {"transformers_version"}),
        (lambda model: model.name_or_path, {"name_or_path"}),
        (lambda model: hasattr(model, "hf_device_map"), {"hf_device_map"}),
        (lambda model: vars(model.config), set(CONFIG_ORIGINS)),
        (lambda model: copy.copy(model.config), set(CONFIG_ORIGINS)),
        (lambda model: copy.deepcopy(model.config).heads, set(CONFIG_ORIGINS)),
        (lambda model: dataclasses.asdict(model.config)["heads"], {"dtype"}),
        (lambda model: model.config == Config(), {"dtype"}),
    ],
)
def test_reads_are_noted_and_nothing_stays_behind(read: Callable[[Model], Any], expected: set[str]) -> None:
    model = Model(Config(inner=Config()))
    model.listed = [Config()]  # type: ignore[assignment]
    copy.copy(model.config)  # Python itself notes on a class how it is copied
    before = [dict(vars(cls)) for cls in (Model, Config)]
    with attributes_read(model) as reads:
        model(read)
    assert reads.origins == expected
    assert [dict(vars(cls)) for cls in (Model, Config)] == before


def test_what_is_asked_for_in_vain_is_noted_and_nothing_stays_behind() -> None:
    model = Model(Config())
    before = [dict(vars(cls)) for cls in (Model, Config, torch.nn.Module)]
    with absences(model) as asked:
        assert not hasattr(model, "extra") and getattr(model.config, "more", 3) == 3 and hasattr(model, "config")
        with pytest.raises(AttributeError, match="'Config' object has no attribute 'more'"):
            model.config.more  # type: ignore[attr-defined]  # noqa: B018
    assert asked == {"Model.extra", "Config.more"}
    assert [dict(vars(cls)) for cls in (Model, Config, torch.nn.Module)] == before


def test_what_is_read_and_written_is_the_objects_own() -> None:
    model, other = Model(Config(dtype="float32")), Model(Config())
    with attributes_read(model):
        model.name_or_path = "a/path"
        assert (model.name_or_path, other.name_or_path) == ("a/path", "")
        assert (model.config.dtype, other.config.dtype) == ("float32", None)
        del other.__dict__["name_or_path"]
        assert not hasattr(other, "name_or_path")
    assert model.name_or_path == "a/path"


def test_a_model_of_no_library_has_no_origins() -> None:
    class Own(nn.Module):
        name_or_path = "mine"

        def forward(self, x: Any) -> Any:
            return x, self.name_or_path

    with attributes_read(Own()) as reads:
        Own()(torch.ones(1))
    assert reads.origins == set()


class State:
    shared = 1

    def __init__(self) -> None:
        self.active, self.other = "a", "b"


class Reader(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self._active, self._cache, self.unread, self.states = ["a"], None, 1, {"one": [State()]}
        self.drop = nn.Dropout(0.5)

    @property
    def active(self) -> list[str]:
        return self._active

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._cache is None:
            self._cache = x
        state = self.states["one"][0]
        return self.drop(x) * self.gain * len(self.active) * len(state.active) * state.shared


READ = {"Reader._active", "Reader.gain", "Reader.states", "State.active", "State.shared"}
DROPOUT = {"Dropout.p", "Dropout.training", "Dropout.inplace"}


def test_what_forward_reads_and_does_not_write_of_modules_classes_and_objects_is_noted() -> None:
    model = Reader().eval()
    before = [dict(vars(cls)) for cls in (Reader, State, nn.Dropout)]
    with attributes_read(model) as reads:
        model(torch.ones(2))
    assert reads.names == READ | DROPOUT
    assert [dict(vars(cls)) for cls in (Reader, State, nn.Dropout)] == before
    model = Reader().eval()
    with attributes_read(model) as reads:
        torch.export.export(model, (torch.ones(2),), strict=False)
    assert reads.names == READ | DROPOUT


def test_in_branches_that_dynamo_traces_all_attributes_count() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._scale, self._shift = 2.0, 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda x: x * self._scale, lambda x: x - self._shift, (x,))

    model = Branching().eval()
    with attributes_read(model) as reads, torch.no_grad():
        torch.export.export(model, (torch.ones(2),), strict=False)
    reads.take_all()
    assert reads.names >= {f"{Branching.__qualname__}.{name}" for name in ("_scale", "_shift")}
