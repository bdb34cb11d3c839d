"""Frozen weights lie in files of their own: once for all buckets and processes, as the library would have held them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from doctoring import artifact_of, copy_store

import aotc
from aotc.compiler.codegen.library_constants import SMALL, pack_call, write_constants
from aotc.compiler.executors.ray.task import kept_servers
from aotc.compiler.messages import Settings
from aotc.compiler.pipeline import build
from aotc.compiler.request import BuildRequest
from aotc.manifest import read_manifest
from aotc.records import CONSTANTS, File
from aotc.runtime.libraries.files import FilesInMemory
from aotc.runtime.libraries.frozen_weights import LibraryConstants, MappedWeights
from aotc.runtime.libraries.runner import open_runner
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy

CPU = torch.device("cpu")

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(700, 128)
        self.linear = nn.Linear(128, 1024)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens).sum(1))

class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(128, 128, 3, padding=1)

    def forward(self, x):
        return self.convolution(x).sin()
"""


# -- files ------------------------------------------------------------------------------------------------------------


def read_back(values: dict[str, torch.Tensor], folder: Path) -> LibraryConstants:
    files = {name: MappedWeights((folder / name).open("rb")) for name in write_constants(values, folder)}
    return LibraryConstants((folder / CONSTANTS).read_bytes(), files, CPU)


def test_each_constant_comes_back_as_it_was(tmp_path: Path) -> None:
    large = torch.randn(400, 400)
    values = {
        "large": large,
        "view": large[3:, 5:9],
        "scalar": torch.tensor(2.5),
        "empty": large[:0],
        "number": torch.arange(5)[1:],
        "mask": torch.tensor([True, False, True]),
        "half": torch.randn(3, 4, dtype=torch.bfloat16).t(),
        "eighth": torch.randn(3, 4).to(torch.float8_e4m3fn),
    }
    constants = read_back(values, tmp_path)
    for name, value in values.items():
        back = constants.tensors[name]
        assert (back.dtype, back.shape, back.stride()) == (value.dtype, value.shape, value.stride())
        assert back.storage_offset() == value.storage_offset()
        assert torch.equal(back.float(), value.float())
    assert constants.tensors["large"].data_ptr() == constants.tensors["view"].data_ptr() - (3 * 400 + 5) * 4
    assert len(list(tmp_path.glob("weights-*"))) == 2


