"""The golden store of each format version, made by `golden/make.py`: what was published once must be read for ever."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import aotc
from aotc.records import SCHEMA_VERSION
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.reference import parse_reference

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "store"))


def test_there_is_a_golden_store_of_this_version() -> None:
    assert f"v{SCHEMA_VERSION}" in VERSIONS


def test_a_golden_store_is_whole_and_says_how_it_was_made(golden: Path) -> None:
    assert fsck(golden).errors == []
    store = Store.open(golden)
    (entry,) = read_bundle(store, parse_reference("linear")).artifacts
    assert read_built(store, entry).manifest["factory"] == "torch.nn:Linear"


def test_a_golden_artifact_computes_what_eager_does(golden: Path) -> None:
    store = Store.open(golden)
    (entry,) = read_bundle(store, parse_reference("linear")).artifacts
    built = read_built(store, entry).environment.torch
    if built.split(".")[:2] != torch.__version__.split(".")[:2]:
        pytest.skip(f"the golden artifact is for torch {built}")
    module, x = torch.nn.Linear(4, 3).eval(), torch.randn(2, 4)
    compiled = aotc.load(f"{golden}#linear", module, ignore=("source",))  # torch's own, of any patch release
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
