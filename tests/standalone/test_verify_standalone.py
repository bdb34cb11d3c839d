"""`aotc verify --standalone`: what a process without torch computes, by the one comparator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from in_process import run_here
from processes import ZOO

import aotc
from aotc.errors import VerifyError
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import parse_reference
from aotc.verify.standalone_calls import StandaloneCalls
from aotc.verify.standalone_child import decoded, encoded, is_dense

HERE = Path(__file__).parent


def calls_of(store: Path, name: str, module: torch.nn.Module) -> StandaloneCalls:
    (entry,) = read_bundle(StoreReader.open(store), parse_reference(name)).artifacts
    return StandaloneCalls(name, str(store), entry.target, module)


def test_a_model_is_right_without_torch(zoo_store: Path) -> None:
    ran = run_here("verify", f"{zoo_store}#linear", "--standalone", "--seeds", "1", "--json", cwd=ZOO)
    rows = json.loads(ran.stdout)
    assert ran.returncode == 0 and [row["bucket"] for row in rows] == ["batch=2", "batch=4"]
    assert {row["status"] for row in rows} == {"ok"} and {row.get("weights", "own") for row in rows} == {"own"}


@pytest.mark.parametrize("name", ["pooled", "accumulating", "semantics", "cache", "history", "assigned"])
def test_a_model_that_is_padded_or_writes_is_right_without_torch(zoo_store: Path, name: str) -> None:
    """Its inputs, its buffers and the memory of its results are compared, too."""
    ran = run_here("verify", f"{zoo_store}#{name}", "--standalone", "--seeds", "1", "--json", cwd=ZOO)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert {row["status"] for row in json.loads(ran.stdout)} == {"ok"}


@pytest.mark.parametrize("runtime", [["--standalone"], []])
def test_views_among_the_results_of_a_padded_call_are_views_as_in_eager(
    shared_folder: Path, built: Any, runtime: list[str]
) -> None:
    store = built(shared_folder, "libraries-store", HERE / "libraries.yaml")
    ran = run_here("verify", f"{store}#padded-dinov2", *runtime, "--seeds", "1", "--json", cwd=HERE)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert [row["sizes"] for row in json.loads(ran.stdout)] == ["batch=3", "batch=2", "batch=1"]


def test_what_does_not_fit_could_not_run(zoo_store: Path) -> None:
    ran = run_here("verify", f"{zoo_store}#recurrent", "--standalone", "--seeds", "1", cwd=ZOO)
    assert ran.returncode == 2
    assert "without torch: LibraryError" in ran.stderr and "operators by name" in ran.stderr


def test_wrong_weights_are_seen(zoo_store: Path, zoo: Any) -> None:
    """The child has the module's weights, not those of the build, and computes with them."""
    torch.manual_seed(1)
    module = zoo.Linear().eval()
    calls, x = calls_of(zoo_store, "linear", module), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(calls(x), module(x))
        module.linear.weight.add_(1)
        assert not torch.allclose(calls(x), module(x))


def test_what_is_written_is_written_to_the_caller_s_and_the_module_s_tensors(zoo_store: Path, zoo: Any) -> None:
    module, eager = zoo.Semantics().eval(), zoo.Semantics().eval()
    eager.load_state_dict(module.state_dict())
    calls = calls_of(zoo_store, "semantics", module)
    given = {"flags": torch.tensor([True, False]), "x": torch.randn(2, 4)}
    states = torch.arange(3), torch.arange(3)
    with torch.no_grad():
        for count in (1, 2, 7):
            if count == 7:
                module.calls.fill_(6)  # as its owner may at any time
            result = calls(given, states[0])
            expected = eager(given, states[1])
            assert int(result["calls"]) == int(module.calls) == count
            assert torch.equal(*states) and torch.allclose(result["y"], expected["y"])
    assert result["view"].data_ptr() == given["x"].data_ptr() and result["same"] is given["x"]


def test_an_error_of_the_child_is_told(zoo_store: Path, zoo: Any) -> None:
    calls = calls_of(zoo_store, "linear", zoo.Linear().eval())
    with pytest.raises(VerifyError, match=r"without torch: MissError: .*"):
        calls(torch.randn(3, 8))
    calls._process.kill()
    with pytest.raises(VerifyError, match="the process without torch ended with status -9"):
        calls(torch.randn(2, 8))


def test_values_come_back_as_they_were() -> None:
    value = {"a": [1, (2.5, None)], "b": ("text", True), "c": numpy.float32(1)}
    held: list[Any] = []

    def put(part: Any) -> list[Any] | None:
        if isinstance(part, numpy.generic):
            held.append(part)
            return [len(held) - 1]
        return None

    text = json.dumps(encoded(value, put))
    assert decoded(json.loads(text), lambda at: held[at[0]]) == value
    with pytest.raises(TypeError, match="Compiled cannot be given to a process without torch"):
        encoded(object.__new__(aotc.Compiled), put)


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [
        ((3, 4), (4, 1), True),
        ((3, 4), (1, 3), True),  # transposed: a result beside its transpose is in the same memory
        ((2, 3, 1, 4), (12, 1, 7, 3), True),
        ((), (), True),
        ((3, 4), (8, 1), False),
        ((3, 4), (0, 1), False),
        ((2, 2), (1, 1), False),
    ],
)
def test_what_is_dense_is_sent_as_it_lies(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    assert is_dense(shape, strides) == dense
