"""The record says what a library takes from torch, and calls with which dtypes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from aotc.records import LibraryImports
from aotc.standalone.misfits import misfits
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference


def imports(store: Path, model: str, tmp_path: Path) -> LibraryImports:
    opened = Store.open(store)
    artifact = read_artifact(opened, read_bundle(opened, parse_reference(model)).artifacts[0])
    variant = artifact.variants[0]
    library = next(file for file in variant.files if file.name == variant.library)
    opened.blobs.extract(library, tmp_path / "model.so")
    assert variant.imports is not None
    return variant.imports


CALLED = {
    "linear": {"aoti_torch_cpu_addmm_out": ("float32",)},
    "autocast": {"aoti_torch_cpu_addmm_out": ("bfloat16",)},
    "convolution": {"aoti_torch_cpu_convolution": ("float32",)},
    "recurrent": {"aten::gru.input", "aten::lstm.input", "aten::rnn_relu.input", "aten::rnn_tanh.input"},
}


@pytest.mark.parametrize("model", CALLED)
def test_the_record_has_the_functions_that_nm_shows_and_the_operators_with_their_dtypes(
    zoo_store: Path, model: str, tmp_path: Path
) -> None:
    found = imports(zoo_store, model, tmp_path)
    command = ["nm", "-D", "--undefined-only", tmp_path / "model.so"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert found.functions == tuple(sorted(name for kind, name in lines if kind == "U" and "@" not in name))
    expected = CALLED[model]
    if isinstance(expected, dict):
        assert found.operators == expected
    else:
        assert {name for name in found.operators if "::" in name} == expected


def test_the_quickstart_fits_the_standalone_runtime(quickstart_store: Path) -> None:
    store = Store.open(quickstart_store)
    artifact = read_artifact(store, read_bundle(store, parse_reference("quickstart")).artifacts[0])
    assert misfits(artifact) == ()
    assert all(variant.imports and variant.imports.operators for variant in artifact.variants)
