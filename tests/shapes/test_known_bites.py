"""Cases that bit users of other tools: a wrong answer there, an error or a right answer here."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from bound_files import bind_files
from doctoring import artifact_of, copy_store, publish_changed
from in_process import run_here
from processes import ROOT, run_python
from torch import Tensor, nn

import aotc
from aotc.compiler.planning.key import unit_key
from aotc.compiler.planning.plan import plan_units
from aotc.errors import BindError, CorruptError, StoreError
from aotc.manifest import read_manifest
from aotc.reads.attributes import module_attributes
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.store.layout.store import Store

# -- guards that are not checked after a load -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "reason"),
    [
        (torch.randn(3, 8), "batch is 3"),
        (torch.randn(2, 9), r"shape \[2, 8\] is expected, \[2, 9\] came"),
        (torch.randn(2, 1, 8), r"shape \[batch, 8\] is expected"),
        (torch.randn(2, 8, dtype=torch.float64), "dtype float32 is expected, float64 came"),
        (torch.randn(8, 2).t(), "layout contiguous is expected"),
        (torch.randn(2, 8).to_sparse(), "a dense tensor is expected"),
        (torch.randn(2, 8, device="meta"), "device cpu is expected, meta came"),
        ([[0.0] * 8] * 2, "a tensor is expected"),
    ],
)
def test_every_guard_is_checked_on_the_loaded_code(zoo: Any, zoo_store: Path, x: Any, reason: str) -> None:
    compiled = aotc.load(f"{zoo_store}#linear", zoo.Linear().eval())
    with pytest.raises(aotc.MissError, match=reason):
        compiled(x)
    assert compiled.stats().calls == 0


@pytest.mark.parametrize(
    ("change", "undo", "reason"),
    [
        (
            lambda: torch.set_default_dtype(torch.float64),
            lambda: torch.set_default_dtype(torch.float32),
            "default dtype",
        ),
        (
            lambda: torch.set_float32_matmul_precision("medium"),
            lambda: torch.set_float32_matmul_precision("highest"),
            "float32 matmul precision highest, it is medium now",
        ),
        (
            lambda: torch.use_deterministic_algorithms(True),
            lambda: torch.use_deterministic_algorithms(False),
            "deterministic False, it is True now",
        ),
    ],
)
def test_a_mode_set_after_the_load_is_seen_at_the_call(
    zoo: Any, zoo_store: Path, change: Callable[[], None], undo: Callable[[], None], reason: str
) -> None:
    compiled, x = aotc.load(f"{zoo_store}#linear", zoo.Linear().eval()), torch.randn(2, 8)
    compiled(x)
    change()
    try:
        with pytest.raises(aotc.MissError, match=reason):
            compiled(x)
    finally:
        undo()
    compiled(x)


def test_training_mode_after_the_load_is_seen_at_the_call(zoo: Any, zoo_store: Path) -> None:
    module = zoo.Linear().eval()
    compiled = aotc.load(f"{zoo_store}#linear", module)
    module.train()
    with pytest.raises(aotc.MissError, match=r"module\.training False, it is True now"):
        compiled(torch.randn(2, 8))


# -- a changed model against an old artifact --------------------------------------------------------------------------


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another `models` module, with an edit in a line that no signature, attribute or weight shows."""
    source = (Path(__file__).parents[1] / "zoo" / "models.py").read_text()
    changed = source.replace("return torch.relu(self.linear(x))", "return torch.relu(self.linear(x)) + 1")
    assert changed != source
    folder = tmp_path / "edited"
    folder.mkdir()
    (folder / "edited_models.py").write_text(changed)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("edited_models")


def test_a_changed_source_is_refused_at_load(edited: Any, zoo_store: Path, tmp_path: Path) -> None:
    with pytest.raises(BindError, match="the source of class Linear changed since the build") as caught:
        aotc.load(f"{zoo_store}#linear", edited.Linear().eval(), cache=tmp_path / "cache")
    assert 'ignore=["source"]' in str(caught.value)


def test_a_changed_source_runs_the_old_code_only_where_that_was_asked_for(
    edited: Any, zoo: Any, zoo_store: Path
) -> None:
    module = edited.Linear().eval()
    compiled = aotc.load(f"{zoo_store}#linear", module, ignore=["source"])
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.allclose(compiled(x) + 1, module(x), atol=1e-6)


HELPED = """
import torch
from helped_between import double

class Helped(torch.nn.Module):
    def forward(self, x):
        return double(x) + 1
"""
HELPED_MANIFEST = """
version: 1
models:
  helped:
    factory: helped_model.py:Helped
    inputs: {x: {shape: [2, 8]}}
"""
LOAD_HELPED = """
import sys, torch, aotc
from helped_model import Helped
print(aotc.load(sys.argv[1], Helped().eval())(torch.ones(2, 8))[0, 0].item())
"""


