"""LoRA adapters of peft: swapped and scaled in place under compiled code, which is bound by regions here."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import FOLDER, Built, build
from torch import nn

import aotc
from aotc import adapters

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.every_torch
X = torch.randn(2, 16)


@pytest.fixture(scope="session")
def built(shared_folder: Path) -> Built:
    return build(shared_folder, FOLDER / "adapters.yaml", {})


@pytest.fixture
def adapted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """tests/models/adapted.py."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import adapted

    yield adapted
    del sys.modules["adapted"]


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def swap(module: nn.Module, name: str, other: nn.Module, config: Any) -> None:
    """Put the only adapter of `other` in the place of an adapter of `module`, by peft."""
    from peft.utils.hotswap import hotswap_adapter_from_state_dict

    state = {key.replace(".new.", f".{name}."): value for key, value in other.state_dict().items() if "lora_" in key}
    hotswap_adapter_from_state_dict(module, state, name, config)


def scale(module: nn.Module, name: str, factor: float) -> None:
    for part in module.modules():
        if hasattr(part, "set_scale"):
            part.set_scale(name, factor)


@pytest.mark.parametrize(("rank", "alpha"), [(1, 4), (4, 32), (8, 2)])
def test_an_adapter_of_a_lower_rank_and_of_any_scale_is_swapped_in_place(
    built: Built, adapted: Any, rank: int, alpha: int
) -> None:
    module = adapted.prepared()
    compiled = aotc.load(f"{built.store}#regions", module)
    other = adapted.plain(names=("new",), seed=rank, r=rank, lora_alpha=alpha)
    swap(module, "one", other, adapted.config(r=rank, lora_alpha=alpha))
    scale(module, "two", 0.0)
    torch.testing.assert_close(compiled(X), other(X))


def test_scales_are_set_by_peft_each_for_itself(built: Built, adapted: Any) -> None:
    module, eager = adapted.prepared(), adapted.plain(r=4, lora_alpha=8)
    compiled = aotc.load(f"{built.store}#regions", module)
    torch.testing.assert_close(compiled(X), eager(X))
    for name, factor in (("one", 0.25), ("two", 3.0)):
        for each in (module, eager):
            scale(each, name, factor)
        torch.testing.assert_close(compiled(X), eager(X))


def test_a_module_whose_adapters_have_another_rank_alpha_and_dropout_is_served(built: Built, adapted: Any) -> None:
    options = {"r": 2, "lora_alpha": 3, "lora_dropout": 0.5}
    compiled = aotc.load(f"{built.store}#regions", adapted.prepared(**options))
    torch.testing.assert_close(compiled(X), adapted.plain(**options)(X))


def select(module: nn.Module, names: list[str]) -> None:
    for part in module.modules():
        if hasattr(part, "lora_A"):
            part.set_adapter(names)


def test_set_adapter_selects_among_the_adapters_of_the_build(built: Built, adapted: Any) -> None:
    module, eager = adapted.prepared(), adapted.plain(r=4, lora_alpha=8)
    compiled = aotc.load(f"{built.store}#regions", module)
    for names in (["one"], ["two"], ["two", "one"]):
        for each in (module, eager):
            select(each, names)
            scale(each, "one", 0.5)  # also while it is not active
        expected = eager(X)
        torch.testing.assert_close(compiled(X), expected)
        assert module.layers[0].query.active_adapters == names
        assert float(module.layers[0].query.scaling["one"]) == 1.0
        compiled.detach()
        torch.testing.assert_close(module(X), expected)
        compiled = aotc.load(f"{built.store}#regions", module)  # with these active ones


