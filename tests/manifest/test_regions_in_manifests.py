"""`regions:` in a manifest: patterns, and what cannot go with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotc.errors import ManifestError
from aotc.manifest import ModelSpec, read_manifest

MODEL = "version: 1\nmodels:\n  gpt:\n    factory: models:gpt\n    inputs: {x: {shape: [2, seq]PAD}}\nMORE"


def read(folder: Path, more: str, pad: str = "") -> ModelSpec:
    path = folder / "manifest.yaml"
    path.write_text(MODEL.replace("MORE", f"    buckets: [{{seq: 8}}]\n    {more}\n").replace("PAD", pad))
    return read_manifest(path).models["gpt"]


def test_regions_are_patterns_of_paths(tmp_path: Path) -> None:
    assert read(tmp_path, 'regions: ["blocks.*", "encoder.layer_?.mlp"]').regions == ("blocks.*", "encoder.layer_?.mlp")
    assert read(tmp_path, "mode: default").regions == ()


@pytest.mark.parametrize(
    ("more", "pad", "message"),
    [
        ("regions: []", "", "expected a list of patterns"),
        ("regions: ['blocks..x']", "", "expected a pattern of submodules' paths"),
        ("regions: [b]\n    weights: frozen", "", "8: the weights of regions cannot be frozen"),
    ],
)
def test_what_regions_cannot_be(tmp_path: Path, more: str, pad: str, message: str) -> None:
    with pytest.raises(ManifestError) as raised:
        read(tmp_path, more, pad)
    assert message in str(raised.value)
