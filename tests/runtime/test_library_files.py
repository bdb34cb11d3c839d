"""The files of a library in memory: sealed, under new paths, and on a disk where memory may not be executed."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_artifacts import make_variant, put_file

from aotc.errors import CorruptError, LibraryError
from aotc.records import Variant
from aotc.runtime.libraries.files import FilesInMemory, read_all
from aotc.runtime.libraries.library import open_library
from aotc.store.files import anonymous as library_files
from aotc.store.layout.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def variant_of(store: Store, folder: Path, **files: bytes) -> Variant:
    named = {name.replace("_", "."): data for name, data in files.items()}
    return make_variant(tuple(put_file(store, folder, name, data) for name, data in named.items()))


def test_the_bytes_are_the_stores_and_nobody_can_change_them(store: Store, tmp_path: Path) -> None:
    files = FilesInMemory(variant_of(store, tmp_path, model_so=b"a library"), store.blobs)
    with files.opened() as path:
        assert Path(path).read_bytes() == b"a library"
        with pytest.raises(PermissionError):
            os.truncate(path, 0)
        with open(path, "r+b", buffering=0) as stream, pytest.raises(PermissionError):  # noqa: PTH123
            stream.write(b"x")


def test_a_file_that_a_limit_of_the_process_refuses_is_a_typed_error(store: Store, tmp_path: Path) -> None:
    variant = variant_of(store, tmp_path, model_so=os.urandom(1 << 16))
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, hard))
    try:
        with pytest.raises(LibraryError, match=r"model\.so \(65536 bytes\).*File too large") as caught:
            FilesInMemory(variant, store.blobs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))
    assert "ulimit -f" in caught.value.hint


def test_files_that_a_library_reads_stand_beside_it_while_it_is_opened(store: Store, tmp_path: Path) -> None:
    files = FilesInMemory(variant_of(store, tmp_path, model_so=b"a library", model_json=b"{}"), store.blobs)
    assert files.names == {"model.so", "model.json"}
    with files.opened() as path, files.opened() as other:
        assert Path(path).with_suffix(".json").read_bytes() == b"{}"
        assert Path(path).read_bytes() == b"a library" == Path(other).read_bytes()
        assert path != other
    assert not Path(path).parent.exists() and not Path(other).parent.exists()


def compiled(folder: Path, number: int) -> bytes:
    source, library = folder / f"{number}.c", folder / f"{number}.so"
    source.write_text(f"int answer(void) {{ return {number}; }}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library.read_bytes()


def test_a_library_is_never_taken_for_one_that_had_its_descriptor_before(store: Store, tmp_path: Path) -> None:
    """glibc gives the library that it opened first under a path, whatever stands there now."""
    numbers, answers = set(), []
    for number in range(3):
        variant = variant_of(store, tmp_path, model_so=compiled(tmp_path, number))
        files = FilesInMemory(variant, store.blobs)
        with files.opened() as path:
            numbers.add(path.rpartition("/")[2])
            answers.append(ctypes.CDLL(path).answer())
        del files  # closes it: the next one gets its number, unless another file does
    assert answers == [0, 1, 2]
    assert len(numbers) < len(answers), "no descriptor was given twice"


@pytest.mark.parametrize("beside", [{}, {"model_json": b"{}"}])
def test_a_library_that_is_loaded_again_is_not_mapped_again(
    beside: dict[str, bytes], store: Store, tmp_path: Path
) -> None:
    """However often a service loads it: each mapping counts against `vm.max_map_count`, and none is ever taken back."""
    variant = variant_of(store, tmp_path, model_so=compiled(tmp_path, 40 + len(beside)), **beside)

    def load() -> tuple[int, int]:
        with FilesInMemory(variant, store.blobs).opened() as path:
            library = ctypes.CDLL(path)
        assert library.answer() == 40 + len(beside)
        return ctypes.cast(library.answer, ctypes.c_void_p).value or 0, len(list(Path("/proc/self/fd").iterdir()))

    first, descriptors = load()
    addresses, counts = zip(*(load() for _ in range(4)), strict=True)
    assert {*addresses} == {first}
    assert max(counts) <= descriptors  # fewer where another test's are collected meanwhile
    with ThreadPoolExecutor(4) as pool:
        assert {address for address, _ in pool.map(lambda _: load(), range(40))} == {first}
    if not (child := os.fork()):
        os._exit(load()[0] != first)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_descriptors_are_closed(store: Store, tmp_path: Path) -> None:
    variants = [variant_of(store, tmp_path, model_so=b"library %d" % number) for number in range(9)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = read_all(variants, store.blobs)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 9
    for number, variant in enumerate(variants):
        with kept[variant.files].opened() as path:
            assert Path(path).read_bytes() == b"library %d" % number
    del kept
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_corrupt_one_among_many_is_refused(store: Store, tmp_path: Path) -> None:
    variants = [variant_of(store, tmp_path, model_so=b"library %d" % number) for number in range(9)]
    blob = variants[4].files[0].blob
    store.blobs.path(blob).write_bytes(b"?")
    with pytest.raises(CorruptError) as caught:
        read_all(variants, store.blobs)
    assert caught.value.digest == blob


# -- where memory runs no code ----------------------------------------------------------------------------------------


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `vm.memfd_noexec=2` of old kernels, or a security policy has it."""
    monkeypatch.setattr(library_files, "_memory_is_executable", lambda: False)


def test_a_temporary_file_without_a_name_takes_the_place_of_memory(
    store: Store, tmp_path: Path, no_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    files = FilesInMemory(variant_of(store, tmp_path, model_so=compiled(tmp_path, 7)), store.blobs)
    with files.opened() as path:
        assert str(Path(path).readlink()).startswith(str(tmp_path / "temporary"))
        assert ctypes.CDLL(path).answer() == 7
    assert list((tmp_path / "temporary").iterdir()) == []


def test_where_no_folder_runs_code_the_error_names_each(
    store: Store, tmp_path: Path, no_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mmap.mmap

    def refuse(descriptor: int, length: int, flags: int, prot: int) -> Any:
        if prot & mmap.PROT_EXEC:
            raise PermissionError(1, "Operation not permitted")
        return real(descriptor, length, flags, prot)

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(LibraryError, match="neither in memory nor on a disk") as caught:
        FilesInMemory(variant_of(store, tmp_path, model_so=b"a library"), store.blobs)
    assert {issue.where for issue in caught.value.issues} >= {tempfile.gettempdir(), "/dev/shm", "/var/tmp"}
    assert "TMPDIR" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_folder_that_is_mounted_noexec_is_passed_over(
    store: Store, tmp_path: Path, no_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "noexec"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", folder], check=True)
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        files = FilesInMemory(variant_of(store, tmp_path, model_so=compiled(tmp_path, 8)), store.blobs)
        with files.opened() as path:
            assert not str(Path(path).readlink()).startswith(str(folder))
            assert ctypes.CDLL(path).answer() == 8
    finally:
        subprocess.run(["umount", folder], check=True)


def test_what_is_no_library_is_a_typed_error(store: Store, tmp_path: Path) -> None:
    files = FilesInMemory(variant_of(store, tmp_path, model_so=b"no library"), store.blobs)
    with pytest.raises(LibraryError, match=r"model\.so cannot be opened"):
        open_library(files, torch.device("cpu"), 1)