def test_a_model_of_peft_selects_disables_and_refuses_what_was_not_built(built: Built, adapted: Any) -> None:
    module, eager = adapted.whole(), adapted.wrapped(r=4, lora_alpha=8)
    module.set_adapter("two")  # the build's was "one"
    compiled = aotc.load(f"{built.store}#whole", module)
    for name in ("one", "two"):
        for each in (module, eager):
            each.set_adapter(name)
        torch.testing.assert_close(compiled(x=X), eager(X))
    with module.disable_adapter(), eager.disable_adapter():
        torch.testing.assert_close(compiled(x=X), eager(X))
    torch.testing.assert_close(compiled(x=X), eager(X))
    module.merge_adapter()
    with pytest.raises(aotc.BindError, match=r'merged_adapters: \[\] at the load, \["two"\] now'):
        compiled(x=X)
    module.unmerge_adapter()
    module.add_adapter("three", adapted.config(r=8))
    with pytest.raises(aotc.BindError, match=r"lora_A\.three: absent at the load, a module now"):
        compiled(x=X)  # forward looks through the names of the adapters
    module.set_adapter("three")
    with pytest.raises(aotc.BindError, match="no longer as it was at the load"):
        compiled(x=X)
    module.set_adapter("two")
    module.delete_adapter("three")
    torch.testing.assert_close(compiled(x=X), eager(X))


def test_larger_ranks_and_other_adapters_are_refused_with_both_values(built: Built, adapted: Any) -> None:
    module = adapted.prepared()
    compiled = aotc.load(f"{built.store}#regions", module)
    swap(module, "one", adapted.plain(names=("new",), r=12), adapted.config(r=12))
    with pytest.raises(aotc.BindError, match=r"built for shape \[8, 16\], the module's is \[12, 16\]"):
        compiled(X)
    other = adapters.prepare(adapted.plain(names=("one", "three"), r=4), rank=adapted.RANK).eval()
    with pytest.raises(
        aotc.BindError, match=r"prepared_adapters: built with \['one', 'two'\], here it is \['one', 'three'\]"
    ):
        aotc.load(f"{built.store}#regions", other)


def test_scales_that_compiled_code_would_take_for_constants_are_refused(built: Built) -> None:
    unit = built.unit("unprepared")
    assert "the scale of an adapter is a tensor that its layer does not register" in str(unit)
    assert "aotc.adapters.prepare" in str(unit)


def test_a_copy_and_a_cast_have_scales_of_their_own(adapted: Any) -> None:
    module = adapted.prepared()
    copied, layer = copy.deepcopy(module), module.layers[0].query
    scale(module, "one", 0.0)
    assert float(layer.scaling["one"]) == 0.0 and float(copied.layers[0].query.scaling["one"]) == 2.0
    module.double()
    scale(module, "one", 0.5)
    assert layer.scaling["one"].dtype == torch.float64
    assert layer.scaling["one"] is dict(layer.named_buffers())["scaling_one"]
    assert not any("scaling" in name for name in module.state_dict())
    del layer.scaling["one"]
    assert "one" not in layer.scaling and layer.scaling.get("one") is None


def test_rows_of_a_batch_name_adapters_that_are_not_active(adapted: Any) -> None:
    layer, eager = adapted.prepared().layers[0].query, adapted.plain(r=4, lora_alpha=8).layers[0].query
    layer.set_adapter(["one"])
    names = ["two", "one"]
    torch.testing.assert_close(layer(X, adapter_names=names), eager(X, adapter_names=names))


def test_copies_and_pickles_keep_the_scales_of_adapters_that_are_not_active(adapted: Any) -> None:
    module = adapted.prepared()
    select(module, ["one"])
    expected = module(X)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(other(X), expected)
        select(other, ["one", "two"])
        torch.testing.assert_close(other(X), adapted.plain(r=4, lora_alpha=8)(X))
    torch.testing.assert_close(module(X), expected)


def test_which_adapters_are_active_stays_python_s_where_a_scale_of_0_would_not_switch_them_off(adapted: Any) -> None:
    module = adapted.prepared(use_dora=True)
    eager = adapted.plain(use_dora=True, r=4, lora_alpha=8)
    for names in (["one", "two"], ["two"]):
        for each in (module, eager):
            select(each, names)
        torch.testing.assert_close(module(X), eager(X))
    layer = module.layers[0].query
    assert vars(layer)["_active_adapter"] == ["two"] and float(layer.scaling_one) == 2.0  # compared, and live


def test_a_module_without_adapters_is_refused() -> None:
    with pytest.raises(aotc.BindError, match="no LoRA layers"):
        adapters.prepare(nn.Linear(2, 2))