def test_a_changed_helper_of_the_model_s_file_is_refused_at_load(tmp_path: Path) -> None:
    """Its class's own file is what it was, so nothing but the helper's file says that eager gives something else."""
    (tmp_path / "helped_model.py").write_text(HELPED)
    (tmp_path / "helped_between.py").write_text("from helped_helper import FACTOR\ndouble = lambda x: x * FACTOR\n")
    (tmp_path / "helped_helper.py").write_text("FACTOR = 2.0\n")
    (tmp_path / "manifest.yaml").write_text(HELPED_MANIFEST)
    ran = run_here("build", tmp_path / "manifest.yaml", "--store", tmp_path / "store")
    assert ran.returncode == 0, ran.stderr
    python_path = os.pathsep.join([str(ROOT), str(tmp_path)])
    ref = f"{tmp_path / 'store'}#helped"
    assert run_python(LOAD_HELPED, ref, PYTHONPATH=python_path) == "3.0\n"
    (tmp_path / "helped_helper.py").write_text("FACTOR = 3.0\n")
    with pytest.raises(AssertionError, match="the source of `helped_helper`, which the module's code imports, changed"):
        run_python(LOAD_HELPED, ref, PYTHONPATH=python_path)


def test_a_changed_attribute_is_refused_at_load(zoo: Any, zoo_store: Path) -> None:
    module = zoo.Block().eval()
    module.heads = 2
    with pytest.raises(BindError, match="heads: built with 4, here it is 2"):
        aotc.load(f"{zoo_store}#ranged", module)


def test_a_changed_plain_tensor_is_refused_at_load(zoo: Any, zoo_store: Path) -> None:
    """`self.offset = torch.tensor(...)` is neither parameter nor buffer: it is a constant of the compiled code."""
    module = zoo.Semantics().eval()
    aotc.load(f"{zoo_store}#semantics", module)
    module.offset = module.offset + 1
    with pytest.raises(BindError, match="offset: built with 'tensor float32"):
        aotc.load(f"{zoo_store}#semantics", module)


def test_plain_tensors_count_by_dtype_shape_and_bytes_and_not_by_identity() -> None:
    def attributes(value: Any) -> Any:
        module = nn.Module()
        module.value = value
        return module_attributes(module)[""]["value"]

    base = attributes(torch.arange(6.0))
    assert attributes(torch.arange(6.0)) == base
    others = [torch.arange(6.0) + 1, torch.arange(6.0).view(2, 3), torch.arange(6.0).view(torch.int32)]
    assert base not in [attributes(other) for other in others]


# -- a key that hits although the guards differ -----------------------------------------------------------------------

KEYED = """
import json
from pathlib import Path
import torch

class Keyed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        form = json.loads((Path(__file__).parent / "form.json").read_text())
        self.register_buffer("table", torch.zeros(form["shape"], dtype=getattr(torch, form["dtype"])))
        self.register_buffer("same", self.table if form["tied"] else torch.zeros(4))

    def forward(self, x, scale=1.0):
        return x * self.table.sum() * scale
"""
FORM = {"shape": [4], "dtype": "float32", "tied": False}


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "guard_keyed", raising=False)
    (tmp_path / "guard_keyed.py").write_text(KEYED)

    def key(form: dict[str, Any] | None = None, **changes: Any) -> str:
        (tmp_path / "form.json").write_text(msgspec.json.encode({**FORM, **(form or {})}).decode())
        entry = {
            "factory": "guard_keyed.py:Keyed",
            "inputs": {"x": {"shape": ["n", 8]}},
            "targets": ["cpu:x86-64-v3"],
            "buckets": [{"n": 2}],
        }
        path = tmp_path / "manifest.yaml"
        path.write_text(yaml.safe_dump({"version": 1, "models": {"m": {**entry, **changes}}}))
        (unit,) = plan_units(read_manifest(path))
        return unit_key(unit.factors)

    return key


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"inputs": {"x": {"shape": ["n", 9]}}}, id="shape"),
        pytest.param({"inputs": {"x": {"shape": ["n", 8], "dtype": "int64"}}}, id="dtype"),
        pytest.param({"inputs": {"x": {"shape": ["n", 8, 2, 2], "layout": "channels_last"}}}, id="layout"),
        pytest.param({"inputs": {"x": {"shape": ["n", 8], "pad": {"n": 0}}}}, id="padding"),
        pytest.param({"inputs": {"x": {"shape": ["n", 8]}, "scale": 2.0}}, id="a constant"),
        pytest.param({"make_contiguous": True}, id="make_contiguous"),
        pytest.param({"buckets": [{"n": 3}]}, id="size"),
        pytest.param({"buckets": [{"n": {"range": [2, 8], "tune_at": 2}}]}, id="range"),
        pytest.param({"buckets": [{"n": {"range": [2, 8], "multiple_of": 2}}]}, id="divisibility"),
        pytest.param({"autocast": "bfloat16"}, id="autocast"),
        pytest.param({"float32_matmul_precision": "high"}, id="matmul precision"),
        pytest.param({"options": {"cpp.dynamic_threads": False}}, id="thread count baked in"),
        pytest.param({"weights": "frozen", "targets": ["native"]}, id="weights"),
        pytest.param({"form": {"shape": [2, 2]}}, id="shape of a live buffer"),
        pytest.param({"form": {"dtype": "bfloat16"}}, id="dtype of a live buffer"),
        pytest.param({"form": {"tied": True}}, id="tied buffers"),
    ],
)
def test_what_is_in_a_guard_is_in_the_key(key_of: Any, changes: dict[str, Any]) -> None:
    """Two units whose guards differ never share a key, so no build takes the one's record for the other."""
    assert key_of(**changes) != key_of()
    assert key_of() == key_of()