BFLOAT16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs bfloat16 only with AVX-512 or AVX-NE-CONVERT"
)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BFLOAT16)])
def test_a_packed_weight_comes_back_packed(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(100, 60).to(dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 4)
    constants = read_back({"packed": packed}, tmp_path)
    back = constants.tensors["packed"]
    assert back.is_mkldnn and torch.equal(back.to_dense(), weight)
    x, nothing = torch.randn(4, 60).to(dtype), (None, "none", [], "")
    expected, actual = (torch.ops.mkldnn._linear_pointwise(x, each, *nothing) for each in (packed, back))
    assert torch.equal(actual, expected)


# -- a model of two buckets -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "two_buckets.py").write_text(MODEL)
    model = {
        "factory": "two_buckets.py:Model",
        "mode": "default",
        "weights": "frozen",
        "inputs": {"tokens": {"shape": ["batch", 6], "dtype": "int64", "init": {"randint": [0, 700]}}},
        "buckets": [{"batch": 2}, {"batch": 16}],
    }
    convolved = {
        "factory": "two_buckets.py:Convolved",
        "mode": "default",
        "weights": "frozen",
        "inputs": {"x": {"shape": [1, 128, 28, 28]}},
    }
    (folder / "frozen.yaml").write_text(
        yaml.safe_dump({"version": 1, "models": {"two": model, "convolved": convolved}})
    )
    with pytest.MonkeyPatch.context() as patch, kept_servers({}) as servers:
        patch.syspath_prepend(str(folder))
        settings = Settings(jobs=1)
        report = build(
            BuildRequest(read_manifest(folder / "frozen.yaml"), folder / "store", settings=settings), servers
        )
        assert not report.failed, [outcome.error for outcome in report.failed]
        yield folder / "store", importlib.import_module("two_buckets").Model().eval()
    sys.modules.pop("two_buckets", None)


def mapped_files(store: Store) -> list[File]:
    return [file for variant in artifact_of(store, "two").variants for file in variant.files if file.mapped]


def assert_right(compiled: aotc.Compiled, module: Any) -> None:
    for batch in (2, 16):
        tokens = torch.randint(700, (batch, 6))
        with torch.no_grad():
            torch.testing.assert_close(compiled(tokens), module(tokens))


def test_weights_are_one_blob_for_both_buckets(built: tuple[Path, Any]) -> None:
    store, module = Store.open(built[0]), built[1]
    files = mapped_files(store)
    embedding = module.embedding.weight.detach().numpy().tobytes()
    assert len(embedding) > SMALL
    assert sum(store.blobs.path(file.blob).read_bytes() == embedding for file in files) == 2
    blobs = {file.blob: file.size for file in files}
    assert len(blobs) < len(files)
    libraries = [
        file.size for variant in artifact_of(store, "two").variants for file in variant.files if not file.mapped
    ]
    assert max(libraries) < len(embedding)


def test_a_load_gives_the_models_values(built: tuple[Path, Any]) -> None:
    assert_right(aotc.load("two", store=built[0], concurrency=2), built[1])


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_no_call_packs_a_weight_whatever_the_number_of_threads(
    built: tuple[Path, Any], threads: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """oneDNN's blocks for this convolution differ between these numbers of threads."""
    module = importlib.import_module("two_buckets").Convolved().eval()
    x, before = torch.randn(1, 128, 28, 28), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compiled = aotc.load("convolved", store=built[0])
        first = compiled(x)
        capfd.readouterr()
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            second = compiled(x)
        said = capfd.readouterr().out
        with torch.no_grad():
            expected = module(x)
    finally:
        torch.set_num_threads(before)
    assert ",convolution," in said and ",reorder," not in said
    torch.testing.assert_close([first, second], [expected, expected])


def test_buckets_share_a_weight_that_is_packed_anew(tmp_path: Path) -> None:
    weight = torch.randn(128, 128, 3, 3)
    arguments = ((1, 1), (1, 1), (1, 1), 1, (1, 128, 28, 28))
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *arguments)
    call = pack_call(torch.ops.mkldnn._reorder_convolution_weight, arguments)
    assert call is not None
    calls = {torch.ops.mkldnn.data_ptr(packed): msgspec.structs.replace(call, threads=call.threads + 1)}
    files = {
        name: MappedWeights((tmp_path / name).open("rb"))
        for name in write_constants({"packed": packed}, tmp_path, calls)
    }
    one, other = (LibraryConstants((tmp_path / CONSTANTS).read_bytes(), files, CPU) for _ in range(2))
    assert one.tensors["packed"] is other.tensors["packed"]
    assert torch.equal(one.tensors["packed"].to_dense(), weight)


def test_torchs_own_runner_takes_the_same_weights(built: tuple[Path, Any]) -> None:
    store, module = Store.open(built[0]), built[1]
    variant = artifact_of(store, "two").variants[0]
    weights = {file.blob: MappedWeights(store.blobs.open_mapped(file)) for file in variant.files if file.mapped}
    library = open_runner(FilesInMemory(variant, store.blobs, weights), CPU, 1, calls_back=True)
    tokens = torch.randint(700, (2, 6))
    with torch.no_grad():
        torch.testing.assert_close(library.run([tokens])[0], module(tokens))


def test_a_changed_byte_of_weights_is_refused(built: tuple[Path, Any], tmp_path: Path) -> None:
    store = copy_store(built[0], tmp_path)
    for blob in {file.blob for file in mapped_files(store)}:
        path = store.blobs.path(blob)
        data = path.read_bytes()
        for changed in (data[:-1] + bytes([data[-1] ^ 1]), data[:-1], data + b"\0"):
            path.write_bytes(changed)
            with pytest.raises(aotc.CorruptError) as caught:
                aotc.load("two", store=store.path)
            assert caught.value.digest == blob
            assert fsck(store.path).errors
        path.write_bytes(data)


def test_a_load_leaves_nothing_open_and_writes_nothing_to_the_store(built: tuple[Path, Any]) -> None:
    blobs = {file.blob for file in mapped_files(Store.open(built[0]))}

    def mapped() -> int:
        return sum(any(blob[7:] in line for blob in blobs) for line in Path("/proc/self/maps").read_text().splitlines())

    compiled = aotc.load("two", store=built[0])
    assert mapped() == len(blobs)
    del compiled
    assert mapped() == 0


def test_a_fetch_brings_the_weights(built: tuple[Path, Any], tmp_path: Path) -> None:
    fetched = aotc.fetch(f"{built[0].as_uri()}#two", store=tmp_path / "local")
    assert_right(aotc.load(fetched), built[1])


def test_gc_keeps_the_weights(built: tuple[Path, Any], tmp_path: Path) -> None:
    store = copy_store(built[0], tmp_path)
    for blob in (store.path / "blobs" / "sha256").iterdir():
        os.utime(blob, (0, 0))  # older than gc's grace
    assert collect(store, Policy()).freed == 0
    assert_right(aotc.load("two", store=store.path), built[1])
