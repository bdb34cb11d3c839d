"""What `aotc.load` refuses: all that does not fit at once, each with both values, and before a byte is mapped."""

from __future__ import annotations

import errno
import gc
import logging
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from doctoring import artifact_of, library_file, publish_changed, replace_variant, with_library
from torch import nn

import aotc
from aotc.machine.environment import this_environment
from aotc.records import Artifact
from aotc.store.files.disk import store_error
from aotc.store.layout.blobs import Blobs
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference


def needing(**needs: Any) -> Callable[[Artifact], Artifact]:
    """The artifact, made for another machine."""
    return lambda artifact: msgspec.structs.replace(
        artifact, environment=msgspec.structs.replace(artifact.environment, **needs)
    )


# -- the machine ------------------------------------------------------------------------------------------------------


def test_every_mismatch_of_the_machine_is_said_at_once_before_anything_is_mapped(
    copied: Store, zoo: Any, opened: list[Any]
) -> None:
    here = this_environment()
    publish_changed(
        copied,
        "linear",
        needing(os="plan9", machine="vax", torch="1.13.1", libc="99.1", cpu_features=("avx", "magic", "more")),
        "foreign",
    )
    with pytest.raises(aotc.EnvironmentMismatchError) as caught:
        aotc.load("linear:foreign", zoo.Linear().eval(), store=copied.path)
    assert opened == []
    issues = caught.value.issues
    assert {issue.where for issue in issues} == {artifact_of(copied, "linear").target}
    assert [issue.message for issue in issues] == [
        f"built for operating system plan9, this machine is {here.os}",
        f"built for architecture vax, this machine is {here.machine}",
        f"its libraries need glibc 99.1, here is {here.libc}",
        f"built for {artifact_of(copied, 'linear').target}, this CPU has no magic, more",
        f"built with torch 1.13.1, this process has torch {here.torch}",
    ]
    assert all(issue.hint and issue.expected and issue.actual for issue in issues)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"torch": "2.99.0"}, "built with torch 2.99.0, this process has torch"),
        ({"cpu_features": ("avx2", "imaginary")}, "this CPU has no imaginary"),
        ({"os": "darwin"}, "built for operating system darwin, this machine is linux"),
    ],
)
def test_one_mismatch_is_enough(copied: Store, zoo: Any, needs: dict[str, Any], message: str) -> None:
    publish_changed(copied, "linear", needing(**needs), "other")
    with pytest.raises(aotc.EnvironmentMismatchError) as caught:
        aotc.load("linear:other", zoo.Linear().eval(), store=copied.path)
    assert len(caught.value.issues) == 1
    assert message in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_another_patch_release_of_torch_is_no_mismatch(copied: Store, zoo: Any) -> None:
    major_minor = ".".join(torch.__version__.split(".")[:2])
    publish_changed(copied, "linear", needing(torch=f"{major_minor}.99+other"), "patch")
    module = zoo.Linear().eval()
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.allclose(aotc.load("linear:patch", module, store=copied.path)(x), module(x), atol=1e-5)


def test_with_abi_another_minor_of_torch_runs_code_of_the_c_shim(copied: Store, zoo: Any) -> None:
    major, minor = torch.__version__.split(".")[:2]
    publish_changed(copied, "linear", needing(torch=f"{major}.{int(minor) + 1}.0"), "minor")
    module = zoo.Linear().eval()
    with pytest.raises(aotc.EnvironmentMismatchError, match="compat='abi'"):
        aotc.load("linear:minor", module, store=copied.path)
    compiled = aotc.load("linear:minor", module, store=copied.path, compat="abi")
    x = torch.randn(2, 8)
    with torch.no_grad():
        assert torch.allclose(compiled(x), module(x), atol=1e-5)
    with pytest.raises(aotc.BindError, match="'minor' or 'abi'"):
        aotc.load("linear", module, store=copied.path, compat="any")


def test_a_record_of_another_schema_is_refused(copied: Store, zoo: Any) -> None:
    publish_changed(copied, "linear", lambda artifact: msgspec.structs.replace(artifact, schema=99), "future")
    with pytest.raises(aotc.SchemaVersionError, match="record schema 99; this aotc reads schema 2"):
        aotc.load("linear:future", zoo.Linear().eval(), store=copied.path)


# -- the module -------------------------------------------------------------------------------------------------------


