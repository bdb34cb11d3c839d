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
