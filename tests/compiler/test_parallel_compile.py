"""The C++ compiles of a unit: the wrapper in the background, the link after it, its failure where somebody sees it."""

from __future__ import annotations

import ctypes
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from elftools.elf.elffile import ELFFile
from test_wrapper_split import INCLUDES, INTERFACE, OWN
from torch._inductor.cpp_builder import CppBuilder
from torch._inductor.runtime.benchmarking import Benchmarker

from aotc.compiler.toolchain.parallel_compile import compiling_side_by_side
from aotc.compiler.toolchain.wrapper_split import Compile as WrapperCompile
from aotc.compiler.toolchain.wrapper_split import needing_torch
from aotc.store.compile_cache import CompileCache

WRAPPER, KERNEL, LIBRARY = "c1.wrapper.o", "c2.kernel.o", "c1.wrapper.so"

Compile = Callable[[str], None]


class Builder(CppBuilder):
    """Builds nothing: `compile` stands for the C++ compiler, and `command` is what would be run."""

    def __init__(self, name: str, command: str = "c++ {source} -o {target}") -> None:
        self.name, self.target = name, Path.cwd() / name
        self.command = command.format(source=self.target.with_suffix(".cpp"), target=self.target)

    def get_target_file_path(self) -> str:
        return str(self.target)

    def get_command_line(self) -> str:
        return self.command


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[Compile], None]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    yield lambda compile: monkeypatch.setattr(CppBuilder, "build", lambda builder: compile(builder.name))


def test_kernels_compile_beside_the_wrapper_and_the_link_waits_for_both(
    compile_with: Callable[[Compile], None],
) -> None:
    kernels_begun, done = threading.Event(), []

    def compile(target: str) -> None:
        if target == KERNEL:
            kernels_begun.set()
        if target == WRAPPER:
            assert kernels_begun.wait(60), "the kernels wait for the wrapper"
        done.append(target)

    compile_with(compile)
    with compiling_side_by_side():
        for target in (WRAPPER, KERNEL, LIBRARY):
            Builder(target).build()
    assert sorted(done[:2]) == sorted([WRAPPER, KERNEL]) and done[2] == LIBRARY


def test_a_wrapper_that_does_not_compile_is_the_link_s_error(compile_with: Callable[[Compile], None]) -> None:
    linked = []

    def compile(target: str) -> None:
        if target == WRAPPER:
            raise RuntimeError("is too big to optimize")
        linked.extend([target] if target == LIBRARY else [])

    compile_with(compile)
    with compiling_side_by_side():
        Builder(WRAPPER).build()
        Builder(KERNEL).build()
        with pytest.raises(RuntimeError, match="too big"):
            Builder(LIBRARY).build()
    assert not linked


