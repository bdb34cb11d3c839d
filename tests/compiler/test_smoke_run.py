"""What a build's smoke run finds in compiled code that runs."""

from __future__ import annotations

from pathlib import Path

import yaml
from in_process import run_here

from aotc.compiler.smoke.smoke_run import failed_by
from aotc.errors import LibraryError

MODELS = """
import sys
import torch
from torch import nn

@torch.library.custom_op("aotc_smoke::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@double.register_fake
def _(x):
    return torch.empty_like(x)

@torch.library.custom_op("aotc_smoke::keep", mutates_args=())
def keep(x: torch.Tensor) -> torch.Tensor:
    return x.clone()

@keep.register_fake
def _(x):
    return torch.empty_like(x)

if "torch._inductor" in sys.modules:  # where units are compiled: a compiler that gets an operator wrong
    from torch._inductor import lowering
    from torch._inductor.virtualized import ops

    @lowering.register_lowering(torch.ops.aotc_smoke.double.default)
    def triple(x):
        return lowering.mul(x, 3)

    @lowering.register_lowering(torch.ops.aotc_smoke.keep.default)
    def without_nan(x):
        return lowering.make_pointwise(lambda v: ops.where(ops.eq(v, v), v, ops.constant(0.0, torch.float32)))(x)

class Scaled(nn.Module):
    def forward(self, x, y):
        return x + 1, torch.ldexp(x, y)

class Doubled(nn.Module):
    def forward(self, x):
        return x.relu() + 1, double(x)

class Kept(nn.Module):
    def forward(self, x):
        y = x.relu() + 1
        return keep(y)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Kept()])

    def forward(self, x):
        return self.blocks[0](x) + 1

class Looked(nn.Module):
    def forward(self, index):
        return torch.arange(4, device=index.device)[index]

class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.ones(4))

    def forward(self, x, given):
        self.total.add_(double(x))
        given.sub_(1)
        return x + self.total.mean() * 0

class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Written()])

    def forward(self, x, given):
        return self.blocks[0](x, given) + 1

class Right(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x, given):
        self.steps.add_(1)
        given.mul_(2)
        zero = (x * 1000 + 10).sum() - (x * 1000).sum() - 40
        return {"chance": torch.rand(4), "dropped": nn.functional.dropout(x, 0.5, True), "zero": zero, "x": (given, 3)}
"""


def test_compiled_code_that_does_something_else_than_the_model_fails_the_build(tmp_path: Path) -> None:
    """torch's compiler takes ldexp's result to be of its first operand's dtype; eager promotes."""
    (tmp_path / "smoke_models.py").write_text(MODELS)
    x = {"x": {"shape": [4]}}
    both = {**x, "given": {"shape": [4]}}
    models = {
        "scaled": {"factory": "Scaled", "inputs": {"x": {"shape": [4], "dtype": "bfloat16"}, "y": {"shape": [4]}}},
        "doubled": {"factory": "Doubled", "inputs": x},
        "written": {"factory": "Written", "inputs": both},
        "around": {"factory": "Around", "inputs": both, "regions": ["blocks.*"]},
        "right": {"factory": "Right", "inputs": both},
    }
    for model in models.values():
        model |= {"factory": f"smoke_models.py:{model['factory']}", "mode": "default"}
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    ran = run_here("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", cwd=tmp_path)
    assert ran.returncode == 1
    told = {part.split()[0]: part for part in (ran.stdout + ran.stderr).split("failed: ")[1:]}
    assert told.keys() == {"scaled", "doubled", "written", "around"}
    assert "output 1: float32 [4] in the model, bfloat16 [4] in the compiled code" in told["scaled"]
    assert "does not compute what the model does: output 1 differs" in told["doubled"]
    assert "what is written to `total` differs" in told["written"]
    assert "what is written to `total` differs" in told["around"]


def test_code_that_is_wrong_at_extreme_values_only_fails_the_build_with_operator_and_line(tmp_path: Path) -> None:
    """NaN that is lost is not seen with random numbers. A model that takes no such values is built, with a note."""
    (tmp_path / "smoke_models.py").write_text(MODELS)
    x = {"x": {"shape": ["n", 6]}}
    models = {
        "kept": {"factory": "Kept", "inputs": x, "buckets": [{"n": [2, 100]}]},
        "layer": {"factory": "Layer", "inputs": x, "buckets": [{"n": 7}], "regions": ["blocks.*"]},
        "looked": {"factory": "Looked", "inputs": {"index": {"shape": [4], "dtype": "int64"}}},
    }
    for model in models.values():
        model |= {"factory": f"smoke_models.py:{model['factory']}", "mode": "default"}
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    ran = run_here("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", cwd=tmp_path)
    assert ran.returncode == 1
    told = {part.split()[0]: part for part in (ran.stdout + ran.stderr).split("failed: ")[1:]}
    assert told.keys() == {"kept", "layer"}
    assert "at extreme values (NaN, infinities, limits of dtypes), the compiled code does not" in told["kept"]
    assert "output 0 is 0 at [2, 2], nan in eager" in told["kept"]
    assert "wrong code of aotc_smoke.keep.default of float32[65, 6]" in told["kept"]
    assert "return keep(y)" in told["kept"]
    assert "at extreme values" in told["layer"] and "aotc_smoke.keep.default of float32[7, 6]" in told["layer"]
    assert "not compared at extreme values" in ran.stdout + ran.stderr
    assert "no input is free" in ran.stdout + ran.stderr


def test_other_strides_than_torch_told_have_a_hint() -> None:
    """The words are a library's, of a backward that is given what `linalg.solve_triangular` gave."""
    said = failed_by(LibraryError("input_handles[2]: unmatched stride value at 1, expected: 1, but got: 3\n"))
    assert said.message == "smoke run: input_handles[2]: unmatched stride value at 1, expected: 1, but got: 3"
    assert "`regions:`" in said.hint and "strides that Inductor does not expect" in said.hint
    said = failed_by(
        LibraryError("the library failed: expected ndim 2 but got 1\nError in op: torch.ops.own.pack.default")
    )
    assert (
        "torch.ops.own.pack.default" in said.message and "mend that kernel" in said.hint and "`regions:`" in said.hint
    )
    assert failed_by(LibraryError("out of memory", hint="free some")).hint == "free some"
