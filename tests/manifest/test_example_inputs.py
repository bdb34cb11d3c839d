"""Example inputs: what each init makes, and that the same seed makes the same values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from aotc.errors import ManifestError
from aotc.manifest.inputs import parse_inputs
from aotc.manifest.schema import DTYPES
from aotc.manifest.types import ModelSpec
from aotc.models.calls import fill
from aotc.models.example_inputs import example_leaves


@pytest.fixture(autouse=True)
def same_path_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def spec_of(inputs: dict[str, Any], dtype: str | None = None) -> ModelSpec:
    return ModelSpec("m", "p:f", inputs, ({},), dtype=dtype)


def example(form: dict[str, Any], dtype: str | None = None, seed: int = 0, folder: Path | None = None) -> torch.Tensor:
    (tensor,) = example_leaves(spec_of({"x": form}, dtype), {"n": 64}, "cpu", seed, folder=folder)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def test_shapes_follow_dims_and_expressions() -> None:
    assert example({"shape": ["n", "2*n+1", 0, 3]}).shape == (64, 129, 0, 3)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_the_schema_can_be_made(dtype: str) -> None:
    tensor = example({"shape": [4, "n"], "dtype": dtype})
    assert tensor.dtype is getattr(torch, dtype)
    assert len(set(tensor.to(torch.complex64).flatten().tolist())) > 1


def test_the_models_dtype_is_the_default_and_else_float32() -> None:
    assert example({"shape": [1]}, dtype="bfloat16").dtype is torch.bfloat16
    assert example({"shape": [1]}).dtype is torch.float32
    assert example({"shape": [1], "dtype": "int64"}, dtype="bfloat16").dtype is torch.int64


def test_inits_make_what_they_say() -> None:
    assert example({"shape": [3], "init": "ones"}).tolist() == [1, 1, 1]
    assert example({"shape": [3], "init": "zeros", "dtype": "bool"}).tolist() == [False] * 3
    assert example({"shape": [2], "init": {"constant": -2.5}}).tolist() == [-2.5, -2.5]
    assert set(example({"shape": [500], "init": {"randint": [3, 6]}, "dtype": "int8"}).tolist()) == {3, 4, 5}
    assert set(example({"shape": [50], "init": {"randint": [0, 2]}, "dtype": "bool"}).tolist()) == {True, False}
    assert abs(float(example({"shape": [1000], "init": "randn"}).std()) - 1) < 0.1
    assert example({"shape": [2, 5], "init": "padding", "dtype": "int64"}).tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert example({"shape": [3], "init": ["padding", "ones"], "dtype": "bool"}).tolist() == [True, True, False]
    assert example({"shape": [2, 1], "init": "padding"}).tolist() == [[1], [1]]


@pytest.mark.parametrize("dtype", ["int64", "bool"])
def test_integers_and_bools_are_0_or_1_unless_told_otherwise(dtype: str) -> None:
    assert set(example({"shape": [100], "dtype": dtype}).int().tolist()) == {0, 1}


def test_the_same_seed_gives_the_same_values_whatever_the_global_random_state() -> None:
    form = {"shape": [8]}
    torch.manual_seed(1)
    one = example(form, seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(example(form, seed=5), one)
    assert not torch.equal(example(form, seed=6), one)
    assert torch.equal(torch.get_rng_state(), before)


def test_each_leaf_draws_its_own_values() -> None:
    a, b = example_leaves(spec_of({"a": {"shape": [8]}, "b": {"shape": [8]}}), {}, "cpu", 0)
    assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
    assert not torch.equal(a, b)


def test_layouts_are_honoured() -> None:
    nhwc = example({"shape": [2, 3, 4, 5], "layout": "channels_last"})
    assert nhwc.stride() == (60, 1, 15, 3)
    volume = example({"shape": [2, 3, 4, 5, 6], "layout": "channels_last_3d"})
    assert volume.is_contiguous(memory_format=torch.channels_last_3d)


def test_a_function_of_the_user_makes_the_tensor(tmp_path: Path) -> None:
    body = "    return torch.rand(shape, generator=generator).to(dtype)\n"
    source = "import torch\ndef make(shape, dtype, generator):\n" + body
    (tmp_path / "own_inits_a.py").write_text(source)
    for reference in ("own_inits_a:make", "own_inits_a.py:make"):
        form = {"shape": [4], "init": reference, "dtype": "float64"}
        tensor = example(form, seed=3, folder=tmp_path)
        assert tensor.dtype is torch.float64
        assert torch.equal(tensor, example(form, seed=3, folder=tmp_path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return torch.ones(3)", r"gave \[3\] torch.float32; expected \[4\] torch.float32"),
        ("return torch.ones(shape, dtype=torch.int8)", r"gave \[4\] torch.int8; expected \[4\] torch.float32"),
        ("return 5", "gave int; expected a Tensor"),
        ("raise KeyError('why')", "raised KeyError: 'why'"),
    ],
)
def test_a_function_that_makes_something_else_is_refused(tmp_path: Path, body: str, message: str) -> None:
    name = f"own_inits_{len(body)}"
    (tmp_path / f"{name}.py").write_text(f"import torch\ndef make(shape, dtype, generator):\n    {body}\n")
    with pytest.raises(ManifestError, match=message):
        example({"shape": [4], "init": f"{name}:make"}, folder=tmp_path)


def test_fill_puts_leaves_into_the_parameters() -> None:
    inputs = {"x": {"shape": [1]}, "deep": {"b": [1, {"shape": [2]}], "a": "text"}, "flag": True}
    trees, _ = parse_inputs(inputs)
    leaves = example_leaves(spec_of(inputs), {}, "cpu", 0)
    values = fill(trees, leaves)
    assert values["flag"] is True
    assert values["deep"]["a"] == "text"
    assert values["deep"]["b"][0] == 1
    assert values["deep"]["b"][1].shape == (2,)
    assert values["x"].shape == (1,)
