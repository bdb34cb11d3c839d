"""Headers that are precompiled for the units of a build: once, with equal code, and never so that a build fails."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from doctoring import artifact_of, library_bytes
from in_process import build_here
from torch._inductor.cpp_builder import CppBuilder

from aotc.compiler.executors import local
from aotc.compiler.toolchain import precompiled_headers
from aotc.compiler.toolchain.precompiled_headers import ENOUGH_UNITS, PrecompiledHeaders, first_includes, kernels_with
from aotc.compiler.toolchain.wrapper_split import Compile
from aotc.store.layout.store import Store

SOURCE = """
// a comment
#include <vector>

#include <map>
int length(const std::vector<int>& numbers) { return numbers.size(); }
#include <string>
"""
LOGGING_COMPILER = """#!/bin/sh
echo "$*" >> "{log}"
exec "{compiler}" "$@"
"""
FAILING_WITH = """#!/bin/sh
echo "$*" >> "{log}"
case " $* " in *" {word} "*) exit 1;; esac
exec "{compiler}" "$@"
"""


class Tools(NamedTuple):
    """A folder in which units have theirs, the compiler's log, and what makes a compiler of a script's text."""

    folder: Path
    log: Path
    compiler: Callable[..., Path]

    def calls(self, word: str) -> int:
        return sum(word in line for line in self.log.read_text().splitlines())


@pytest.fixture
def tools(tmp_path: Path, plain_compiler: None) -> Tools:
    log, script, found = tmp_path / "log", tmp_path / "bin" / "g++", shutil.which("g++")
    script.parent.mkdir()

    def compiler(text: str = LOGGING_COMPILER, **values: str) -> Path:
        script.write_text(text.format(log=log, compiler=found, **values))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return script

    return Tools(tmp_path, log, compiler)


def unit(tools: Tools, name: str, compiler: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> Compile:
    """The compile of a unit that has its own cache folder."""
    cache = tools.folder / name
    cache.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    source, target = cache / f"{name}.kernel.cpp", cache / f"{name}.kernel.o"
    source.write_text(SOURCE)
    mapped = f"-ffile-prefix-map={cache}=/aotc"
    command = (str(compiler), *flags, "-c", str(source), "-o", str(target), mapped)
    return Compile(command, str(source), str(target))


def test_only_what_is_included_at_first_is_precompiled() -> None:
    assert first_includes(SOURCE) == "#include <vector>\n#include <map>\n"
    assert first_includes('#include "own.h"\n#include <map>\n') == ""


def test_two_units_take_the_same_and_their_code_is_what_it_is_without(
    tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    precompiled, compiler, made = PrecompiledHeaders(tools.folder / "headers"), tools.compiler(), []
    for name in ("first", "second"):
        compile = unit(tools, name, compiler, monkeypatch, "-O2")
        compile.run()
        plain = Path(compile.target).read_bytes()
        more = precompiled.arguments(compile)
        assert more[0] == "-include" and Path(more[1]).with_name("headers.h.gch").stat().st_size > 100_000
        # Where the compiler did not take it, this is an error.
        compile.run(*more, "-Winvalid-pch", "-Werror")
        assert Path(compile.target).read_bytes() == plain
        made.append(more)
    assert made[0] == made[1] and tools.calls("c++-header") == 1
    other = precompiled.arguments(unit(tools, "third", compiler, monkeypatch, "-O2", "-DOTHER"))
    assert other and other != made[0]


def test_what_cannot_be_precompiled_is_tried_once(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tools.compiler(FAILING_WITH, word="c++-header")
    precompiled = PrecompiledHeaders(tools.folder / "headers")
    for name in ("first", "second"):
        assert precompiled.arguments(unit(tools, name, compiler, monkeypatch)) == ()
    assert tools.calls("c++-header") == 1


@pytest.mark.parametrize("flag", ["-g", "-ggdb3", "-include"])
def test_debug_information_and_headers_that_are_there_are_left_alone(
    flag: str, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile = unit(tools, "first", tools.compiler(), monkeypatch, flag)
    assert PrecompiledHeaders(tools.folder / "headers").arguments(compile) == ()
    assert not tools.log.exists()


def test_only_gccs_are_taken(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tools.folder / "clang++"
    script.write_text(
        '#!/bin/sh\nlast=; for word in "$@"; do [ "$last" = -o ] && printf CPCH > "$word"; last=$word; done\n'
    )
    script.chmod(0o755)
    compile = unit(tools, "first", script, monkeypatch)
    assert PrecompiledHeaders(tools.folder / "headers").arguments(compile) == ()
    assert [path.read_bytes() for path in (tools.folder / "headers").rglob("*.begun")] == [b"CPCH"]


def test_a_disk_without_room_gets_none(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompiled_headers, "_ROOM", 1 << 60)
    compile = unit(tools, "first", tools.compiler(), monkeypatch)
    assert PrecompiledHeaders(tools.folder / "headers").arguments(compile) == ()
    assert not tools.log.exists()
    (tools.folder / "file").write_text("where there should be a folder")
    assert PrecompiledHeaders(tools.folder / "file").arguments(compile) == ()


@pytest.mark.parametrize("takes", [True, False])
def test_kernels_compile_also_where_the_compiler_takes_none(
    takes: bool, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tools.compiler() if takes else tools.compiler(FAILING_WITH, word="-include")
    compile = unit(tools, "first", compiler, monkeypatch)

    class Builder(CppBuilder):
        def __init__(self) -> None: ...

        def get_target_file_path(self) -> str:
            return compile.target

        def get_command_line(self) -> str:
            return " ".join(compile.command)

    def build(self: Builder) -> None:
        found = Compile.read(self.get_command_line(), Path(compile.source), Path(compile.target))
        assert found
        found.run()

    monkeypatch.setattr(CppBuilder, "build", build)
    with kernels_with(PrecompiledHeaders(tools.folder / "headers")):
        Builder().build()
    assert Path(compile.target).exists()
    assert tools.calls("-include") == 1
    assert tools.calls(".kernel.o") == (1 if takes else 2)


def test_a_build_of_many_units_precompiles_them_and_its_libraries_are_the_same(
    manifest: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def libraries(store: str, compiler: Path) -> set[bytes]:
        tools.log.unlink(missing_ok=True)
        monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
        report = build_here(manifest, tools.folder / store)
        assert not report.failed, [outcome.error for outcome in report.failed]
        opened = Store.open(tools.folder / store)
        return {library_bytes(opened, variant) for variant in artifact_of(opened, "linear").variants}

    few = libraries("few", tools.compiler())
    assert len(few) == 2 < ENOUGH_UNITS
    assert tools.calls("c++-header") == tools.calls("-include") == 0
    monkeypatch.setattr(local, "ENOUGH_UNITS", 2)
    assert libraries("many", tools.compiler()) == few
    assert tools.calls("c++-header") == 2, "of kernels and of wrappers"
    assert tools.calls("-include") == 4
