"""Models of transformers as they are: they verify, give their own kinds of results, and keep a cache between calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from built_models import FOLDER, Built
from in_process import run_here
from processes import run_python

import aotc
from aotc.manifest import read_manifest
from aotc.models.factory import build_module

MANIFEST = FOLDER / "tiny.yaml"


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))


def loaded(built: Built, model: str) -> tuple[aotc.Compiled, Any]:
    """The compiled model, and a module of its own for eager, with the same weights."""
    manifest = read_manifest(MANIFEST, [model])
    modules = [build_module(manifest.models[model], manifest.folder) for _ in range(2)]
    return aotc.load(model, modules[0], store=built.store), modules[1]


def test_every_model_verifies(library_models: Built) -> None:
    ran = run_here("verify", MANIFEST, "--store", library_models.store, "--seeds", 1, "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {report["model"] for report in json.loads(ran.stdout)} == {"bert", "bert-by-regions", "llm", "t5"}


@pytest.mark.parametrize("model", ["bert", "t5"])
def test_results_are_of_the_models_own_class(library_models: Built, model: str) -> None:
    compiled, eager = loaded(library_models, model)
    ids = torch.randint(0, 100, (1 if model == "t5" else 2, 16))
    inputs = {
        "bert": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "t5": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :5]},
    }[model]
    with torch.no_grad():
        actual, expected = compiled(**inputs), eager(**inputs)
    assert type(actual) is type(expected)
    assert list(actual) == list(expected)
    tensors = [name for name in expected if isinstance(expected[name], torch.Tensor)]
    assert {"bert": "pooler_output", "t5": "encoder_last_hidden_state"}[model] in tensors
    assert all(torch.allclose(actual[name], expected[name], atol=1e-4) for name in tensors)


def test_a_call_without_an_input_that_has_a_default_runs_as_in_eager(library_models: Built) -> None:
    ids = torch.randint(0, 100, (1, 16))
    decoder_ids = {"decoder_input_ids": ids[:, :4]}
    bert = {"input_ids": ids.view(2, 8), "attention_mask": torch.ones_like(ids.view(2, 8))}
    for model, inputs, name, given in (
        ("bert", bert, "token_type_ids", torch.ones_like(bert["input_ids"])),
        ("t5", {"input_ids": ids, **decoder_ids}, "attention_mask", (torch.arange(16) < 9).long()[None]),
    ):
        compiled, eager = loaded(library_models, model)
        with torch.no_grad():
            results = {}
            for each in ({}, {name: None}, {name: given}):
                actual, expected = compiled(**inputs, **each)[0], eager(**inputs, **each)[0]
                assert torch.allclose(actual, expected, atol=1e-4)
                results[str(each)] = actual
            first, *_, last = results.values()
            assert not torch.allclose(first, last, atol=1e-3)


def test_a_call_without_a_mask_is_told_which_mask_says_the_same(library_models: Built) -> None:
    compiled, _ = loaded(library_models, "bert")
    for mask in ({}, {"attention_mask": None}):
        with pytest.raises(
            aotc.MissError,
            match=r"attention_mask: a tensor is expected, None came\n.*ones_like\(input_ids\).*`default: 1`",
        ):
            compiled(input_ids=torch.randint(0, 100, (2, 16)), **mask)


def test_eager_goes_on_from_the_cache_that_a_compiled_call_returned(library_models: Built) -> None:
    compiled, eager = loaded(library_models, "t5")
    ids = torch.randint(0, 100, (1, 16))
    start = {"attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :5]}
    more = {"attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, 5:6]}
    logits = []
    with torch.no_grad():
        for model in (compiled, eager):
            result = model(input_ids=ids, **start)
            name = next(name for name in result if type(result[name]).__name__ == "EncoderDecoderCache")
            encoded = {"encoder_outputs": (result.encoder_last_hidden_state,), name: result[name]}
            logits.append(eager(**more, **encoded).logits)
    assert torch.allclose(*logits, atol=1e-4)
    assert not torch.allclose(logits[0], eager(input_ids=ids, **more).logits, atol=1e-2)  # without the cache


def test_a_pipeline_of_transformers_runs_compiled_code_in_its_models_place(library_models: Built) -> None:
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3, "c": 4}, unk_token="[UNK]")
    splitter = tokenizers.Tokenizer(words)
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=splitter, pad_token="[PAD]", model_input_names=["input_ids", "attention_mask"]
    )
    compiled, eager = loaded(library_models, "bert")
    pipe = transformers.pipeline("feature-extraction", model=eager, tokenizer=tokenizer, batch_size=2)
    texts = ["a b c a b", "c b a"]
    expected = pipe(texts)
    pipe.model = compiled
    made = transformers.pipeline("feature-extraction", model=compiled, tokenizer=tokenizer, batch_size=2)
    for each in (pipe, made):
        for actual, wanted in zip(each(texts), expected, strict=True):
            assert torch.allclose(torch.tensor(actual), torch.tensor(wanted), atol=1e-4)
    assert compiled.stats().calls == 2
    assert aotc.load("bert", compiled, store=library_models.store).module is compiled.module


def test_a_region_takes_a_mask_that_masks_something_and_none(library_models: Built) -> None:
    compiled, eager = loaded(library_models, "bert-by-regions")
    ids = torch.randint(0, 100, (1, 24))
    short = torch.ones_like(ids)
    short[0, -5:] = 0
    with torch.no_grad():
        for mask in (torch.ones_like(ids), short):
            actual, expected = (each(input_ids=ids, attention_mask=mask)[0] for each in (compiled, eager))
            assert torch.allclose(actual, expected, atol=1e-4)
    calls = {path: code.stats().calls for path, code in compiled.regions.items()}
    assert calls == {f"encoder.layer.{n}{form}": 1 for form in ("", "(attention_mask=tensor)") for n in (0, 1)}
    with torch.no_grad():  # padded, so its mask masks something
        given, expected = (each(ids[:, :5], attention_mask=short[:, :5]) for each in (compiled, eager))
    assert type(given) is type(expected) and given[0].shape == (1, 5, 64)
    assert torch.allclose(given[0], expected[0], atol=1e-4) and torch.allclose(given[1], expected[1], atol=1e-4)
    assert compiled.regions["encoder.layer.0(attention_mask=tensor)"].stats().calls == 2


def test_a_prompt_and_each_further_token_write_to_one_cache(library_models: Built) -> None:
    from examples.generate import generate

    compiled, eager = loaded(library_models, "llm")
    prompt = torch.randint(0, 100, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    tokens = generate(compiled, prompt, 20)
    calls = compiled.stats()
    # Without any cache: the whole text again for each token.
    text = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            text.append(int(eager.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    assert tokens == text[9:]
    assert generate(compiled, prompt[:4], 5) == generate(eager, prompt[:4], 5)  # a new text forgets the old one
    assert calls.misses == 0 and calls.calls == 20


WINDOWS = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
WINDOWS |= {"num_key_value_heads": 1, "vocab_size": 100}


@pytest.mark.parametrize(
    ("name", "config", "held"),
    [
        ("Mistral", {"sliding_window": 6, "head_dim": 16}, [[1, 1, 32, 16]] * 4),
        ("Gemma2", {"sliding_window": 6, "head_dim": 48, "num_key_value_heads": 2}, [[1, 2, 32, 48]] * 4),
        (
            "Lfm2",
            {"layer_types": ["conv", "full_attention"], "block_ff_dim": 64},
            [[1, 64, 3], [1, 1, 32, 32], [1, 1, 32, 32]],
        ),
        (  # it keeps what keys and values are computed from
            "DeepseekV2",
            {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 24}
            | {"n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 2, "num_key_value_heads": 2},
            [[1, 1, 32, 16], [1, 1, 32, 8]] * 2,
        ),
    ],
)
def test_a_cache_is_as_large_as_the_layers_say_and_as_long_as_the_text(
    name: str, config: dict[str, Any], held: list[list[int]]
) -> None:
    """Also where layers look at a window of it, which is passed in the prompt or after it. In eager."""
    transformers = pytest.importorskip("transformers")
    from examples.generate import generate
    from examples.language_models import cached_lm

    torch.manual_seed(0)
    model = cached_lm(getattr(transformers, f"{name}Config")(**WINDOWS | config), length=32).eval()
    own = {id(buffer) for buffer in model.model.buffers()}
    assert [list(buffer.shape) for buffer in model.buffers() if id(buffer) not in own] == held
    for prompt in ([7, 3, 9, 1, 4, 8, 2, 6, 5], [5, 2, 8], [9]):  # each forgets the one before
        text = list(prompt)
        with torch.no_grad():
            for _ in range(16):
                text.append(int(model.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        assert generate(model, prompt, 16) == text[len(prompt) :]


def test_planning_costs_nothing_next_to_the_modules(library_models: Built) -> None:
    """What is cached stays so: the key holds the library by version, and the configuration by its values."""
    ran = run_here("build", MANIFEST, "--store", library_models.store, "--dry-run", "--explain")
    assert ran.returncode == 0, ran.stderr
    assert "bert" in ran.stdout and "not built before" not in ran.stdout


def test_a_changed_configuration_is_another_key_and_refused_at_load(library_models: Built) -> None:
    manifest = read_manifest(MANIFEST, ["bert"])
    module = build_module(manifest.models["bert"], manifest.folder)
    module.config.some_scale = 2.0  # type: ignore[union-attr]
    with pytest.raises(aotc.BindError, match="config"):
        aotc.load("bert", module, store=library_models.store)


def test_a_module_from_a_checkpoint_is_the_one_that_its_configuration_gave(
    library_models: Built, tmp_path: Path
) -> None:
    _, made = loaded(library_models, "bert")
    made.save_pretrained(tmp_path)
    module = type(made).from_pretrained(tmp_path).eval()
    assert module.name_or_path == str(tmp_path)
    compiled = aotc.load("bert", module, store=library_models.store)
    ids = torch.randint(0, 100, (2, 16))
    with torch.no_grad():
        actual, expected = compiled(input_ids=ids, attention_mask=torch.ones_like(ids)), made(input_ids=ids)
    assert torch.allclose(actual.last_hidden_state, expected.last_hidden_state, atol=1e-4)


GENERATE = """
import sys, torch, aotc
from examples.generate import generate
compiled = aotc.load("llm", store=sys.argv[1], weights=sys.argv[2])
print(generate(compiled, [1, 2, 3, 4], 12))
print(sorted({"torch._dynamo", "torch._inductor", "triton", "sympy", "transformers"} & sys.modules.keys()))
"""


def test_tokens_without_the_module_need_neither_the_library_nor_a_compiler(
    library_models: Built, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    from examples.generate import generate

    _, eager = loaded(library_models, "llm")
    save_file({name: tensor.contiguous() for name, tensor in eager.state_dict().items()}, tmp_path / "llm.safetensors")
    shown = run_python(GENERATE, library_models.store, tmp_path / "llm.safetensors").splitlines()
    assert shown == [str(generate(eager, [1, 2, 3, 4], 12)), "[]"]


# -- what cannot be captured ------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50}
IDS = {"input_ids": {"shape": [1, 8], "dtype": "int64", "init": {"randint": [0, 50]}}}


@pytest.mark.parametrize(
    ("name", "config", "found"),
    [
        (
            "Mixtral",
            {"use_cache": False, "num_local_experts": 2, "experts_implementation": "eager"},
            ("data-dependent", "experts_implementation: batched_mm"),
        ),
    ],
)
def test_a_model_that_cannot_be_captured_says_what_to_change(
    name: str, config: dict[str, Any], found: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    made = {"factory": f"transformers:{name}Config", "kwargs": {**SIZES, "num_key_value_heads": 1, **config}}
    model = {"factory": f"transformers:{name}ForCausalLM", "kwargs": {"config": made}, "inputs": IDS}
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(json.dumps({"version": 1, "models": {"model": model}}))  # JSON is YAML
    ran = run_here("build", manifest, "--store", tmp_path / "store")
    assert ran.returncode == 1
    shown = ran.stderr.partition("\nfailed:")[2]
    assert all(text in shown for text in found), ran.stderr
    assert len(shown.splitlines()) < 20  # one screen
    if name == "Mixtral":
        assert "at transformers/models/mixtral/modeling_mixtral.py:" in shown
