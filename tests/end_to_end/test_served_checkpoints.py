"""A checkpoint instead of a module, from build to serving: no model code, no compiler, the same results."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_python
from safetensors.torch import save_model
from torch import nn

import aotc
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference


def checkpoint(factory: Any, seed: int, **kwargs: Any) -> nn.Module:
    torch.manual_seed(seed)
    module: nn.Module = factory(**kwargs)
    return module.eval()


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(2, 8)


SERVE = """
import sys
import torch

class Ban:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("models", "shape_models", "transformers", "triton", "sympy") or name.startswith(
            ("torch._dynamo", "torch._inductor", "aotc.compiler", "aotc.manifest")
        ):
            raise ImportError(name + " is banned here")

sys.meta_path.insert(0, Ban())
import aotc

store, weights = sys.argv[1:]
compiled = aotc.load("semantics", weights=weights, store=store)
result = compiled({"x": torch.ones(2, 4), "flags": torch.tensor([True, False])}, torch.zeros(3, dtype=torch.int64))
print(result["y"].tolist(), result["calls"].item())
compiled.update_weights(weights)
print(not [name for name in sys.modules if name.partition(".")[0] in ("models", "transformers", "sympy", "triton")])
"""


def test_a_process_serves_a_checkpoint_without_a_compiler_and_without_the_models_code(
    zoo_store: Path, zoo: Any, tmp_path: Path
) -> None:
    """The model writes to a persistent buffer, and takes one that no checkpoint holds."""
    module = checkpoint(zoo.Semantics, 1)
    module.calls.fill_(41)  # type: ignore[operator, union-attr]
    save_model(module, str(tmp_path / "model.safetensors"))
    shown = run_python(SERVE, zoo_store, tmp_path / "model.safetensors").splitlines()
    with torch.no_grad():
        flags = torch.tensor([True, False])
        eager = module({"x": torch.ones(2, 4), "flags": flags}, torch.zeros(3, dtype=torch.int64))
    y, calls = shown[0].rsplit(" ", 1)
    assert torch.allclose(torch.tensor(eval(y)), eager["y"])
    assert calls == "42"
    assert shown[1] == "True"


def test_the_record_says_what_a_checkpoint_holds(zoo_store: Path) -> None:
    store = Store.open(zoo_store)
    (entry,) = read_bundle(store, Reference(None, "semantics", tag="latest")).artifacts
    artifact = read_artifact(store, entry.digest)
    assert {spec.name: spec.persistent for spec in artifact.state} == {"calls": True, "table": False, "weight": True}
    assert artifact.constants is not None
    (entry,) = read_bundle(store, Reference(None, "linear", tag="latest")).artifacts
    assert read_artifact(store, entry.digest).constants is None


def test_tied_weights_are_saved_once_and_served(zoo_store: Path, zoo: Any, tmp_path: Path) -> None:
    module = checkpoint(zoo.Tied, 1)
    save_model(module, str(tmp_path / "model.safetensors"))
    compiled = aotc.load("tied", weights=tmp_path, store=zoo_store)
    ids = torch.tensor([3, 1, 4, 1])
    with torch.no_grad():
        assert torch.allclose(compiled(ids), module(ids), atol=1e-5)


def test_a_cache_that_no_checkpoint_holds_begins_empty_and_is_kept_between_calls(
    zoo_store: Path, zoo: Any, tmp_path: Path
) -> None:
    """The build ran the model, which writes to it, before it was done."""
    from shape_models import KeyValueCache

    module = checkpoint(KeyValueCache, 1)
    save_model(module, str(tmp_path / "model.safetensors"))
    compiled = aotc.load("cache", weights=tmp_path, store=zoo_store)
    with torch.no_grad():
        for step in range(3):
            given, position = torch.randn(1, 4), torch.tensor(step)
            for output, expected in zip(compiled(given, position), module(given, position), strict=True):
                assert torch.allclose(output, expected, atol=1e-5)


def test_a_module_and_weights_are_one_too_many(zoo_store: Path, zoo: Any) -> None:
    module = checkpoint(zoo.Linear, 1)
    with pytest.raises(aotc.BindError, match="both a module and weights"):
        aotc.load("linear", module, weights=module.state_dict(), store=zoo_store)


def test_a_frozen_artifact_takes_no_weights(zoo_store: Path, zoo: Any) -> None:
    with pytest.raises(aotc.BindError, match="holds frozen weights"):
        aotc.load("frozen", weights=checkpoint(zoo.Linear, 0, width=64).state_dict(), store=zoo_store)


def test_the_stats_count_as_ever(zoo_store: Path, zoo: Any, x: torch.Tensor) -> None:
    compiled = aotc.load("linear", weights=checkpoint(zoo.Linear, 1).state_dict(), store=zoo_store)
    compiled(x)
    with pytest.raises(aotc.MissError):
        compiled(torch.zeros(3, 8))
    assert (compiled.stats().calls, compiled.module) == (1, None)


@pytest.mark.parametrize("way", ["module", "weights"])
def test_weights_are_swapped_under_load_and_no_call_sees_a_mixture(
    zoo_store: Path, zoo: Any, x: torch.Tensor, way: str
) -> None:
    """The whole output equals that of one of the two checkpoints, bit for bit."""
    states = [
        {name: each.clone() for name, each in checkpoint(zoo.Linear, seed).state_dict().items()} for seed in (1, 2)
    ]
    given: dict[str, Any] = {"weights": states[0]} if way == "weights" else {"module": checkpoint(zoo.Linear, 1)}
    compiled = aotc.load("linear", store=zoo_store, concurrency=3, **given)
    right = []
    for state in (*reversed(states), states[0]):
        compiled.update_weights(state)
        right.append(compiled(x))
    assert not torch.equal(right[0], right[1])
    mixed: list[torch.Tensor] = []
    calls, stop = [0, 0], threading.Event()

    def call() -> None:
        while not stop.is_set():
            output = compiled(x)
            matches = [torch.equal(output, each) for each in right[:2]]
            if any(matches):
                calls[matches.index(True)] += 1
            else:
                mixed.append(output)

    threads = [threading.Thread(target=call) for _ in range(3)]
    with torch.no_grad():
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        for number in itertools.count():
            compiled.update_weights(states[number % 2])
            assert torch.equal(compiled(x), right[1 - number % 2])
            if number >= 200 and (min(calls) or time.monotonic() > deadline):  # by then each was served by a thread
                break
        stop.set()
        for thread in threads:
            thread.join()
    assert not mixed
    assert min(calls) > 0
