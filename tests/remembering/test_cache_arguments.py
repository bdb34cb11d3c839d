"""Calls with a cache of transformers: `generate()` by compiled code, and a cache as data and tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import aotc
from aotc.tools.remembering.caches.cache_arguments import moved
from aotc.tools.remembering.caches.cache_structure import apart, class_name, is_apart, together

transformers = pytest.importorskip("transformers")

LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM

def llama(**given):
    config = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=50)
    return LlamaForCausalLM(LlamaConfig(**config, intermediate_size=16, max_position_embeddings=64, **given)).eval()

def generated(model, ids, **given):
    return model.generate(ids, do_sample=False, pad_token_id=0, min_new_tokens=12, max_new_tokens=12, **given)
"""

PROGRAM = """
def told(build):
    torch.manual_seed(0); model = llama(); ids = torch.randint(0, 50, (1, 5))
    kinds = [{"cache_implementation": "static"}, {}]
    want = [generated(model, ids, **kind) for kind in kinds]; vars(model).pop("_cache", None)
    model = aotc.compile(model, build=build)
    tokens = [generated(model, ids, **kind) for kind in kinds for _ in range(2)]
    same = [torch.equal(seen, want[number // 2]) for number, seen in enumerate(tokens)]
    stats = model.stats()
    tell(model, same=same, ran=[stats.compiled, stats.eager], forms=[form.form for form in stats.forms])
"""


@pytest.mark.compile
def test_generate_with_a_cache_is_compiled_in_the_second_run(program: Any) -> None:
    program.above = LLAMA + PROGRAM
    assert program.run("told('exit')")["ran"] == [0, 48]
    second = program.run("told('never')")
    assert second["same"] == [True] * 4 and second["ran"] == [48, 0]
    assert len(second["models"]) == 4  # of a new cache and of each further token, static or not
    assert "2..16" in str(second["forms"])  # a cache that grows is a range


def llama(**given: Any) -> Any:
    scope: dict[str, Any] = {}
    exec(LLAMA, scope)
    return scope["llama"](**given)


def generated(model: Any, **given: Any) -> Any:
    scope: dict[str, Any] = {}
    exec(LLAMA, scope)
    return scope["generated"](model, torch.arange(5)[None], **given)


@pytest.mark.parametrize("given", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
def test_a_cache_stays_the_callers_own(given: dict[str, Any], tmp_path: Path) -> None:
    net = llama()
    want = generated(net, **given)
    model = aotc.compile(net, store=tmp_path, build="never")
    vars(net).pop("_cache", None)
    assert torch.equal(generated(model, **given), want)
    cache = transformers.StaticCache(config=net.config, max_cache_len=8)
    with torch.no_grad():
        result = model(torch.arange(3)[None], cache=cache)
        whole = net(torch.arange(4)[None], use_cache=False).logits[:, -1]
        keys = cache.layers[0].keys
        assert torch.allclose(model(torch.tensor([[3]]), cache=cache).logits[:, -1], whole, atol=1e-5)
    assert result.cache is cache and list(result) == ["logits", "cache"]
    assert cache.layers[0].keys is keys and cache.get_seq_length() == 4
    assert model.stats().eager == sum(form.eager for form in model.explain().calls.forms) > 2


def test_generate_does_not_call_torch_s_compiler(tmp_path: Path) -> None:
    model = aotc.compile(llama(), store=tmp_path, build="never")
    config = transformers.CompileConfig()
    config._compile_all_devices = True  # as on a GPU
    generated(model, cache_implementation="static", compile_config=config)
    assert not hasattr(model, "_compiled_call")
    assert model.stats().eager == 12


def test_a_cache_is_a_text_and_tensors_and_becomes_itself_again() -> None:
    cache = transformers.DynamicCache()
    cache.update(torch.ones(2, 1, 3, 4), torch.zeros(2, 1, 3, 4), 0)
    data = apart(cache)
    assert is_apart(data) and [tuple(tensor.shape) for tensor in data["tensors"]] == [(2, 1, 3, 4)] * 2
    again = together(json.loads(data["structure"]), iter(data["tensors"]))
    assert type(again) is type(cache) and again.get_seq_length() == 3
    assert apart(again) == data
    longer = transformers.DynamicCache()
    longer.update(torch.ones(2, 1, 7, 4), torch.zeros(2, 1, 7, 4), 0)
    assert apart(longer)["structure"] == data["structure"]  # another length is the same kind


def test_a_cache_that_has_changed_is_looked_at_anew() -> None:
    cache = transformers.StaticCache(config=llama().config, max_cache_len=4)
    new = apart(cache)
    cache.update(torch.ones(2, 1, 3, 8), torch.zeros(2, 1, 3, 8), 0)
    assert apart(cache)["structure"] != new["structure"]
    assert apart(cache)["structure"] == apart(cache)["structure"]
    cache.layers[0].is_initialized = False
    structure = apart(cache)["structure"]
    cache.layers[0].other = None
    assert apart(cache)["structure"] != structure
    cache.layers.append(cache.layers[0])
    assert len(apart(cache)["tensors"]) == 6
    assert class_name(structure) == "StaticCache" and not any(map(class_name, ("", "StaticCache", 3, None, '["a"]')))


def test_a_text_from_anywhere_makes_caches_alone() -> None:
    for name in ("os.system", "subprocess.Popen", "torch.nn.modules.linear.Linear", "transformers.LlamaModel"):
        with pytest.raises(LookupError):
            together(["cache", name], iter(()))
    with pytest.raises(TypeError):
        together(["call", "os.system"], iter(()))
    with pytest.raises(TypeError):
        together(["dtype", "load"], iter(()))


def test_why_other_caches_run_in_eager_is_told_by_form(tmp_path: Path) -> None:
    net = transformers.MistralForCausalLM(
        transformers.MistralConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=50,
            intermediate_size=16,
            sliding_window=4,
        )
    ).eval()
    want = generated(net)
    model = aotc.compile(net, store=tmp_path, build="never")
    assert torch.equal(generated(model), want)
    (form,) = {form.reason for form in model.stats().forms}
    assert form.startswith("a DynamicSlidingWindowLayer counts its tokens in a Python number, which code would")
    assert torch.equal(generated(model, cache=transformers.DynamicCache()), want)  # as the reason says
    assert "cannot be loaded" in model.stats().forms[-1].reason
    assert any(form in note for note in model.explain().notes)


def test_a_cache_of_a_class_of_ones_own_runs_in_eager(tmp_path: Path) -> None:
    class OwnCache(transformers.DynamicCache):  # type: ignore[misc, name-defined]
        pass

    net, cache = llama(), OwnCache()
    model = aotc.compile(net, store=tmp_path, build="never")
    with torch.no_grad():
        result = model(torch.arange(3)[None], cache=cache)
    assert result.cache is cache and cache.get_seq_length() == 3
    assert "OwnCache" in model.stats().forms[0].reason


def test_the_lengths_of_a_new_static_cache_are_moved_to_the_module_s_device() -> None:
    """transformers makes them on the CPU, and moves them in a first call."""
    config = transformers.LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    tensors = apart(transformers.StaticCache(config, max_cache_len=4))["tensors"]
    found = moved([*tensors, torch.zeros(2)], torch.nn.Linear(1, 1, device="meta"))
    assert [each.device.type for each in found] == ["meta"] * len(tensors) + ["cpu"] and tensors
    assert all(one is other for one, other in zip(moved(tensors, torch.nn.Linear(1, 1)), tensors, strict=True))
