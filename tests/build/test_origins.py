"""Which of what a library writes about a checkpoint a capture reads. Nothing is compiled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aotc.build.origins import origins_read
from aotc.snapshot import CONFIG_ORIGINS


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
    with origins_read(model) as origins:
        model(read)
    assert origins == expected
    assert [dict(vars(cls)) for cls in (Model, Config)] == before


def test_what_is_read_and_written_is_the_objects_own() -> None:
    model, other = Model(Config(dtype="float32")), Model(Config())
    with origins_read(model):
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

    with origins_read(Own()) as origins:
        Own()(torch.ones(1))
    assert origins == set()
