"""`aotc.early`: what a start does beside `import torch`, and that nothing depends on it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import run_python
from safetensors.torch import save_file

from aotc import early
from aotc.store.layout.bundle import each_file, read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that the kernel was asked for."""
    names: list[str] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_WILLNEED)
        names.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(early, "_state", early._State())
    yield names
    early.wait()


def blobs_of(model: str, path: Path) -> set[str]:
    """What a load of the model reads, but for the records themselves."""
    store = Store.open(path)
    bundle = read_bundle(store, parse_reference(model))
    files = {file.blob for entry in bundle.artifacts for file in each_file(read_artifact(store, entry))}
    return {*files, bundle.digest, *(entry.digest for entry in bundle.artifacts)}


@pytest.mark.parametrize("by", ["tag", "digest"])
def test_the_files_of_one_bundle_are_read_ahead(by: str, zoo_store: Path, asked: list[str]) -> None:
    blobs, others = blobs_of("linear", zoo_store), blobs_of("frozen", zoo_store)
    digest = read_bundle(Store.open(zoo_store), parse_reference("linear")).digest
    name = "linear" if by == "tag" else f"linear@{digest}"
    early.start(f"{zoo_store}#{name}")
    early.wait()
    found = {f"sha256:{name}" for name in asked}
    assert found >= blobs and not found & (others - blobs)
    assert len(asked) == len(found)
    report = early.report()
    assert report is not None and report["failed"] == {} and list(report["ms"]) == ["store"]


@pytest.mark.parametrize("given", ["file", "folder", "index"])
def test_weights_are_read_ahead(given: str, tmp_path: Path, asked: list[str]) -> None:
    for name in ("a", "b"):
        save_file({name: torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    early.start(weights={"file": tmp_path / "a.safetensors", "folder": tmp_path, "index": index}[given])
    early.wait()
    assert asked == ["a.safetensors"] if given == "file" else asked == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("failing", ["", "cuInit", "cuDevicePrimaryCtxRetain"])
def test_the_primary_context_is_retained(failing: str, asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def function(name: str) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"  # cuInit reads it
            called.append(name)
            return 100 if name == failing else 0

        return call

    names = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    driver = SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    early.start(cuda=True)
    early.wait()
    assert called == names[: names.index(failing) + 1] if failing else called == names
    report = early.report()
    assert report is not None
    assert report["failed"] == ({"context": f"RuntimeError: {failing}: CUresult 100"} if failing else {})
    assert early.has_context()


def test_a_service_starts_where_all_of_it_fails_and_a_child_is_told_of_the_context(zoo_store: Path) -> None:
    """There is no driver, no store, no file. Then there is a driver, and its context is not for a fork."""
    code = """
import ctypes, sys, types
real = ctypes.CDLL
def none(name, *args, **kwargs):
    if name == "libcuda.so.1":
        raise OSError("no such library")
    return real(name, *args, **kwargs)
ctypes.CDLL = staticmethod(none)
import aotc.early
aotc.early.start("nowhere#linear", weights="none.safetensors", cuda=True)
assert "torch" not in sys.modules
import json, os, threading
import torch, aotc, models
from aotc.telemetry import startup_report
compiled = aotc.load(f"{sys.argv[1]}#linear", models.Linear().eval())
compiled(torch.zeros(2, 8))
aotc.early.wait()
failed = startup_report({"linear": compiled})["early"]["failed"]

driver = types.SimpleNamespace(**{name: lambda *_: 0 for name in ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")})
ctypes.CDLL = staticmethod(lambda name, *a, **k: driver if name == "libcuda.so.1" else real(name, *a, **k))
aotc.early.start(cuda=True)
prepared = aotc.prepare(f"{sys.argv[1]}#linear")
threads = [one.name for one in threading.enumerate()]
reading, writing = os.pipe()
if os.fork() == 0:
    try:
        prepared.load(device="cuda")
    except aotc.ForkError as error:
        os.write(writing, error.issues[0].hint.encode())
    os._exit(0)
os.close(writing)
print(json.dumps([sorted(failed), threads, os.read(reading, 1000).decode()]))
"""
    failed, threads, hint = json.loads(run_python(code, zoo_store))
    assert failed == ["context", "store"]  # a missing checkpoint is the load's to say
    assert threads == ["MainThread"]
    assert "no aotc.early.start(cuda=True)" in hint