def test_a_wrapper_whose_parts_do_not_compile_is_compiled_whole(compile_with: Callable[[Compile], None]) -> None:
    whole: list[str] = []
    compile_with(whole.append)
    Path("c1.wrapper.cpp").write_text(INCLUDES + INTERFACE + OWN)
    with compiling_side_by_side():
        Builder(WRAPPER, "false {source} -o {target}").build()
        Builder(LIBRARY).build()
    assert Path("c1.wrapper.parts", "own.cpp").exists()
    assert whole == [WRAPPER, LIBRARY]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What would be run, in `tmp_path`."""
    run: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CppBuilder, "build", lambda builder: run.append(builder.get_command_line()))
    return run


def test_the_parts_are_linked_and_nothing_but_what_torch_looks_up_is_exported(
    commands: list[str], tmp_path: Path, compiler: Path
) -> None:
    Path("c1.wrapper.cpp").write_text(INCLUDES + INTERFACE + OWN)
    with compiling_side_by_side(CompileCache(tmp_path / "cache")):
        Builder(WRAPPER, f"{compiler} {{source}} -o {{target}}").build()
        Builder(LIBRARY, "c++ c1.wrapper.o c2.kernel.o -ltorch -o {target}").build()
    words = shlex.split(commands[-1])
    assert words.index(str(tmp_path / "c1.wrapper.parts" / "common.o")) < words.index("-ltorch")
    (script,) = (word for word in words if word.startswith("-Wl,--version-script="))
    assert Path(script.partition("=")[2]).read_text().endswith("; *; };\n")
    assert "-Wl,--strip-all" in words


ON_A_CPU = """
extern "C" int aoti_torch_device_type_cpu();
extern "C" int on_a_cpu() { return aoti_torch_device_type_cpu(); }
"""


def linked(tmp_path: Path, command: list[str], name: str) -> list[str]:
    """What the library needs to be loaded, which it is, and asked for what it has of torch."""
    library = tmp_path / name
    subprocess.run([*command, "-o", str(library)], cwd=tmp_path, check=True)
    assert ctypes.CDLL(str(library)).on_a_cpu() == 0
    with library.open("rb") as stream:
        return [tag.needed for tag in ELFFile(stream).get_section_by_name(".dynamic").iter_tags("DT_NEEDED")]


def test_a_library_for_a_cpu_needs_torch_s_though_the_link_does_not_read_it(tmp_path: Path) -> None:
    torch_libraries = Path(torch.__file__).parent / "lib"
    (tmp_path / "on_a_cpu.cpp").write_text(ON_A_CPU)
    subprocess.run(["g++", "-fPIC", "-c", "on_a_cpu.cpp"], cwd=tmp_path, check=True)
    libraries = ["-ltorch", "-ltorch_cpu", f"-L{torch_libraries}", "-lm"]
    command = ["g++", "-shared", "-Wl,--as-needed", "on_a_cpu.o", *libraries]
    named = needing_torch(command, tmp_path)
    assert sorted(linked(tmp_path, command, "reading.so")) == sorted(linked(tmp_path, named, "naming.so"))
    assert "libtorch_cpu.so" in linked(tmp_path, named, "again.so")
    assert not {"-ltorch", "-ltorch_cpu"} & {*named}


def test_a_link_for_a_gpu_or_with_a_torch_of_another_name_reads_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for_a_gpu = ["g++", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lcuda"]
    assert needing_torch(for_a_gpu, tmp_path) == for_a_gpu
    for_a_cpu = ["g++", "-ltorch", "-ltorch_cpu"]
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert needing_torch(for_a_cpu, tmp_path) == for_a_cpu
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so.2.13").touch()
    (tmp_path / "lib" / "libtorch_cpu.so").symlink_to("libtorch_cpu.so.2.13")
    assert needing_torch(for_a_cpu, tmp_path) == for_a_cpu


def test_a_compiler_that_cannot_name_it_reads_it(commands: list[str], tmp_path: Path) -> None:
    with compiling_side_by_side(CompileCache(tmp_path / "cache")):
        Builder(WRAPPER).build()
        Builder(LIBRARY, "false c1.wrapper.o -ltorch_cpu -o {target}").build()
    assert "-ltorch_cpu" in commands[-1].split()


def test_a_library_with_debug_symbols_keeps_them(commands: list[str], tmp_path: Path) -> None:
    with compiling_side_by_side(CompileCache(tmp_path / "cache")):
        Builder(WRAPPER).build()
        Builder(LIBRARY, "c++ c1.wrapper.o -g -o {target}").build()
    assert "--gc-sections" in commands[-1]
    assert "--strip-all" not in commands[-1]


def test_a_kernel_that_autotuning_tries_is_linked_as_it_is(commands: list[str], tmp_path: Path) -> None:
    candidate = Builder("candidate.so")
    with compiling_side_by_side(CompileCache(tmp_path / "cache")):
        candidate.build()
    assert commands == [candidate.get_command_line()]


def expectation(compiler: Path, flags: str = "-O1") -> WrapperCompile | None:
    source = Path.cwd() / "expected.wrapper.cpp"
    line = f"{compiler} {source} {flags} -o {source.with_suffix('.o')}"
    return WrapperCompile.read(line, source, source.with_suffix(".o"))


@pytest.mark.parametrize(("flags", "compiles"), [("-O1", 1), ("-O2", 2)])
def test_the_common_part_is_compiled_beforehand_and_again_where_that_was_another(
    compile_with: Callable[[Compile], None], compiler: Path, tmp_path: Path, flags: str, compiles: int
) -> None:
    compile_with(lambda name: None)
    Path("c1.wrapper.cpp").write_text(INCLUDES + INTERFACE + OWN)
    with compiling_side_by_side(expected=lambda: expectation(compiler, flags)):
        Builder(WRAPPER, f"{compiler} {{source}} -O1 -o {{target}}").build()
        Builder(LIBRARY).build()
    assert (tmp_path / "log").read_text().count("common.cpp") == compiles


@pytest.mark.parametrize("answer", ["true", "exit 1"])
def test_a_wrapper_compiles_also_where_the_compiler_takes_no_precompiled_headers(
    compile_with: Callable[[Compile], None], compiler: Path, tmp_path: Path, answer: str
) -> None:
    compile_with(lambda name: None)
    asked = f"""case " $* " in *" -include "*) echo "$*" >> {tmp_path / "asked"}; {answer};; esac"""
    compiler.write_text(compiler.read_text().replace("#!/bin/sh", f"#!/bin/sh\n{asked}"))
    headers = cast("Any", SimpleNamespace(arguments=lambda compile: ("-include", "headers.h")))
    Path("c1.wrapper.cpp").write_text(INCLUDES + INTERFACE + OWN)
    with compiling_side_by_side(headers=headers):
        Builder(WRAPPER, f"{compiler} {{source}} -O1 -o {{target}}").build()
        Builder(LIBRARY).build()
    assert (tmp_path / "asked").read_text().count("own.cpp") == 1
    assert (tmp_path / "log").read_text().count("own.cpp") == 1
    assert Path(WRAPPER).exists()


def test_a_benchmark_waits_for_what_is_compiled_beforehand(
    compile_with: Callable[[Compile], None], compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with(lambda name: None)
    compiler.write_text(compiler.read_text().replace("#!/bin/sh", "#!/bin/sh\nsleep 0.3"))
    timed: list[bool] = []
    made = Path("expected.wrapper.parts", "common.o")
    monkeypatch.setattr(Benchmarker, "benchmark_cpu", lambda self, function: timed.append(made.exists()))
    with compiling_side_by_side(expected=lambda: expectation(compiler)):
        Benchmarker().benchmark_cpu(lambda: None)
    assert timed == [True]


def test_without_an_expectation_nothing_is_lost_but_time(compile_with: Callable[[Compile], None]) -> None:
    def unknown() -> WrapperCompile:
        raise TypeError("another torch takes other arguments")

    built: list[str] = []
    compile_with(built.append)
    with compiling_side_by_side(expected=unknown):
        Builder(KERNEL).build()
    assert built == [KERNEL]