def test_a_baked_thread_count_is_in_the_key(key_of: Any) -> None:
    baked, threads = {"options": {"cpp.dynamic_threads": False}}, torch.get_num_threads()
    keys, free = [], []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            keys.append(key_of(**baked))
            free.append(key_of())
    finally:
        torch.set_num_threads(threads)
    assert keys[0] != keys[1] and free[0] == free[1]


# -- an artifact with no variant --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_miss", ["error", "eager"])
def test_an_artifact_with_no_variant_is_an_error_at_load(
    zoo: Any, zoo_store: Path, tmp_path: Path, on_miss: Any
) -> None:
    """It must not become a callable that runs eager for ever; nor may a store take such an artifact."""
    empty = msgspec.structs.replace(artifact_of(Store.open(zoo_store), "linear"), variants=())
    with pytest.raises(CorruptError, match="holds no variant"):
        bind_files(
            empty,
            lambda variant: FilesInFolder(tmp_path, variant.library),
            zoo.Linear().eval(),
            torch.device("cpu"),
            on_miss=on_miss,
            read_file=lambda file: b"",
        )
    with pytest.raises(StoreError, match="no variants"):
        publish_changed(copy_store(zoo_store, tmp_path), "linear", lambda artifact: empty)


# -- misses in silence ------------------------------------------------------------------------------------------------


def test_a_miss_that_runs_eager_is_counted_and_logged_once(
    zoo: Any, zoo_store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = zoo.Linear().eval()
    compiled = aotc.load(f"{zoo_store}#linear", module, on_miss="eager")
    with torch.no_grad(), caplog.at_level(logging.WARNING, "aotc"):
        for rows in (3, 3, 5):
            x = torch.randn(rows, 8)
            assert torch.equal(compiled(x), module(x))
    stats = compiled.stats()
    assert (stats.calls, stats.misses) == (0, 3)
    assert sorted(stats.miss_kinds.values()) == [1, 2]
    assert len(caplog.records) == 2, "each kind of miss once"
    assert "batch is 3" in caplog.text and "batch is 5" in caplog.text


def test_the_caller_decides_on_a_miss(zoo: Any, zoo_store: Path) -> None:
    seen: list[aotc.MissError] = []

    def decide(error: aotc.MissError, x: Tensor) -> str:
        seen.append(error)
        return f"{x.shape[0]} rows"

    compiled = aotc.load(f"{zoo_store}#linear", zoo.Linear().eval(), on_miss=decide)
    assert compiled(torch.randn(3, 8)) == "3 rows"
    assert isinstance(seen[0], LookupError) and seen[0].model == "linear"


def test_explain_and_stats_of_padded_calls(zoo: Any, zoo_store: Path) -> None:
    """`explain` says what would run, and runs and counts nothing; `stats` says how much of what ran was padding."""
    compiled = aotc.load(f"{zoo_store}#pooled", zoo.Pooled().eval())

    def request(batch: int, seq: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(batch, seq, dtype=torch.int64), torch.ones(batch, seq, dtype=torch.bool)

    exact, padded, miss = (compiled.explain(*request(*sizes)) for sizes in ((4, 16), (2, 9), (5, 16)))
    assert (exact.kind, exact.bucket, exact.pads) == ("exact", "batch=4,seq=16", ())
    assert (padded.kind, padded.bucket) == ("padded", "batch=4,seq=16")
    assert padded.pads == (
        "ids.shape[0]: 2 → 4",
        "ids.shape[1]: 9 → 16",
        "mask.shape[0]: 2 → 4",
        "mask.shape[1]: 9 → 16",
    )
    assert miss.kind == "miss" and miss.rejected["batch=4,seq=16"][0].actual == "5"
    assert compiled.stats().calls == compiled.stats().misses == 0
    compiled(*request(4, 16))
    compiled(*request(2, 8))
    with pytest.raises(aotc.MissError):
        compiled(*request(5, 16))
    stats = compiled.stats()
    bucket = stats.buckets["batch=4,seq=16"]
    assert (bucket.calls, bucket.padded_calls) == (2, 1)
    assert bucket.padding_waste == pytest.approx(1 - (64 + 16) / (64 + 64))
    assert stats.counters()["aotc_misses_total"] == 1 and stats.counters()["aotc_calls_total"] == 2
    assert list(stats.miss_kinds.values()) == [1] and "batch is 5" in next(iter(stats.miss_kinds))


def test_explain_of_a_wrong_mode_names_both_values(zoo: Any, zoo_store: Path) -> None:
    compiled = aotc.load(f"{zoo_store}#autocast", zoo.Linear().eval())
    reason = compiled.explain(torch.randn(2, 8)).reasons[0]
    assert (reason.expected, reason.actual) == ("bfloat16", "off")
