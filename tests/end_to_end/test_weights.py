"""Weights, live and frozen: one artifact for many checkpoints, or one that refuses every other; never a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotc


def checkpoint(factory: Any, seed: int, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    module: nn.Module = factory(**kwargs)
    return module.eval()


def agrees(compiled: aotc.Compiled, module: nn.Module, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(compiled(x), module(x), atol=1e-5)


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(2, 8)


@pytest.fixture
def wide() -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(2, 64)


def test_one_live_artifact_serves_two_checkpoints_at_once(zoo_store: Path, zoo: Any, x: torch.Tensor) -> None:
    one, two = checkpoint(zoo.Linear, 1), checkpoint(zoo.Linear, 2)
    first, second = (aotc.load("linear", module, store=zoo_store) for module in (one, two))
    for _ in range(2):
        assert agrees(first, one, x) and agrees(second, two, x)
    assert not torch.allclose(first(x), second(x))


def test_live_weights_are_not_copied(zoo_store: Path, zoo: Any, x: torch.Tensor) -> None:
    module = checkpoint(zoo.Linear, 1)
    pointers = [tensor.data_ptr() for tensor in module.parameters()]
    compiled = aotc.load("linear", module, store=zoo_store)
    with torch.no_grad():
        module.linear.weight.zero_()  # type: ignore[union-attr]
    assert torch.equal(compiled(x), torch.relu(module.linear.bias).expand(2, 8))  # type: ignore[arg-type]
    assert [tensor.data_ptr() for tensor in module.parameters()] == pointers


def test_a_checkpoint_loaded_in_place_is_seen_at_the_next_call(zoo_store: Path, zoo: Any, x: torch.Tensor) -> None:
    module, other = checkpoint(zoo.Linear, 1), checkpoint(zoo.Linear, 2)
    compiled = aotc.load("linear", module, store=zoo_store)
    before = compiled(x)
    module.load_state_dict(other.state_dict())
    assert agrees(compiled, other, x)
    assert not torch.allclose(compiled(x), before)


@pytest.mark.parametrize("way", ["assign", "data", "setattr"])
def test_a_replaced_tensor_is_seen_at_the_next_call(zoo_store: Path, zoo: Any, x: torch.Tensor, way: str) -> None:
    module, other = checkpoint(zoo.Linear, 1), checkpoint(zoo.Linear, 2)
    compiled = aotc.load("linear", module, store=zoo_store)
    compiled(x)
    if way == "assign":
        module.load_state_dict(other.state_dict(), assign=True)
    for name, tensor in other.linear.named_parameters():  # type: ignore[union-attr]
        if way == "data":
            getattr(module.linear, name).data = tensor.data
        elif way == "setattr":
            setattr(module.linear, name, tensor)
    assert agrees(compiled, other, x)


def test_a_replaced_tensor_that_does_not_fit_is_refused_at_the_next_call(
    zoo_store: Path, zoo: Any, x: torch.Tensor
) -> None:
    module = checkpoint(zoo.Linear, 1)
    compiled = aotc.load("linear", module, store=zoo_store)
    compiled(x)
    module.double()
    with pytest.raises(aotc.BindError) as caught:
        compiled(x)
    text = str(caught.value)
    assert "linear.weight: built for dtype float32, the module's is float64" in text
    assert "linear.bias: built for dtype float32, the module's is float64" in text


def test_frozen_weights_load_with_their_own_module_or_with_none(zoo_store: Path, zoo: Any, wide: torch.Tensor) -> None:
    module = checkpoint(zoo.Linear, 0, width=64)
    assert agrees(aotc.load("frozen", module, store=zoo_store), module, wide)
    assert agrees(aotc.load("frozen", store=zoo_store), module, wide)


def test_frozen_weights_refuse_another_checkpoint_and_name_its_tensors(zoo_store: Path, zoo: Any) -> None:
    module = checkpoint(zoo.Linear, 0, width=64)
    with torch.no_grad():
        module.linear.bias[3] += 1e-6  # type: ignore[index, union-attr]
    with pytest.raises(aotc.BindError) as caught:
        aotc.load("frozen", module, store=zoo_store)
    assert [issue.where for issue in caught.value.issues] == ["linear.bias"]
    assert caught.value.issues[0].expected != caught.value.issues[0].actual
    with pytest.raises(aotc.BindError) as caught:
        aotc.load("frozen", checkpoint(zoo.Linear, 1, width=64), store=zoo_store)
    assert sorted(issue.where for issue in caught.value.issues) == ["linear.bias", "linear.weight"]


def test_frozen_weights_refuse_to_run_beside_a_module_that_changed(
    zoo_store: Path, zoo: Any, wide: torch.Tensor
) -> None:
    module = checkpoint(zoo.Linear, 0, width=64)
    compiled = aotc.load("frozen", module, store=zoo_store)
    compiled(wide)
    module.load_state_dict(checkpoint(zoo.Linear, 1, width=64).state_dict())
    with pytest.raises(aotc.BindError, match=r"changed after the load: linear\.bias, linear\.weight;"):
        compiled(wide)


def test_live_weights_need_a_module(zoo_store: Path, zoo: Any) -> None:
    with pytest.raises(aotc.BindError, match="no module was given"):
        aotc.load("linear", store=zoo_store)