def refused(store: Path, module: nn.Module, ref: str = "linear", **options: Any) -> str:
    with pytest.raises(aotc.BindError) as caught:
        aotc.load(ref, module, store=store, **options)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def test_a_module_of_another_size_is_refused(zoo_store: Path, zoo: Any, opened: list[Any]) -> None:
    text = refused(zoo_store, zoo.Linear(width=16).eval())
    assert "width: built with 8, here it is 16" in text
    assert "linear.in_features: built with 8, here it is 16" in text
    text = refused(zoo_store, zoo.Linear(width=16).eval(), ignore=["attributes"])
    assert "linear.weight: built for shape [8, 8], the module's is [16, 16]" in text
    assert "linear.bias: built for shape [8], the module's is [16]" in text


def test_a_module_of_another_dtype_or_layout_is_refused(zoo_store: Path, zoo: Any) -> None:
    assert "linear.weight: built for dtype float32, the module's is bfloat16" in refused(
        zoo_store, zoo.Linear().eval().bfloat16()
    )
    module = zoo.Linear().eval()
    module.linear.weight = nn.Parameter(module.linear.weight.detach().t())
    assert "linear.weight: built for stride [8, 1], the module's is [1, 8]" in refused(zoo_store, module)
    module.linear.weight = nn.Parameter(module.linear.weight.detach().to("meta"))
    assert "several devices" in refused(zoo_store, module)


def test_another_class_or_mode_is_refused(zoo_store: Path, zoo: Any) -> None:
    text = refused(zoo_store, zoo.Block().train())
    assert "built from class Linear, the module is a Block" in text and text.count("\n  - ") == 1
    text = refused(zoo_store, zoo.Linear().train())
    assert "built with training=False" in text and "hint: call module.eval() before the load" in text


# -- the bytes --------------------------------------------------------------------------------------------------------


def damaged(store: Store, model: str, damage: Callable[[bytes], bytes]) -> Path:
    path = store.blobs.path(library_file(artifact_of(store, model).variants[0]).blob)
    path.write_bytes(damage(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], "its digest should be sha256:"),
        (lambda data: data[:-100], "its size should be"),
        (lambda data: b"", "its size should be"),
        (lambda data: data + b"more", "its size should be"),
    ],
    ids=["changed", "truncated", "emptied", "longer"],
)
def test_a_corrupt_blob_is_never_mapped(
    copied: Store, zoo: Any, opened: list[Any], damage: Callable[[bytes], bytes], message: str
) -> None:
    path = damaged(copied, "linear", damage)
    with pytest.raises(aotc.CorruptError) as caught:
        aotc.load("linear", zoo.Linear().eval(), store=copied.path)
    assert f"{path} is corrupt: {message}" in str(caught.value)
    assert caught.value.expected != caught.value.actual
    assert opened == []


def test_a_missing_blob_is_named(copied: Store, zoo: Any) -> None:
    path = copied.blobs.path(library_file(artifact_of(copied, "linear").variants[0]).blob)
    path.unlink()
    with pytest.raises(aotc.NotFoundError, match=path.name):
        aotc.load("linear", zoo.Linear().eval(), store=copied.path)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"concurrency": 0}, "concurrency is 0, and may be 1 or more"),
        ({"graphs": aotc.Graphs(use="allways")}, "use is 'allways', and may be 'picked' or 'always' or 'never'"),
        ({"graphs": aotc.Graphs(capture="lzy")}, "graphs.capture is 'lzy', and may be 'eager' or 'lazy'"),
        ({"graphs": aotc.Graphs(outputs="vew")}, "graphs.outputs is 'vew', and may be 'copy' or 'view'"),
        ({"graphs": "always"}, r"graphs is 'always', and may be an aotc\.Graphs"),
        ({"trust": "key.pub"}, r"trust is 'key.pub', and may be an aotc\.Trust"),
        ({"ranks": "all"}, r"ranks is 'all', and may be an aotc\.Ranks"),
        ({"ranks": aotc.Ranks("all", timeout=0)}, "ranks.timeout is 0, and may be seconds, more than 0"),
        ({"ignore": ["sourc"]}, "ignore is 'sourc', and may be 'class' or 'source'"),
        ({"ignore": "source"}, r"ignore is 'source', and may be a list, like \['source'\]"),
        ({"device": "gpu"}, "device is 'gpu', and may be a torch.device, or a text like 'cpu'"),
        ({"cache": "a\0b"}, r"cache is 'a\\x00b', and may be a folder"),
    ],
)
def test_an_option_that_load_does_not_know_is_refused(
    zoo_store: Path, zoo: Any, option: dict[str, Any], said: str
) -> None:
    """On a CPU too, where it would be without effect."""
    with pytest.raises(aotc.BindError, match=said):
        aotc.load("linear", zoo.Linear(), store=zoo_store, **option)


