"""`compat="abi"`: code of another torch minor is opened only where this torch has every symbol that it calls."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hand_built import make_artifact, tensor

from aotc.digest import sha256_bytes
from aotc.errors import EnvironmentMismatchError, LibraryError
from aotc.machine.elf import needed_versions, undefined_symbols, unversioned_symbols
from aotc.machine.this_host import libstdcxx_versions
from aotc.records import Artifact, Backward, File
from aotc.runtime.libraries.files import FilesInMemory
from aotc.runtime.libraries.library_folder import FilesInFolder
from aotc.runtime.libraries.torch_abi import check_symbols

PROMISED = ("aoti_torch_delete_tensor_object", "torch_get_thread_idx", "Sleef_expf8_u10", "_Znwm", "malloc")
"""Of the C shim (its stable part, too), of SLEEF within torch, of libstdc++ and of glibc."""


def library(folder: Path, *symbols: str) -> FilesInFolder:
    """A library that calls these."""
    lines = [f"extern void {name}(void);" for name in symbols]
    calls = "".join(f"{name}();" for name in symbols)
    optional = "extern void not_there(void) __attribute__((weak));"
    (folder / "model.c").write_text("\n".join([*lines, optional, f"void run(void) {{ {calls} not_there(); }}"]))
    command = ["cc", "-w", "-fno-builtin", "-shared", "-fPIC", "-o", folder / "model.so", folder / "model.c"]
    subprocess.run(command, check=True)
    return FilesInFolder(folder, "model.so")


def built_with(version: str) -> Artifact:
    artifact = make_artifact([tensor("x", 1)])
    needs = msgspec.structs.replace(artifact.environment, torch=version)
    return msgspec.structs.replace(artifact, environment=needs)


def test_code_runs_where_all_that_it_calls_is_there(tmp_path: Path) -> None:
    files = library(tmp_path, *PROMISED)
    assert {*PROMISED} <= {*undefined_symbols(tmp_path / "model.so")}
    check_symbols(built_with("2.99.0"), lambda variant: files)


def test_code_that_the_process_has_loaded_before_is_read_from_its_own_bytes(tmp_path: Path) -> None:
    """The path that it was opened by first is another file's now, or none's."""
    library(tmp_path, "malloc")
    data = (tmp_path / "model.so").read_bytes()
    artifact = built_with("2.99.0")
    file = File(name="model.so", digest=sha256_bytes(data), size=len(data), blob="packed", blob_size=len(data))
    variant = msgspec.structs.replace(artifact.variants[0], library="model.so", files=(file,))
    source: Any = SimpleNamespace(unpack=lambda file, sink: sink.write(data))
    first = FilesInMemory(variant, source)
    with first.opened() as path:
        assert Path(path).exists()
    del first
    with Path(os.devnull).open():  # takes the number of its descriptor
        again = FilesInMemory(variant, source)
        with again.opened() as known:
            assert known == path
        check_symbols(artifact, lambda _: again)


def test_every_symbol_that_is_missing_or_not_promised_is_named(tmp_path: Path) -> None:
    future, cpp = "aoti_torch_of_the_future", "_ZN3c106DeviceC1ERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
    files = library(tmp_path, *PROMISED, future, "Sleef_of_the_future", cpp)
    with pytest.raises(EnvironmentMismatchError) as caught:
        check_symbols(built_with("2.99.0"), lambda variant: files)
    assert "was built with torch 2.99.0" in str(caught.value)
    here = torch.__version__
    assert sorted((issue.expected, issue.actual) for issue in caught.value.issues) == sorted(
        [(future, here), ("Sleef_of_the_future", here), (cpp, here)]
    )
    said = {issue.expected: issue.message for issue in caught.value.issues}
    assert said[future] == f"calls `{future}`, which torch {here} does not have"
    assert "C++" in said[cpp]


def test_the_library_of_a_backward_is_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    library(tmp_path / "other", "aoti_torch_of_the_future")
    (tmp_path / "other" / "model.so").rename(tmp_path / "backward.so")
    files, artifact = library(tmp_path, *PROMISED), built_with("2.99.0")
    trained = msgspec.structs.replace(artifact.variants[0], backward=Backward("backward.so", 1, (), (), ()))
    artifact = msgspec.structs.replace(artifact, variants=(trained,))
    with pytest.raises(EnvironmentMismatchError, match="calls `aoti_torch_of_the_future`"):
        check_symbols(artifact, lambda variant: files)


def test_code_that_calls_operators_by_name_is_refused(tmp_path: Path) -> None:
    files = library(tmp_path, *PROMISED)
    (tmp_path / "model.json").write_text("{}")
    with pytest.raises(EnvironmentMismatchError, match="operators by name"):
        check_symbols(built_with("2.99.0"), lambda variant: files)


def test_code_of_this_minor_is_not_looked_at() -> None:
    check_symbols(built_with(torch.__version__), lambda variant: pytest.fail("opened"))


def test_versions_and_symbols_are_those_that_readelf_shows(tmp_path: Path) -> None:
    source = tmp_path / "model.cpp"
    source.write_text("#include <iostream>\nvoid run() { std::cout << std::string(3, 'x'); }")
    path = tmp_path / "model.so"
    subprocess.run(["c++", "-shared", "-fPIC", "-o", path, source], check=True)
    shown = subprocess.run(["readelf", "-V", path], capture_output=True, text=True, check=True).stdout
    names = [line.split("Name: ")[1].split()[0] for line in shown.splitlines() if "Name: " in line]

    def newest(family: str) -> str:
        of_family = (name.partition("_")[2] for name in names if name.partition("_")[0] == family)
        return max(of_family, key=lambda version: [*map(int, version.split("."))])

    assert needed_versions(path) == {family: newest(family) for family in ("GLIBC", "GLIBCXX", "CXXABI")}
    shown = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    strong = {line.split()[1].partition("@")[0] for line in shown.splitlines() if line.split()[0] == "U"}
    assert {*undefined_symbols(path)} == strong and strong


def test_symbols_of_no_version_are_those_that_nm_shows_without_one(tmp_path: Path) -> None:
    library(tmp_path, *PROMISED)
    path = tmp_path / "model.so"
    shown = subprocess.run(["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True).stdout
    without = [line.split()[1] for line in shown.splitlines() if line.split()[0] == "U" and "@" not in line]
    assert sorted(unversioned_symbols(path)) == sorted(without)
    assert "malloc" not in without and {*PROMISED[:3]} <= {*without}


def test_the_versions_of_libstdcxx_are_those_that_readelf_shows_of_the_loaded_one() -> None:
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libstdc++.so" in line)
    shown = subprocess.run(["readelf", "-V", path], capture_output=True, text=True, check=True).stdout
    names = {line.split("Name: ")[1].split()[0] for line in shown.splitlines() if "Name: " in line}

    def newest(family: str) -> str:
        numbers = [int(name.removeprefix(family)) for name in names if re.fullmatch(rf"{re.escape(family)}\d+", name)]
        return f"{family}{max(numbers)}"

    assert libstdcxx_versions() == (newest("CXXABI_1.3."), newest("GLIBCXX_3.4."))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.so").write_bytes(b"MZ" * 64)
    with pytest.raises(ValueError, match="ELF"):
        undefined_symbols(tmp_path / "model.so")


def test_a_damaged_library_is_refused(tmp_path: Path) -> None:
    files = library(tmp_path, *PROMISED)
    data = bytearray((tmp_path / "model.so").read_bytes())
    data[0x28:0x30] = b"\xff" * 8  # where the table of sections is
    (tmp_path / "model.so").write_bytes(data)
    with pytest.raises(LibraryError):
        check_symbols(built_with("2.99.0"), lambda variant: files)
    with pytest.raises(ValueError, match="damaged"):
        undefined_symbols(tmp_path / "model.so")
