"""Regions on a GPU: each instance's CUDA graph, and weights that are swapped under all of them at once."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_runs import FOLDER, close, inputs, start_aotc
from torch import nn

import aotc
from aotc.manifest import read_manifest
from aotc.models.factory import build_module

pytestmark = pytest.mark.cuda

REGIONS = 5
"""Three blocks and two gates."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("regions")
    output = folder / "build.json"
    command = ("build", FOLDER / "regions.yaml", "--store", folder / "store", "--jobs", "4", "--json")
    status = start_aotc(*command, output=output).wait()
    assert status == 0, output.read_text() + output.with_name("build.json.log").read_text()
    return folder / "store"


def stack(seed: int = 0, model: str = "stack") -> nn.Module:
    manifest = read_manifest(FOLDER / "regions.yaml")
    torch.manual_seed(seed)
    module = build_module(manifest.models[model], manifest.folder).to("cuda:0")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module


def loaded(store: Path, **options: Any) -> tuple[Any, nn.Module]:
    module = stack()
    return aotc.load(f"{store}#stack", module, **options), copy.deepcopy(module)


def same(given: Any, expected: Any) -> bool:
    pairs = zip([given["x"], *given["gates"]], [expected["x"], *expected["gates"]], strict=True)
    return all(close(one, other) for one, other in pairs)


@pytest.mark.parametrize("launch", ["picked", "always", "never"])
def test_every_instance_of_a_region_is_a_graph_of_its_own(store: Path, graphs: Any, launch: str) -> None:
    compiled, eager = loaded(store, graphs=aotc.Graphs(use=launch))
    assert graphs.captured == (0 if launch == "never" else 2 * REGIONS)
    with torch.no_grad():
        kept = [(compiled(x), eager(x)) for n in (8, 32, 8) for x in inputs(3, n, 64)]
    assert all(same(*pair) for pair in kept)  # outputs are the caller's to keep
    assert graphs.replayed == (0 if launch == "never" else 9 * REGIONS)
    assert [int(gate.calls) for gate in compiled.module.gates] == [9, 9]


def test_the_instances_share_the_static_buffers_of_their_inputs(store: Path) -> None:
    compiled, _ = loaded(store)
    blocks = [compiled.regions[f"blocks.{index}"] for index in range(3)]
    static = [
        leaf.data_ptr()
        for block in blocks
        for one in block._attached
        for graph in one.launch.graphs.values()
        for _, leaf in graph._copied
    ]
    assert len(static) == 6 and len(set(static)) == 1


def test_weights_are_swapped_in_all_graphs_before_a_call_sees_them(store: Path, graphs: Any) -> None:
    compiled, eager = loaded(store)
    new = stack(seed=1)
    (x,) = inputs(1, 8, 64)
    with torch.no_grad():
        compiled(x)
        before = graphs.captured
        compiled.update_weights(dict(new.named_parameters()))
        assert graphs.captured == before + 2 * REGIONS
        assert same(compiled(x), new(x)) and not same(compiled(x), eager(x))
    assert graphs.captured == before + 2 * REGIONS


def test_no_call_is_half_old_and_half_new(store: Path) -> None:
    compiled, eager = loaded(store)
    new = stack(seed=1)
    weights = [dict(copy.deepcopy(module).named_parameters()) for module in (new, eager)]
    (x,) = inputs(1, 8, 64)
    results: list[Any] = []
    ended = threading.Event()

    def call() -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            while not ended.is_set():
                results.append(compiled(x)["x"])
            torch.cuda.current_stream().synchronize()

    caller = threading.Thread(target=call)
    caller.start()
    for number in range(6):
        compiled.update_weights(weights[number % 2])
    ended.set()
    caller.join()
    with torch.no_grad():
        expected = [module(x)["x"] for module in (eager, new)]
    seen = [tuple(close(result, one) for one in expected) for result in results]
    assert set(seen) <= {(True, False), (False, True)} and seen


def test_a_padded_call_runs_the_graphs_of_its_bucket(store: Path, graphs: Any) -> None:
    module = stack(model="padded")
    compiled, eager = aotc.load(f"{store}#padded", module), copy.deepcopy(module)
    for n, seq in ((4, 16), (1, 5), (3, 16)):
        (x,) = inputs(1, n, seq, 64)
        mask = torch.ones(n, seq, dtype=torch.bool, device="cuda:0")
        with torch.no_grad():
            given, expected = compiled(x, mask), eager(x, mask)
        assert close(given["x"], expected["x"]) and close(given["parts"][0], expected["parts"][0])
    assert (graphs.captured, graphs.replayed) == (2, 6)


def test_views_are_refused_since_regions_share_the_memory_of_their_graphs(store: Path) -> None:
    with pytest.raises(aotc.BindError, match="cannot be views"):
        loaded(store, graphs=aotc.Graphs(outputs="view"))
