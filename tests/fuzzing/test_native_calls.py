"""A seeded sample of `native_calls.py`, and what no random call shows: references, threads, forks, another Python."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import filelock
import msgspec
import pytest
import torch
from fuzzing.native_calls import Both, build, natives, ran
from fuzzing.native_models import Called, Pair
from processes import ROOT, finish, start
from torch.autograd import forward_ad

import aotc
from aotc.compiler.publish.merging import merge_stores
from aotc.machine.cpp_compiler import compiler_version
from aotc.records import Artifact
from aotc.runtime import load
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.layout.store import Store
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import parse_reference

STEPS = 1000


@pytest.fixture(scope="module")
def store(shared_folder: Path) -> Path:
    folder = shared_folder / "native-calls"
    with filelock.FileLock(shared_folder / "native-calls.lock"):
        if not (folder / "index.json").exists():
            folder.mkdir(exist_ok=True)
            build(folder)
    return folder


def inputs(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(batch, 4), torch.rand(batch, 2)


@pytest.mark.every_torch
def test_a_sample_gives_the_same_both_ways(store: Path) -> None:
    found = finish(start(ROOT / "tests" / "fuzzing" / "native_calls.py", STEPS, 7, "--store", store))
    assert found.returncode == 0, found.stdout + found.stderr
    counted = ast.literal_eval(found.stdout)
    assert len(counted) == 3
    assert min(counted.values()) > STEPS / 25, counted


def test_from_the_second_call_on_the_extension_makes_it(store: Path) -> None:
    both = Both(store, "called")
    with torch.no_grad():
        for count in range(5):
            for batch in (2, 4, 7):
                given = inputs(batch)
                assert torch.equal(*(call(*given)["y"] for call in both.calls))
            assert ran(both.calls[0]) == 3 * count
    assert both.calls[0].stats() == both.calls[1].stats()


def test_each_region_is_called_by_its_own(store: Path) -> None:
    both = Both(store, "blocks")
    assert len(natives(both.calls[0])) == 2
    for call in (both.calls[0], both.modules[0], both.calls[0].forward, both.modules[0]):
        given = inputs()
        with torch.no_grad():
            assert torch.equal(call(*given)[0], both.calls[1](*given)[0])
    assert ran(both.calls[0]) == 2 * 3
    with torch.no_grad():
        both.modules[0].blocks[1].linear.weight.mul_(2)
        both.modules[1].blocks[1].linear.weight.mul_(2)
    both.calls[0].update_weights({"blocks.0.linear.bias": torch.ones(4)})
    both.calls[1].update_weights({"blocks.0.linear.bias": torch.ones(4)})
    given = inputs()
    results = [call(*given)[0] for call in both.calls]
    assert torch.equal(*results)
    assert both.calls[0].stats() == both.calls[1].stats()


def test_calls_keep_nothing(store: Path) -> None:
    """Neither of inputs, results nor of the callable, whose libraries are closed when it is dropped."""
    module = Pair().eval()
    call = aotc.load(f"{store}#pair", module)
    given = inputs()
    with torch.no_grad():
        call(*given)
        call(*given)
        before = [sys.getrefcount(each) for each in (*given, module.linear.weight, None, NotImplemented)]
        for _ in range(200):
            call(*given)
            call.forward.native(*given, unknown=1)
        after = [sys.getrefcount(each) for each in (*given, module.linear.weight, None, NotImplemented)]
    assert all(abs(one - other) < 50 for one, other in zip(before, after, strict=True)), (before, after)
    assert before[:3] == after[:3]
    native, ours = weakref.ref(call.forward), weakref.ref(module)
    gc.disable()
    try:
        del call
        assert native() is None
        del module
        assert ours() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["pair", "padded"])
def test_replaced_weights_are_dropped_before_the_next_call(store: Path, name: str) -> None:
    both = Both(store, name)
    call, given = both.calls[0], inputs()
    with torch.no_grad():
        call(*given), call(*given)
        old = weakref.ref(call.forward._state._seen.state)
        call.update_weights({"linear.bias": torch.ones(4)})
        assert ran(call) == 1
        assert old() is None
        assert torch.equal(call(*given)[0], both.modules[0](*given)[0])


def test_a_tangent_is_refused_after_calls_without_one(store: Path) -> None:
    """Calls within the same level of forward-mode differentiation."""
    both, given = Both(store, "pair"), inputs()
    with torch.no_grad(), forward_ad.dual_level():
        for call in both.calls:
            call(*given), call(*given)
            with pytest.raises(aotc.MissError, match="has a tangent"):
                call(forward_ad.make_dual(given[0], torch.ones(2, 4)), given[1])


def test_threads_call_while_weights_are_replaced(store: Path) -> None:
    module = Pair().eval()
    call = aotc.load(f"{store}#pair", module, concurrency=2)
    given = inputs()
    with torch.no_grad():
        weights = [{"linear.weight": torch.full((4, 4), value), "linear.bias": torch.zeros(4)} for value in (1.0, 2.0)]
        call.update_weights(weights[0])
        expected = [given[0].sum(1, keepdim=True).expand(2, 4) * value for value in (1.0, 2.0)]

    def work(_: int) -> bool:
        with torch.no_grad():
            results = [call(*given)[0] for _ in range(300)]
        return all(any(torch.allclose(result, each) for each in expected) for result in results)

    with ThreadPoolExecutor(3) as pool:
        done = pool.map(work, range(3))
        for number in range(100):
            call.update_weights(weights[number % 2])
        assert all(done)
    assert call.stats().calls == 900
    assert ran(call) > 0


def test_its_file_is_named_by_no_module(store: Path) -> None:
    """Hypothesis and reloaders read the files of all modules, and its file is a descriptor, which other files get."""
    assert aotc.load(f"{store}#pair", Pair().eval()).forward.native is not None
    files = {name: str(getattr(module, "__file__", "")) for name, module in [*sys.modules.items()]}
    assert not [name for name, file in files.items() if file.startswith("/proc")]
    assert "aotc_native_call" not in files


def test_a_forked_child_has_a_container_of_its_own(store: Path) -> None:
    script = f"""
