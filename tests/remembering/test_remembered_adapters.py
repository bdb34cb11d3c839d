"""Modules with adapters of peft, put in by peft itself and by diffusers: which code ran, beside eager's values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from remembered_nets import Net, secret

import aotc
from aotc.errors import ManifestError
from aotc.manifest import ModelSpec
from aotc.models.factory import build_module
from aotc.tools.recording.peft_adapters import with_adapters
from aotc.tools.remembering.making.made_from import made_from
from aotc.tools.remembering.memory.identity import differences, facts_of

peft = pytest.importorskip("peft")

HERE = Path(__file__).parent

STATES = """
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import BertConfig, BertModel
from diffusers import UNet2DConditionModel

def bert():
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    return BertModel(config).eval()

def unet():
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8,), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=8,
        attention_head_dim=4,
    ).eval()

def lora(*layers, **given):
    return LoraConfig(target_modules=[*layers], init_lora_weights=False, **{"r": 2, **given})

def layers(model):
    return [part for part in model.modules() if isinstance(part, BaseTunerLayer)]

def ran(model, make):
    "What ran, and whether it gave what eager gives."
    with torch.no_grad():
        before, given = model.stats(), make()
        y, want = model(**given)[0], model.module(**given)[0]
        after = model.stats()
        return [after.compiled - before.compiled, after.eager - before.eager, torch.allclose(y, want, atol=1e-5)]
"""

OF_PEFT = """
def told(build):
    net = bert(); model = aotc.compile(net, build=build); seen = {}
    def state(name): seen[name] = ran(model, lambda: {"input_ids": torch.randint(0, 50, (2, 8))})
    if build == "never": state("base, not built")
    inject_adapter_in_model(lora("query", "value"), net, "a").eval(); state("a")
    inject_adapter_in_model(lora("query", r=3, use_dora=True), net, "b").eval()
    for layer in layers(net): layer.set_adapter(["b"])
    state("b")
    for layer in layers(net): layer.set_adapter(["a"]); layer.delete_adapter("b")
    net.peft_config.pop("b")
    for layer in layers(net): vars(layer).pop("adapter_layer_names", None)  # peft leaves those of DoRA
    state("a again")
    if build == "never":
        for layer in layers(net): layer.set_adapter([])
        state("none, not built")
    tell(model, seen=seen)
"""

OF_DIFFUSERS = """
def told(build):
    net = unet(); model = aotc.compile(net, build=build); seen = {}
    def state(name):
        seen[name] = ran(model, lambda: dict(sample=torch.randn(1, 4, 8, 8), timestep=torch.tensor([3]),
                                             encoder_hidden_states=torch.randn(1, 5, 8), return_dict=False))
    net.add_adapter(lora("to_q"), "one"); net.add_adapter(lora("to_k", "to_q", lora_alpha=3), "two")
    net.set_adapters(["one", "two"], [0.5, 0.25]); state("both")
    if build == "never":
        net.set_adapters(["one"], [0.5]); state("one, not built")
        net.set_adapters(["one", "two"], [0.5, 0.25]); state("both again")
    tell(model, seen=seen)
