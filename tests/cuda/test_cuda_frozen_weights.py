"""Frozen weights on a GPU: copied there once for all buckets, on every stream, in graphs, and freed with the model."""

from __future__ import annotations

import gc
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from gpu_runs import FOLDER, all_close, inputs, start_aotc
from torch import nn

import aotc
from aotc.manifest import read_manifest
from aotc.models.factory import build_module
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference

pytestmark = pytest.mark.cuda

WIDTH = 2048
BUCKETS = (4, 16, 64)
LAUNCHES = ["never", "always"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen-builds")
    shutil.copy(FOLDER / "gpu_models.py", folder)
    model = {
        "factory": "gpu_models.py:Mlp",
        "kwargs": {"width": WIDTH},
        "weights": "frozen",
        "inputs": {"x": {"shape": ["batch", WIDTH]}},
        "buckets": [{"batch": batch} for batch in BUCKETS],
        "targets": ["cuda"],
        "mode": "default",
    }
    (folder / "frozen.yaml").write_text(yaml.safe_dump({"version": 1, "models": {"frozen": model}}))
    arguments = ("build", folder / "frozen.yaml", "--store", folder / "store", "--jobs", "3", "--json")
    start_aotc(*arguments, output=folder / "report.json").wait()
    failed = [unit for unit in json.loads((folder / "report.json").read_text())["units"] if unit["status"] == "failed"]
    assert not failed, failed
    return folder / "store"


@pytest.fixture(scope="module")
def module(store: Path) -> nn.Module:
    """As the build had it: the weights are the same each time."""
    manifest = read_manifest(store.with_name("frozen.yaml"))
    return build_module(manifest.models["frozen"], manifest.folder).cuda().requires_grad_(False)


def mapped_bytes(store: Path) -> tuple[int, int]:
    """Of the weights that all buckets name: with what several name once, and each time."""
    opened = Store.open(store)
    (entry,) = read_bundle(opened, Reference(None, "frozen", tag="latest")).artifacts
    files = [file for variant in read_artifact(opened, entry).variants for file in variant.files if file.mapped]
    return sum({file.blob: file.size for file in files}.values()), sum(file.size for file in files)


def loaded(store: Path, **options: Any) -> Any:
    return aotc.load(f"{store}#frozen", device="cuda:0", **options)


def test_the_store_holds_the_weights_once(store: Path, module: nn.Module) -> None:
    once, each = mapped_bytes(store)
    weights = sum(each.nbytes for each in module.parameters())
    assert weights <= once < 1.1 * weights
    assert each == len(BUCKETS) * once


@pytest.mark.parametrize("launch", LAUNCHES)
def test_every_bucket_is_right(store: Path, module: nn.Module, launch: str) -> None:
    compiled = loaded(store, graphs=aotc.Graphs(use=launch))
    for batch in BUCKETS:
        assert all_close(compiled, module, inputs(2, batch, WIDTH))


def test_the_gpu_holds_the_weights_once_and_frees_them(store: Path) -> None:
    def used() -> int:
        """Of this process: other tests run on the same GPU."""
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    loaded(store, graphs=aotc.Graphs(use="never"))(torch.ones(4, WIDTH, device="cuda"))  # what stays, as of cuBLAS
    before, (once, _) = used(), mapped_bytes(store)
    compiled = loaded(store, graphs=aotc.Graphs(use="never"))
    for batch in BUCKETS:
        compiled(torch.ones(batch, WIDTH, device="cuda"))
    assert once <= used() - before < 1.5 * once
    del compiled
    assert used() - before < once / 4


def test_memory_is_not_given_away_while_another_stream_reads_it(store: Path, module: nn.Module) -> None:
    (x,) = inputs(1, 64, WIDTH)
    expected = module(x)
    stream = torch.cuda.Stream()
    for _ in range(5):
        compiled = loaded(store, graphs=aotc.Graphs(use="never"))
        compiled(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            output = compiled(x)
        del compiled
        taken = [torch.full((WIDTH, WIDTH), 7.0, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert torch.allclose(output, expected, atol=1e-3)
        del taken


def test_threads_call_side_by_side(store: Path, module: nn.Module) -> None:
    compiled, right = loaded(store, graphs=aotc.Graphs(use="never")), []

    def call(batch: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            (x,) = inputs(1, batch, WIDTH)
            right.append(all(torch.allclose(compiled(x), module(x), atol=1e-3) for _ in range(20)))

    threads = [threading.Thread(target=call, args=(batch,)) for batch in BUCKETS * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * len(threads)
