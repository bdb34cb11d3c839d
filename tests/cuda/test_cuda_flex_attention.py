"""FlexAttention on a GPU: what the models of examples/flex_attention compute there is what eager does on a CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import FOLDER, start_aotc

import aotc
from aotc.manifest import read_manifest
from aotc.models.factory import build_module

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flex-attention")
    output = folder / "build.json"
    command = ("build", FOLDER / "flex_attention.yaml", "--store", folder / "store", "--jobs", "2", "--json")
    assert start_aotc(*command, output=output).wait() == 0, output.with_name("build.json.log").read_text()
    return folder / "store"


def loaded(store: Path, name: str, train: bool = False) -> tuple[Any, Any]:
    """The compiled model, and a twin of its module on the CPU."""
    manifest = read_manifest(FOLDER / "flex_attention.yaml")
    torch.manual_seed(0)
    module = build_module(manifest.models[name], manifest.folder).train(train)
    return aotc.load(f"{store}#{name}", copy.deepcopy(module).to("cuda:0")), module


@pytest.mark.parametrize(("batch", "tokens"), [(4, 512), (1, 256), (3, 256), (8, 256)])
def test_a_score_and_a_mask_that_forward_makes_are_those_of_eager(store: Path, batch: int, tokens: int) -> None:
    compiled, module = loaded(store, "documents")
    x, documents = torch.randn(batch, tokens, 64), torch.randint(0, 3, (batch, tokens))
    with torch.no_grad():
        result = compiled(x.cuda(), documents.cuda()).cpu()
        torch.testing.assert_close(result, module(x, documents), rtol=1e-3, atol=1e-4)


def test_a_cache_in_pages_is_written_and_read_as_in_eager(store: Path) -> None:
    compiled, module = loaded(store, "pages")
    for name in ("keys", "values"):
        cache = getattr(module, name).normal_()
        getattr(compiled, name).copy_(cache)
    pages, lengths = torch.randperm(16).view(4, 4), torch.tensor([0, 127, 128, 400])
    with torch.no_grad():
        for step in range(3):
            x = torch.randn(4, 1, 64)
            result = compiled(x.cuda(), (lengths + step).cuda(), pages.cuda()).cpu()
            torch.testing.assert_close(result, module(x, lengths + step, pages), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(compiled.keys.cpu(), module.keys, rtol=1e-3, atol=1e-4)


def test_few_rows_of_a_query_that_is_computed_from_a_transposed_tensor_are_those_of_eager(store: Path) -> None:
    compiled, module = loaded(store, "few-rows")
    x, key = torch.randn(2, 32, 512), torch.randn(2, 2, 256, 64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x.cuda(), key.cuda()).cpu(), module(x, key), rtol=1e-3, atol=1e-4)


def test_gradients_are_those_of_the_same_attention_without_it(store: Path) -> None:
    """Eager has no backward of FlexAttention on a CPU, so the reference is `scaled_dot_product_attention`."""
    compiled, module = loaded(store, "trained", train=True)
    x, documents = torch.randn(4, 256, 64), torch.randint(0, 3, (4, 256))
    compiled(x.cuda(), documents.cuda()).square().mean().backward()
    query, key, value = (part.unflatten(-1, (module.heads, -1)).transpose(1, 2) for part in module.qkv(x).chunk(3, -1))
    row, column = torch.arange(256)[:, None], torch.arange(256)
    seen = (row >= column) & (documents[:, :, None] == documents[:, None])
    bias = (module.slopes[:, None, None] * (column - row)).masked_fill(~seen[:, None], float("-inf"))
    attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    module.out(attended.transpose(1, 2).flatten(2)).square().mean().backward()
    trained = dict(compiled.named_parameters())
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(trained[name].grad.cpu(), parameter.grad, rtol=1e-2, atol=1e-5)
