"""`runtime: standalone` for a GPU that is not here: what is called of torch, and what is refused. Needs torch's CUDA
build."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from processes import run_aotc

from aotc.models.launch import READS_A_VALUE
from aotc.records import Variant
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(),
    reason="needs torch's CUDA build, on a machine without a GPU",
)

QUERY, KEY, MASK = [2, 4, 384, 64], [2, 2, 384, 64], [2, 1, 384, 384]
MODELS: dict[str, Any] = {
    "attends": {"inputs": {"q": {"shape": QUERY}, "few": {"shape": KEY}, "mask": {"shape": MASK, "dtype": "bool"}}},
    "products": {"inputs": {"x": {"shape": [2, 3, 32, 32]}}, "mode": "default"},
    "left": {"inputs": {"x": {"shape": [2, 3, 8, 8]}}, "dtype": "float32"},
}


def build(folder: Path, *names: str) -> Any:
    shutil.copy(HERE / "standalone_gpu_models.py", folder)
    models = {}
    for name in names:
        factory = f"standalone_gpu_models.py:{name.capitalize()}"
        usual = {"factory": factory, "runtime": "standalone", "targets": ["cuda:sm_90"], "dtype": "float16"}
        models[name] = {**usual, **MODELS[name]}
    (folder / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    return run_aotc("build", folder / "manifest.yaml", "--store", folder / "store", "--untuned", "--jobs", "2")


def variant_of(store: Path, model: str) -> Variant:
    opened = Store.open(store)
    (entry,) = read_bundle(opened, parse_reference(model)).artifacts
    (variant,) = read_artifact(opened, entry).variants
    assert variant.untested
    return variant


def test_products_attention_and_convolutions_are_kernels(tmp_path: Path) -> None:
    """In either mode: the library calls no operator, and launches kernels by the driver."""
    built = build(tmp_path, "attends", "products")
    assert built.returncode == 0, built.stdout + built.stderr
    for model in ("attends", "products"):
        found = variant_of(tmp_path / "store", model).imports
        assert (
            found is not None
            and found.operators == {}
            and "cuLaunchKernel" in {name.removesuffix("Ex") for name in found.functions}
        )
    kernels = run_aotc("inspect", f"{tmp_path / 'store'}#attends", "--json").stdout
    assert "flex_attention" in kernels


def test_families_of_transformers_call_no_operator(tmp_path: Path) -> None:
    """DETR's decoder begins with a product of zeros. SigLIP 2 reads a value of its mask, which no graph does."""
    families = yaml.safe_load((HERE.parent / "zoo" / "families.yaml").read_text())["models"]
    of_gpu = {"runtime": "standalone", "targets": ["cuda:sm_90"], "dtype": "float16"}
    models = {name: families[name] | of_gpu for name in ("detr", "siglip2")}
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump({"version": 1, "models": models}))
    built = run_aotc("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store", "--untuned", "--jobs", "2")
    assert built.returncode == 0, built.stdout + built.stderr
    found = {name: variant_of(tmp_path / "store", name) for name in models}
    for variant in found.values():
        assert variant.imports is not None and variant.imports.operators == {}
    assert {name: variant.launch and variant.launch.graph for name, variant in found.items()} == {
        "detr": True,
        "siglip2": False,
    }
    assert READS_A_VALUE in built.stdout + built.stderr


def test_what_is_left_is_refused_all_at_once_with_the_model_s_lines(tmp_path: Path) -> None:
    refused = build(tmp_path, "left")
    shown = refused.stdout + refused.stderr
    assert refused.returncode == 1 and "calls what the standalone runtime lacks" in shown, shown
    lines = (HERE / "standalone_gpu_models.py").read_text().splitlines()
    for code, operator in (("transposed(x)", "convolution"), ("rfft", "_fft_r2c"), ("svdvals", "_linalg_svd")):
        (line,) = (number for number, text in enumerate(lines, 1) if code in text)
        assert f"standalone_gpu_models.py:{line} in forward: aten::{operator}\n" in shown, shown
    assert "not for both in one" in shown