def test_a_class_in_place_of_a_module_is_refused(zoo_store: Path, zoo: Any) -> None:
    with pytest.raises(aotc.BindError, match=r"module is <class 'models\.Linear'>, and may be a torch\.nn\.Module"):
        aotc.load("linear", zoo.Linear, store=zoo_store)


def test_a_module_in_place_of_the_reference_is_refused_in_a_few_words(zoo: Any) -> None:
    with pytest.raises(aotc.BindError) as caught:
        aotc.load(zoo.Linear(), "linear")  # type: ignore[arg-type]
    assert "ref is a Linear, and may be a text" in str(caught.value)
    assert "the reference comes first" in caught.value.hint


def test_a_path_in_place_of_a_reference_is_refused(zoo_store: Path, zoo: Any) -> None:
    with pytest.raises(aotc.BindError, match=r"ref is PosixPath\('.+'\), and may be a text: \[STORE#\]model"):
        aotc.load(zoo_store / "linear", zoo.Linear())  # type: ignore[arg-type]


def test_a_module_without_values_is_refused_with_what_can_be_done(zoo_store: Path, zoo: Any) -> None:
    for device in (torch.device("cpu"), torch.device("meta")):
        module = zoo.Linear().eval().to(device)
        module.register_buffer("late", torch.zeros(2, device="meta"))
        with pytest.raises(aotc.BindError, match=r"on .*meta; without values are .*late") as caught:
            aotc.load("linear", module, store=zoo_store)
        assert "to_empty" in caught.value.hint and "weights=" in caught.value.hint


def test_a_device_that_nothing_was_built_for_is_named(zoo_store: Path) -> None:
    with pytest.raises(aotc.EnvironmentMismatchError, match=r"holds cpu:\S+, and it is to run on meta") as caught:
        aotc.load("linear", weights={}, store=zoo_store, device="meta")
    assert "say another `device`" in caught.value.hint and "build" not in caught.value.hint


def test_a_target_that_the_bundle_has_not_got_is_named(zoo_store: Path, zoo: Any) -> None:
    expected = r"the bundle holds cpu:\S+, and nothing for 'cuda:sm_90'"
    with pytest.raises(aotc.EnvironmentMismatchError, match=expected):
        aotc.load("linear", zoo.Linear(), store=zoo_store, target="cuda:sm_90")
    with pytest.raises(aotc.EnvironmentMismatchError) as caught:
        aotc.load("linear", zoo.Linear(), store=zoo_store, target="x86-64-v3")
    assert "did you mean 'cpu:x86-64-v3'?" in caught.value.hint


def test_a_library_that_is_none_is_a_typed_error(copied: Store, zoo: Any, tmp_path: Path) -> None:
    publish_changed(
        copied,
        "older-cpu",
        lambda artifact: replace_variant(artifact, 0, with_library(copied, artifact.variants[0], b"not a library")),
        "none",
    )
    with pytest.raises(aotc.LibraryError, match=r"the library model\.so cannot be opened"):
        aotc.load("older-cpu:none", zoo.Linear().eval(), store=copied.path)


# -- the places -------------------------------------------------------------------------------------------------------


