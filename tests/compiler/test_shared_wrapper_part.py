"""Whole builds with the common part of wrappers: compiled once for two units, and not seen in the bytes."""

from __future__ import annotations

import io
import os
import re
import shutil
from pathlib import Path

from doctoring import artifact_of, library_bytes
from elftools.elf.elffile import ELFFile
from in_process import run_here

from aotc.compiler.toolchain import wrapper_split
from aotc.store.layout.store import Store

LOGGING_COMPILER = """#!/bin/sh
case " $* " in *" --version "*|*" -E "*) ;; *) echo "$*" >> "{log}";; esac
for word in "$@"; do case "$word" in */own.cpp) cat "$word" >> "{log}.own";; esac; done
exec "{compiler}" "$@"
"""


def libraries(store: Path) -> list[bytes]:
    opened = Store.open(store)
    return [library_bytes(opened, variant) for variant in artifact_of(opened, "linear").variants]


def test_two_units_compile_it_once_and_a_cache_or_none_gives_the_same_bytes(manifest: Path, tmp_path: Path) -> None:
    log, compiler = tmp_path / "log", tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(LOGGING_COMPILER.format(log=log, compiler=shutil.which("g++")))
    compiler.chmod(0o755)

    def build(name: str, cache: Path) -> Path:
        path = f"{compiler.parent}:{os.environ['PATH']}"
        command = ("build", manifest, "--store", tmp_path / name, "--jobs", "2")
        ran = run_here(*command, PATH=path, AOTC_CACHE_DIR=str(cache))
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return tmp_path / name

    two = build("with", tmp_path / "cache")
    compiles = log.read_text().splitlines()
    assert sum("common.cpp" in line for line in compiles) == 1
    assert sum("own.cpp" in line for line in compiles) == 2
    assert not [line for line in compiles if ".wrapper.cpp" in line]
    own = log.with_name("log.own").read_text()  # as this torch writes it
    assert "check_inputs_like_0(input_handles, 0);" in own and not re.search(r"check_input_\d+\(", own)
    assert "aotc_refuse(" in own and "std::stringstream ss" not in own

    text = manifest.read_text().replace("- batch: 2\n", "")
    assert text != manifest.read_text()
    manifest.write_text(text)
    (tmp_path / "file").write_text("where there should be a folder")
    (library,) = libraries(build("without", tmp_path / "file"))
    assert library in libraries(two)
    assert b"wrapper.parts" not in library


def test_a_library_exports_what_torch_looks_up_and_its_kernels(quickstart_store: Path) -> None:
    store = Store.open(quickstart_store)
    library = ELFFile(io.BytesIO(library_bytes(store, artifact_of(store, "quickstart").variants[0])))
    symbols = list(library.get_section_by_name(".dynsym").iter_symbols())
    exported = {symbol.name for symbol in symbols if symbol.name and symbol["st_shndx"] != "SHN_UNDEF"}
    assert {name for name in exported if not name.startswith(("AOTInductor", "cpp_"))} == set()
    assert {"AOTInductorModelContainerRun", "AOTInductorModelContainerCreateWithDevice"} < exported
    assert any(name.startswith("cpp_") for name in exported)
    assert exported.isdisjoint(wrapper_split._UNUSED)


def test_a_library_needs_no_executable_stack_and_its_record_names_the_symbols_it_needs(quickstart_store: Path) -> None:
    """glibc opens no library with an executable stack, from 2.41 on."""
    store = Store.open(quickstart_store)
    artifact = artifact_of(store, "quickstart")
    library = ELFFile(io.BytesIO(library_bytes(store, artifact.variants[0])))
    (stack,) = (part for part in library.iter_segments() if part["p_type"] == "PT_GNU_STACK")
    assert not stack["p_flags"] & 1
    needed = [name.name for _, names in library.get_section_by_name(".gnu.version_r").iter_versions() for name in names]
    for family, recorded in (("GLIBC_", [f"GLIBC_{artifact.environment.libc}"]), ("", artifact.environment.libstdcxx)):
        assert recorded and all(name.startswith(family) and name in needed for name in recorded)
