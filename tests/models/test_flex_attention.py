"""FlexAttention (examples/flex_attention) over ranges of sizes, against attention that is computed without it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from in_process import build_here, code_forgotten
from processes import ROOT
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import aotc

EXAMPLE = ROOT / "examples" / "flex_attention"


@pytest.fixture(scope="module")
def store(shared_folder: Path, built: Any) -> Path:
    return built(shared_folder, "flex_attention-store", EXAMPLE / "manifest.yaml")  # type: ignore[no-any-return]


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's module `model`."""
    with code_forgotten(EXAMPLE):
        monkeypatch.syspath_prepend(str(EXAMPLE))
        monkeypatch.delitem(sys.modules, "model", raising=False)  # another example's
        yield importlib.import_module("model")


def heads_of(tensor: Tensor, heads: int) -> Tensor:
    """`[batch, tokens, width]` as `[batch, heads, tokens, size]`."""
    return tensor.unflatten(-1, (heads, -1)).transpose(1, 2)


def attention_within_documents(module: Any, x: Tensor, documents: Tensor) -> Tensor:
    query, key, value = (heads_of(part, module.heads) for part in module.qkv(x).chunk(3, dim=-1))
    row, column = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])
    seen = (row >= column) & (documents[:, :, None] == documents[:, None])
    bias = (module.slopes[:, None, None] * (column - row)).masked_fill(~seen[:, None], float("-inf"))
    return module.out(scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("batch", "tokens"), [(2, 129), (5, 300), (8, 1024)])
def test_a_score_and_a_mask_that_read_tensors_hold_over_a_range(
    store: Path, models: Any, batch: int, tokens: int
) -> None:
    module = models.Documents().eval()
    compiled = aotc.load("documents", module, store=store)
    x, documents = torch.randn(batch, tokens, 64), torch.randint(0, 4, (batch, tokens)).sort().values
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, documents), attention_within_documents(module, x, documents))


def test_a_cache_in_pages_is_that_of_each_sequence(store: Path, models: Any) -> None:
    """Tokens of three sequences, whose pages lie among one another, from before the end of a page to behind it."""
    module = models.Paged().eval()
    compiled = aotc.load("paged", module, store=store)
    module.keys.normal_(), module.values.normal_()
    table = torch.randperm(module.pages)[:12].view(3, 4)
    lengths = torch.tensor([0, 126, 300])
    held = [
        [cache[0, :, places].transpose(0, 1) for cache in (module.keys, module.values)]
        for places in (table[:, :, None] * models.PAGE + torch.arange(models.PAGE)).flatten(1)
    ]
    for step in range(4):
        x = torch.randn(3, 1, 64)
        with torch.no_grad():
            results = compiled(x, lengths + step, table)
            for number, (given, length) in enumerate(zip(x, (lengths + step).tolist(), strict=True)):
                added = module.kv(given).view(2, 1, module.kv_heads, -1)
                for cache, new in zip(held[number], added, strict=True):
                    cache[length] = new[0]
                keys, values = (cache[: length + 1].transpose(0, 1)[None] for cache in held[number])
                query = heads_of(module.query(given)[None], module.heads)
                expected = scaled_dot_product_attention(query, keys, values, enable_gqa=True)
                torch.testing.assert_close(results[number], expected[0].transpose(0, 1).flatten(1))


def test_training_on_a_cpu_is_refused_by_name(models: Any, tmp_path: Path) -> None:
    """By torch, in eager too. The hint says what trains."""
    text = yaml.safe_load((EXAMPLE / "manifest.yaml").read_text())
    (tmp_path / "model.py").write_text((EXAMPLE / "model.py").read_text())
    spec = {**text["models"]["documents"], "train": True}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"documents": spec}}))
    (unit,) = build_here(tmp_path / "train.yaml", tmp_path / "store", jobs=1).failed
    assert "does not support backward on CPU" in str(unit.error)
    assert "targets: [cuda]" in str(unit.error) and "scaled_dot_product_attention" in str(unit.error)


@pytest.mark.every_torch
def test_the_function_by_which_a_mask_reads_a_tensor_has_the_name_that_a_capture_knows() -> None:
    """`aotc.compiler.capture.custom_backward` leaves it, and what vmap makes of it, to torch. Only training meets it,
    which needs a GPU."""
    module = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    assert issubclass(module.ModIndex, torch.autograd.Function)
