"""The plug-in in a real vLLM: one engine compiles and saves, others start from that store, each in a fresh process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from vllm_starts import Start, elsewhere, ended, start, without_compilers

from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.compiler_cache import CompilerCache, publish_cache
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.tools.caches.restore import cache_of

pytestmark = pytest.mark.vllm
REF = Reference(None, "llama", tag="v1")


class Compiled(NamedTuple):
    """An engine that compiled, with its caches in `caches`, and what it saved as `llama:v1`."""

    start: Start
    store: Path
    caches: Path

    def cache(self) -> CompilerCache:
        store = Store.open(self.store)
        return cache_of(store, read_bundle(store, REF))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    kept = os.environ.get("AOTC_ENGINE_TESTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("compiled")
    store, caches = folder / "store", folder / "caches"
    if (folder / "work" / "found.json").exists():
        return Compiled(ended(folder / "work"), store, caches)
    made = start(folder / "work", caches, AOTC_VLLM="save", AOTC_VLLM_CACHE="llama:v1", AOTC_STORE=store)
    assert len(made.tokens) == 16, made.log
    return Compiled(made, store, caches)


def restored(compiled: Compiled, folder: Path, **settings: object) -> Start:
    variables = {"AOTC_VLLM": "restore", "AOTC_VLLM_CACHE": "llama:v1", "AOTC_STORE": compiled.store}
    return start(folder / "work", folder / "caches", **variables | settings)


def test_what_an_engine_compiled_is_saved_with_its_factors(compiled: Compiled) -> None:
    assert compiled.start.compiled
    paths = [file.path for file in compiled.cache().files]
    assert [path for path in paths if path.endswith("/rank_0_0/model")]
    assert [path for path in paths if path.startswith("torch_compile_cache/aotc_factors/")]
    libraries = {path for path in paths if path.endswith(".main.so")}  # others try what the compiler can do
    assert libraries and {f"{path}.aotc.json" for path in libraries} <= {*paths}


def test_elsewhere_without_a_compiler_everything_is_found(compiled: Compiled, tmp_path: Path) -> None:
    """torch, vLLM and the caches at other paths, no C++ compiler on PATH, and a compile would be an error."""
    python, path = elsewhere(tmp_path / "environment"), without_compilers(tmp_path / "bin")
    found = restored(compiled, tmp_path, python=python, path=path, AOTC_NO_COMPILER=1)
    assert found.tokens == compiled.start.tokens, found.log
    assert found.receipt.flaws(("used", "no-compiler")) == []
    (line,) = [line for line in found.lines() if "receipt" in line]
    assert f"{len(found.receipt.used)} of {found.receipt.restored} restored files used, 0 written anew" in line


@pytest.fixture
def one_less(compiled: Compiled, tmp_path: Path) -> str:
    """The cache without one of its libraries, in the same store; the library's name."""
    cache, store = compiled.cache(), Store.open(compiled.store)
    lost = next(file for file in cache.files if file.path.endswith(".main.so"))
    pack = tmp_path / "files"
    with (tmp_path / "whole").open("w+b") as whole, pack.open("wb") as stream:
        store.blobs.unpack(cache.pack, whole)
        whole.seek(0)
        for file in cache.files:
            data = whole.read(file.size)
            stream.write(data if file != lost else b"")
    files = tuple(file for file in cache.files if file != lost)
    with store.writing("a test"):
        packed = store.blobs.put_file_zstd(pack, 6)
        publish_cache(store, msgspec.structs.replace(cache, files=files, pack=packed), "less")
    return lost.path.rpartition("/")[2]


def test_a_library_that_is_missing_is_compiled_and_in_the_receipt(
    compiled: Compiled, one_less: str, tmp_path: Path
) -> None:
    found = restored(compiled, tmp_path, AOTC_VLLM_CACHE="llama:less")
    assert found.tokens == compiled.start.tokens, found.log
    assert "Directly load AOT compilation" in found.log  # and a kernel is compiled behind it
    assert len([source for source in found.compiled if source.endswith(".main.cpp")]) == 1
    (line,) = [line for line in found.lines() if "receipt" in line]
    assert ".main.cpp" in line


def test_a_library_that_is_missing_is_refused_by_name(compiled: Compiled, one_less: str, tmp_path: Path) -> None:
    found = restored(compiled, tmp_path, AOTC_VLLM_CACHE="llama:less", AOTC_NO_COMPILER=1)
    assert found.tokens == []
    assert re.search(f"{one_less} is missing: .* and AOTC_NO_COMPILER is 1", found.log), found.log


def test_another_version_of_vllm_is_refused_before_a_write(compiled: Compiled, tmp_path: Path) -> None:
    store = Store.open(compiled.store)
    cache = compiled.cache()
    with store.writing("a test"):
        packages = cache.packages | {"vllm": "0.31.0"}
        publish_cache(store, msgspec.structs.replace(cache, packages=packages), "other")
    found = restored(compiled, tmp_path, AOTC_VLLM_CACHE="llama:other", AOTC_NO_COMPILER=1)
    assert found.tokens == []
    assert "vllm: the cache is of 0.31.0, here is 0.32.0" in found.log
    assert not (tmp_path / "caches" / "vllm" / "torch_compile_cache").exists()


def test_a_miss_names_the_factor_that_differs(compiled: Compiled, tmp_path: Path) -> None:
    found = restored(compiled, tmp_path, max_num_seqs=4, AOTC_NO_COMPILER=1)
    assert "SchedulerConfig.max_num_seqs: the cache is of 8, here is 4" in found.log
    assert found.tokens == []


def test_only_what_a_start_used_is_kept(compiled: Compiled, tmp_path: Path) -> None:
    found = restored(compiled, tmp_path)
    command = [sys.executable, "-m", "aotc", "cache", "save", "llama:small", "--store", compiled.store]
    command += ["--cache", f"vllm={tmp_path / 'caches' / 'vllm'}", "--prune", tmp_path / "work" / "receipt"]
    subprocess.run(list(map(str, command)), check=True)
    store = Store.open(compiled.store)
    small = cache_of(store, read_bundle(store, Reference(None, "llama", tag="small")))
    assert 0 < len(small.files) == len(found.receipt.used) < found.receipt.restored
    shutil.rmtree(tmp_path / "caches")
    again = restored(compiled, tmp_path, AOTC_VLLM_CACHE="llama:small", AOTC_NO_COMPILER=1)
    assert again.tokens == compiled.start.tokens, again.log


def test_a_receipt_of_a_load_that_failed_is_refused(compiled: Compiled, tmp_path: Path) -> None:
    """Without the plug-in vLLM fails to load its own artifact on the CPU, traces the model, and writes it again."""
    caches = ["--cache", f"vllm={tmp_path / 'caches' / 'vllm'}", "--store", str(compiled.store)]
    command, receipt = [sys.executable, "-m", "aotc", "cache"], str(tmp_path / "receipt")
    restoring = [*command, "restore", "llama:v1", *caches, "--receipt", receipt, "--json"]
    variables = json.loads(subprocess.run(restoring, check=True, capture_output=True, text=True).stdout)["variables"]
    found = start(tmp_path / "work", tmp_path / "caches", **variables)
    assert "Compiling model again due to a load failure" in found.log
    pruning = [*command, "save", "llama:never", *caches, "--prune", receipt]
    refused = subprocess.run(pruning, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    assert re.search("rank_0_0/model: was replaced", refused.stderr), refused.stderr
