"""`aotc.attach`: components of a pipeline are replaced by name, all of them or none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import aotc
from examples.models import transformer_block

X = torch.randn(1, 128, 256)


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A pipeline that is not a module, as those of diffusers."""
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    blocks = [transformer_block(width=256, heads=4).eval().requires_grad_(False) for _ in range(2)]
    return SimpleNamespace(quickstart=blocks[0], stack=nn.Sequential(blocks[1]), scheduler=object(), name="pipe")


def test_a_component_is_replaced_by_the_model_of_its_name(pipe: Any, quickstart_store: Path) -> None:
    module = pipe.quickstart
    expected = module(X)
    assert aotc.attach(pipe, quickstart_store) == {"quickstart": module}
    assert torch.allclose(pipe.quickstart(X), expected, atol=1e-4) and pipe.quickstart.stats().calls == 1
    again = aotc.attach(pipe, quickstart_store.as_uri(), on_miss="eager")
    assert list(again) == ["quickstart"] and pipe.quickstart.on_miss == "eager" and pipe.quickstart.module is module


def test_models_says_which_is_which_also_within_components(pipe: Any, quickstart_store: Path) -> None:
    replaced = aotc.attach(pipe, quickstart_store, models={"stack.0": "quickstart", "quickstart": "quickstart:latest"})
    assert replaced.keys() == {"stack.0", "quickstart"}
    assert all(isinstance(each, aotc.Compiled) for each in (pipe.stack[0], pipe.quickstart))


def test_where_no_name_is_in_both_the_error_lists_both(quickstart_store: Path) -> None:
    with pytest.raises(aotc.NotFoundError) as raised:
        aotc.attach(SimpleNamespace(unet=nn.Identity(), vae=nn.Identity()), quickstart_store)
    assert [issue.message for issue in raised.value.issues] == ["the models: quickstart", "the components: unet, vae"]
    with pytest.raises(aotc.NotFoundError, match="the models: none"):
        aotc.attach(SimpleNamespace(quickstart=nn.Identity()), quickstart_store, tag="v7")


def test_where_one_cannot_be_loaded_none_is_replaced(pipe: Any, quickstart_store: Path) -> None:
    before = dict(vars(pipe))
    for wrong, error in (
        ("stack", "TransformerBlock"),
        ("scheduler", "no module 'scheduler'"),
        ("a.b", "no module 'a.b'"),
    ):
        with pytest.raises(aotc.BindError, match=error):
            aotc.attach(pipe, quickstart_store, models={"quickstart": "quickstart", wrong: "quickstart"})
        assert vars(pipe) == before
