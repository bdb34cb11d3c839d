"""Quantised weights, live: torchao's tensor subclasses are bound like other weights, with no compiler of aotc's."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ZOO, run_aotc, run_python
from test_no_compiler import BAN

from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference

pytest.importorskip("torchao")
pytestmark = pytest.mark.every_torch

SERVE = """
import sys
import torch
from torch import nn
from quantised_models import Sum, quantised, quantised_blocks
from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

held = set(sys.modules)  # torchao imports torch's compiler by itself
import aotc

store, folder = sys.argv[1:]
x = torch.randn(5, 64, dtype=torch.bfloat16)
torch.set_grad_enabled(False)

def same(given, expected):
    error, scale = (given - expected).abs().max(), expected.abs().max()
    assert error <= 0.02 * scale, (error, scale)

def refused(action, *texts):
    try:
        action()
    except aotc.BindError as error:
        assert all(text in str(error) for text in texts), error
    else:
        raise AssertionError(f"not refused: {texts}")

one, two, three, four = (quantised(seed) for seed in range(4))
assert (one(x) - two(x)).abs().max() > 0.2 * one(x).abs().max()  # a result of the other weights would be noticed
compiled = aotc.load("quantised", one, store=store)
same(compiled(x), one(x))
same(compiled(x[:1]), one(x[:1]))
one.load_state_dict(two.state_dict())
same(compiled(x), two(x))
one.load_state_dict(three.state_dict(), assign=True)
one.tied.weight = one.layers["int8"].weight
same(compiled(x), three(x))

kept, grouped = one.layers["int4"].weight, quantised(1, group=64).layers["int4"].weight
one.layers["int4"].weight = grouped
for _ in range(2):
    refused(lambda: compiled(x), "layers.int4.weight: built for block_size [1, 32], the module's is [1, 64]")
one.layers["int4"].weight = kept
one.tied.weight = two.layers["int8"].weight
refused(lambda: compiled(x), "layers.int8.weight.qdata: was one tensor with `tied.weight.qdata` at build")
one.tied.weight = one.layers["int8"].weight
same(compiled(x), three(x))

compiled.update_weights(four.state_dict())
same(compiled(x), four(x))
assert torch.equal(one(x), four(x))
refused(lambda: compiled.update_weights({"layers.int4.weight": grouped}), "block_size [1, 32], the checkpoint")
refused(lambda: aotc.load("quantised", quantised(group=64), store=store), "built for block_size [1, 32]")

by_name = aotc.load("quantised", weights=two.state_dict(), store=store)
same(by_name(x), two(x))
by_name.update_weights(four.state_dict())
same(by_name(x), four(x))

blocks = quantised_blocks()
expected = blocks(x[:2])
by_regions = aotc.load("blocks", blocks, store=store)
assert [region.instances for region in by_regions.artifact.regions] == [("0", "1"), ("2",)]
same(by_regions(x[:2]), expected)
blocks.load_state_dict(quantised_blocks(1).state_dict())
same(by_regions(x[:2]), quantised_blocks(1)(x[:2]))
swapped = nn.Sequential(*blocks[2:], *blocks[:2]).eval()
refused(lambda: aotc.load("blocks", swapped, store=store), "0: ", "block_size [1, 32], the module's is [1, 64]")

from safetensors.torch import save_file

def save(name, module):
    state = {key: tensor.detach() for key, tensor in module.state_dict().items() if key != "offset"}
    tensors, header = flatten_tensor_state_dict(state)
    offset = module.offset
    own = {"offset.a.a": offset.a.a, "offset.a.b": offset.a.b, "offset.b": offset.b}
    save_file({**tensors, **{key: tensor.clone() for key, tensor in own.items()}}, f"{folder}/{name}", metadata=header)

save("two.safetensors", two)
save("grouped.safetensors", quantised(1, group=64))
torch.save([x, two(x)], f"{folder}/results.pt")
compilers = ("torch._dynamo", "torch._inductor", "triton", "sympy")
print([name for name in {*sys.modules} - held if name.startswith(compilers)])
"""

SERVE_FILE = (
    BAN
    + """
import aotc

store, folder = sys.argv[1:]
x, expected = torch.load(f"{folder}/results.pt")
compiled = aotc.load("quantised", weights=f"{folder}/two.safetensors", store=store)
assert (compiled(x) - expected).abs().max() <= 0.02 * expected.abs().max()
try:
    compiled.update_weights(f"{folder}/grouped.safetensors")
except aotc.BindError as error:
    print(error.issues[0])
print("torchao" in sys.modules)
"""
)


@pytest.fixture(scope="module")
def quantised_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("quantised") / "store"
    ran = run_aotc("build", ZOO / "quantised.yaml", "--store", store, "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return store


def test_quantised_weights_are_bound_checked_watched_and_replaced_like_others(
    quantised_store: Path, tmp_path: Path
) -> None:
    """By a module, by a state_dict, by regions; and by torchao's safetensors form, in a process without torchao."""
    assert run_python(SERVE, quantised_store, tmp_path) == "[]\n"
    said, without_torchao = run_python(SERVE_FILE, quantised_store, tmp_path).splitlines()[-2:]
    assert "layers.int4.weight: built for block_size [1, 32], the checkpoint's is [1, 64]" in said
    assert without_torchao == "False"
    verified = run_aotc("verify", "quantised", "--store", quantised_store, "--seeds", "1")
    assert verified.returncode == 0, verified.stdout + verified.stderr


def test_a_model_of_pt2e_calls_onednn_s_convolutions_of_int8(quantised_store: Path) -> None:
    opened = Store.open(quantised_store)
    (entry,) = read_bundle(opened, parse_reference("static")).artifacts
    (variant,) = read_artifact(opened, entry).variants
    assert variant.imports is not None
    assert any("qconv" in name for name in variant.imports.functions), variant.imports
    verified = run_aotc("verify", "static", "--store", quantised_store, "--seeds", "1")
    assert verified.returncode == 0, verified.stdout + verified.stderr