"""


@pytest.mark.compile
@pytest.mark.parametrize("states", [OF_PEFT, OF_DIFFUSERS], ids=["peft", "diffusers"])
def test_each_state_of_a_module_with_adapters_has_code_in_the_second_run(program: Any, states: str) -> None:
    pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    program.above = STATES + states
    first = program.run("told('exit')")["seen"]
    assert all(not compiled and same for compiled, _, same in first.values())
    second = program.run("told('never')")
    expected = {name: [0, 1, True] if "not built" in name else [1, 0, True] for name in second["seen"]}
    assert second["seen"] == expected and first.keys() < expected.keys()


def adapted() -> torch.nn.Module:
    net = Net().eval()
    config = peft.LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    return peft.inject_adapter_in_model(config, net, "a").eval()


def made_again(net: torch.nn.Module, factory: str | None = None) -> torch.nn.Module:
    """As the process that builds makes it: by what was written, and by nothing of this module."""
    made = made_from(net, factory, {})
    text = json.dumps({"factory": made.factory, "kwargs": made.kwargs})
    return build_module(ModelSpec(name="net", inputs={}, buckets=(), **json.loads(text)), HERE)


def changes_of(net: torch.nn.Module) -> list[str]:
    """What differs in the module that a build makes."""
    return list(differences(facts_of(net, {}), facts_of(made_again(net), {})))


def layers_of(net: torch.nn.Module) -> list[Any]:
    return [part for part in net.modules() if hasattr(part, "lora_A")]


def scaled(net: Any) -> None:
    for layer in layers_of(net):
        layer.set_scale("a", 0.25)


def disabled(net: Any) -> None:
    for layer in layers_of(net):
        layer.enable_adapters(False)


def merged(net: Any) -> None:
    for layer in layers_of(net):
        layer.merge()


def second(net: Any) -> None:
    """On another layer, of another rank; both are active."""
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="e[m]bed", init_lora_weights=False)
    peft.inject_adapter_in_model(config, net, "b")
    for layer in layers_of(net):
        layer.set_adapter(["a", "b"])


def deleted(net: Any) -> None:
    """Its layer stays, without an adapter."""
    for layer in layers_of(net):
        layer.delete_adapter("a")
    del net.peft_config


def prepared(net: Any) -> None:
    aotc.adapters.prepare(net, 4)


@pytest.mark.parametrize(
    "changes",
    [(), (scaled,), (disabled,), (merged,), (second,), (second, scaled), (deleted,), (prepared,)],
    ids=lambda changes: "-".join(change.__name__ for change in changes) or "added",
)
def test_a_build_makes_the_module_with_its_adapters(changes: Any) -> None:
    net = adapted()
    for change in changes:
        change(net)
    assert changes_of(net.eval()) == []
    names = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    assert names == {name: tuple(tensor.shape) for name, tensor in made_again(net).state_dict().items()}


def test_layers_that_the_targets_do_not_name_are_named_one_by_one() -> None:
    net = adapted()
    excluded = peft.LoraConfig(r=2, target_modules=["head", "embed"], exclude_modules=["embed"])
    net = peft.inject_adapter_in_model(excluded, net, "b").eval()
    made = made_from(net, None, {})
    assert made.kwargs["adapters"]["b"]["layers"] == ["head"] and "layers" not in made.kwargs["adapters"]["a"]
    assert changes_of(net) == []


def test_a_module_within_one_of_peft_is_made_with_it() -> None:
    net = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["head"]))
    net.add_adapter("b", peft.LoraConfig(r=3, target_modules=["head"]))
    net.set_adapter("b")
    assert changes_of(net.eval()) == []
    assert type(made_again(net)) is peft.PeftModel
    assert changes_of(net.base_model.model) == []  # which `generate()` calls


def test_what_diffusers_does_to_adapters_is_made_too() -> None:
    scope: dict[str, Any] = {}
    pytest.importorskip("transformers"), pytest.importorskip("diffusers")
    exec(f"import torch\n{STATES}", scope)
    net = scope["unet"]()
    base = facts_of(net, {})
    net.add_adapter(scope["lora"]("to_q"), "one")
    net.add_adapter(scope["lora"]("to_k", "to_q", "conv1", lora_alpha=3), "two")
    net.set_adapters(["one", "two"], [0.5, 0.25])
    assert not net.training and any(part.training for part in net.modules())  # new layers are in training mode
    assert changes_of(net) == []
    net.fuse_lora(0.5)
    assert changes_of(net) == []
    net.unfuse_lora()
    net.delete_adapters("one")
    assert changes_of(net) == []
    net.unload_lora()
    assert changes_of(net) == []
    assert facts_of(net, {}) == base and net.lora_scale == 0.5  # which fusing leaves


@pytest.mark.parametrize("kind", [peft.LoHaConfig, peft.LoKrConfig, peft.IA3Config])
def test_other_kinds_of_adapters_are_made_too(kind: Any) -> None:
    config = kind(target_modules=["head"], **({"feedforward_modules": []} if kind is peft.IA3Config else {"r": 2}))
    assert changes_of(peft.inject_adapter_in_model(config, Net().eval(), "c").eval()) == []


def test_adapters_of_another_dtype_than_their_module_are_made_so() -> None:
    net = peft.get_peft_model(Net().bfloat16(), peft.LoraConfig(r=2, target_modules=["head"])).eval()
    net.base_model.model.scale = net.base_model.model.scale.float()  # a buffer keeps its own
    assert {tensor.dtype for tensor in net.parameters()} == {torch.float32, torch.bfloat16}
    assert changes_of(net) == []


def test_adapters_that_a_factory_adds_already_are_not_added_again() -> None:
    net = peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["layers.0"]), secret(), "a").eval()
    made = made_again(net, "remembered_nets:secret")
    assert list(differences(facts_of(net, {}), facts_of(made, {}))) == []
    again = made_from(net, "remembered_nets:secret", {}).kwargs
    twice = with_adapters(made, **{name: value for name, value in again.items() if name != "module"})
    assert list(differences(facts_of(net, {}), facts_of(twice, {}))) == []


def test_adapters_that_cannot_be_told_as_data_are_refused() -> None:
    net = peft.get_peft_model(Net(), peft.VeraConfig(r=2, target_modules=["head"])).eval()
    with pytest.raises(ManifestError, match="of the kind VERA"):
        made_from(net, None, {})
    net = adapted()
    layers_of(net)[0].scaling["a"] = torch.tensor(1.0)
    with pytest.raises(ManifestError, match=r"aotc\.adapters\.prepare"):
        made_from(net, None, {})


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "XLORA", "adapters": {"a": "/somewhere"}},
        {"peft_type": "LORA", "megatron_config": {}, "megatron_core": "evil.core"},
        {"peft_type": "LORA", "auto_mapping": {"parent_library": "evil"}},
        {"peft_type": "os:system"},
        {},
    ],
)
def test_a_configuration_from_anywhere_reaches_no_import(config: dict[str, Any]) -> None:
    with pytest.raises(ManifestError):
        with_adapters(Net(), {"a": {"config": config}}, [])
    with pytest.raises(ManifestError, match="forward"):
        with_adapters(Net(), {}, [], marks={"forward": "print"})


def test_which_adapter_is_active_is_a_fact_but_where_they_are_prepared() -> None:
    net = adapted()
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, target_modules=["head"]), net, "b").eval()
    layers_of(net)[0].set_adapter(["a"])
    of_a = facts_of(net, {})
    layers_of(net)[0].set_adapter(["b"])
    assert facts_of(net, {}) != of_a
    layers_of(net)[0].set_adapter(["a"])
    assert facts_of(net, {}) == of_a
    aotc.adapters.prepare(net, 4)
    before = facts_of(net, {})
    layers_of(net)[0].set_adapter(["b"])
    layers_of(net)[0].set_scale("b", 0.5)
    assert facts_of(net, {}) == before