import os, threading, torch, aotc
from fuzzing.native_models import Pair
call = aotc.load("{store}#pair", Pair().eval())
given = torch.rand(2, 4), torch.rand(2, 2)
waiting = threading.Event()
threading.Thread(target=waiting.wait, daemon=True).start()  # else the child shares it
with torch.no_grad():
    expected = [call(*given)[0] for _ in range(3)][-1]
    if (child := os.fork()) == 0:
        same = all(torch.equal(call(*given)[0], expected) for _ in range(4))
        os._exit(0 if same and sum(row[0] for row in call.forward.native.counts()) == 5 else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("other", [{"torch": "2.12.0"}, {"abi": "cpython-312-x86_64-linux-gnu"}, {"interface": 0}])
def test_of_another_version_it_is_not_opened(store: Path, other: dict[str, Any]) -> None:
    def read(*given: Any) -> Artifact:
        artifact = read_artifact(*given)
        assert artifact.native is not None
        return msgspec.structs.replace(artifact, native=msgspec.structs.replace(artifact.native, **other))

    with patch.object(load, "read_artifact", read):
        call = aotc.load(f"{store}#called", Called().eval())
    assert call.forward.native is None
    with torch.no_grad():
        assert call(*inputs())["y"].shape == (2, 4)


def test_without_a_compiler_bundles_are_published_without_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    compiler_version.cache_clear()
    merge_stores([store], tmp_path / "merged", "latest")
    compiler_version.cache_clear()
    assert "calls of what is built here will be made by Python" in caplog.text
    call = aotc.load(f"{tmp_path / 'merged'}#pair", Pair().eval())
    assert call.forward.native is None
    with torch.no_grad():
        assert call(*inputs())[0].shape == (2, 4)


def test_it_goes_where_its_artifact_goes(store: Path, tmp_path: Path) -> None:
    merged = merge_stores([store], tmp_path / "merged", "latest")
    assert merged.bundles == {entry.model: entry.digest for entry in Store.open(store).tags()}
    collect(Store.open(tmp_path / "merged"), Policy(grace=0.0))
    ref = aotc.fetch(f"{(tmp_path / 'merged').as_uri()}#pair", store=tmp_path / "fetched")
    call = aotc.load(ref, Pair().eval())
    assert call.forward.native is not None


def test_the_extension_is_a_layer_of_the_artifact_and_names_no_folder_of_the_build(store: Path) -> None:
    opened = StoreReader.open(store)
    digests = set()
    for name in ("called", "pair", "blocks", "frozen"):
        (entry,) = read_bundle(opened, parse_reference(f"{store}#{name}")).artifacts
        native = read_artifact(opened, entry).native
        assert native is not None
        digests.add(native.file.blob)
        assert str(ROOT).encode() not in opened.blobs.load(native.file, 1 << 24)
    assert len(digests) == 1