def test_a_missing_store_is_named(zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(aotc.NotFoundError, match="there is no store at"):
        aotc.load("linear", zoo.Linear(), store=tmp_path / "none")
    monkeypatch.setenv("AOTC_STORE", str(tmp_path / "from-the-environment"))
    with pytest.raises(aotc.NotFoundError, match="from-the-environment"):
        aotc.load("linear", zoo.Linear())


def test_the_store_comes_from_the_call_the_reference_or_the_environment(
    zoo_store: Path, zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = zoo.Linear().eval()
    assert aotc.load(f"{zoo_store}#linear:latest", module).buckets == ["batch=2", "batch=4"]
    monkeypatch.setenv("AOTC_STORE", str(zoo_store))
    assert aotc.load("linear", module).buckets == ["batch=2", "batch=4"]
    assert aotc.load(f"{zoo_store}#linear", module, store=zoo_store).buckets == ["batch=2", "batch=4"]
    with pytest.raises(aotc.ReferenceFormatError, match=f"names the store none, and store= names {zoo_store}"):
        aotc.load("none#linear", module, store=zoo_store)


def test_an_unknown_reference_lists_what_is_there(zoo_store: Path, zoo: Any) -> None:
    with pytest.raises(aotc.NotFoundError) as caught:
        aotc.load("linear:v2", zoo.Linear(), store=zoo_store)
    assert caught.value.known[0] == "linear:latest"
    assert "hint: there is linear:latest" in str(caught.value)
    assert isinstance(caught.value, LookupError)


# -- what is fetched --------------------------------------------------------------------------------------------------


def test_a_cache_folder_that_cannot_be_written_is_replaced_with_a_warning(
    zoo_store: Path, zoo: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder can be made in /proc, not even by root."""
    module, x = zoo.Linear().eval(), torch.randn(2, 8)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="aotc"):
        compiled = aotc.load(f"file://{zoo_store}#linear", module, cache="/proc/aotc-cache")
    assert "set AOTC_CACHE_DIR to a folder that can be written" in caplog.text
    with torch.no_grad():
        assert torch.allclose(compiled(x), module(x), atol=1e-5)
    assert [path.name[:11] for path in tmp_path.iterdir()] == ["aotc-fetch-"]
    del compiled
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_where_every_disk_is_full_the_error_says_what_to_do(
    zoo_store: Path, zoo: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Blobs, data: bytes) -> Any:
        raise store_error("write", self.folder, OSError(errno.ENOSPC, "No space left on device"))

    monkeypatch.setattr(Blobs, "put_bytes", full)
    with pytest.raises(aotc.StoreError, match="no folder can hold what is fetched") as caught:
        aotc.load(f"file://{zoo_store}#linear", zoo.Linear().eval())
    assert "free space" in str(caught.value)
    assert len(caught.value.issues) == 3


@pytest.mark.parametrize("damage", [lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-9]])
def test_what_is_damaged_of_what_was_fetched_is_fetched_again(
    zoo_store: Path, zoo: Any, tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Every blob once: documents, the library, and the module's attributes, which only a changed module needs."""
    module, x = zoo.Linear().eval(), torch.randn(2, 8)
    ref = f"file://{zoo_store}#linear"
    fetched = aotc.load(ref, module, cache=tmp_path)
    blobs = Store.open(tmp_path / "store").blobs
    libraries = [blobs.path(library_file(one).blob) for one in fetched.artifact.variants]
    documents = [path for path in blobs.folder.glob("sha256/*") if path.read_bytes().startswith(b"{")]
    assert len(documents) == 3
    for path in (*libraries, *documents):
        right = path.read_bytes()
        path.write_bytes(damage(right))
        with torch.no_grad():
            assert torch.allclose(aotc.load(ref, module, cache=tmp_path)(x), module(x), atol=1e-5)
        assert path.read_bytes() == right
    path.write_bytes(damage(right))
    with pytest.raises(aotc.CorruptError):
        aotc.load("linear", module, store=tmp_path / "store")


def test_fetch_gives_the_reference_to_load_without_the_remote(
    copied: Store, zoo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = zoo.Linear().eval(), torch.randn(2, 8)
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    digest = read_bundle(copied, parse_reference("linear")).digest
    ref = aotc.fetch(f"file://{copied.path}#linear")
    assert ref == f"{tmp_path}/cache/store#linear@{digest}"
    there = aotc.fetch(f"file://{copied.path}#linear", store=tmp_path / "image")
    shutil.rmtree(copied.path)
    for each in (ref, there, f"{tmp_path}/image#linear"):
        with torch.no_grad():
            assert torch.allclose(aotc.load(each, module)(x), module(x), atol=1e-5)
    with pytest.raises(aotc.ReferenceFormatError, match="names no remote"):
        aotc.fetch(ref)


def test_a_store_on_a_read_only_disk_is_read(zoo_store: Path, zoo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers write nothing into the store and take no lock there."""
    before = {path: path.stat().st_mtime_ns for path in zoo_store.rglob("*")}
    aotc.load("linear", zoo.Linear().eval(), store=zoo_store)
    assert {path: path.stat().st_mtime_ns for path in zoo_store.rglob("*")} == before
