"""Headers that many units of a build include, precompiled once for all of them.

Reading torch's headers takes most of the compile time of a small unit: 1.4 of 1.6 s for its kernels, 1 of 2 s for its
wrapper. Precompiling them takes 4.5 s each, so builds of few units do not. The code is the same to the byte. If the
compiler does not support it, or the disk is full, units compile without precompiled headers.

GCC only: Clang's precompiled headers name their source files, some of which are removed with the unit that made them.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.scoped import replaced
from aotc.compiler.toolchain.wrapper_split import Compile
from aotc.digest import sha256_json
from aotc.errors import StoreError
from aotc.machine.locks import waiting
from aotc.store.files.store_locks import locked

ENOUGH_UNITS = 6
"""The number of units from which precompiling headers is faster than reading them in each."""

_KERNELS = "kernel.o"
_ROOM = 2 << 30
"""Bytes of the disk to leave free: precompiled headers for one set of compiler arguments take 150 MB."""
_GCC = b"gpch"
"""The first bytes of GCC's precompiled headers: gcc/c-family/c-pch.cc."""
_LOCK_TIMEOUT = 600.0  # seconds; the lock is held while headers are precompiled

_log = logging.getLogger("aotc")


class PrecompiledHeaders:
    """Precompiled headers in a folder of one build, during which the compiler and torch do not change."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arguments(self, compile: Compile) -> tuple[str, ...]:
        """Extra arguments for a compile, with which it uses a precompiled header for its source's first includes. The
        first call for a set of includes precompiles them. Empty if that fails.

        Empty also with debug information, which would name the header in the library, and for a command that has an
        `-include` already.
        """
        if "-include" in compile.command or any(word.startswith("-g") and word != "-g0" for word in compile.command):
            return ()
        try:
            includes = first_includes(Path(compile.source).read_text())
            entry = self._folder / _key(compile, includes).removeprefix("sha256:")
            header = entry / "headers.h"
            made = header.with_name("headers.h.gch")  # the name that the compiler looks for
            with ExitStack() as alone:
                with waiting("for another unit, which precompiles headers"):
                    alone.enter_context(locked(entry / ".lock", _LOCK_TIMEOUT))
                if includes and not header.exists():  # else precompiling was tried before
                    header.write_text(includes)
                    _precompile(compile, header, made)
            return ("-include", str(header)) if made.exists() else ()
        except (StoreError, OSError, subprocess.SubprocessError) as error:
            _log.debug("headers are not precompiled: %s", getattr(error, "stderr", "") or error)
            return ()


def first_includes(source: str) -> str:
    """The `#include <…>` lines at the beginning of a source, comments and empty lines between them left out."""
    found = []
    for line in source.splitlines():
        if line.startswith("#include <"):
            found.append(line + "\n")
        elif line.strip() and not line.startswith("//"):
            break
    return "".join(found)


def _key(compile: Compile, includes: str) -> str:
    """The key of a precompiled header: the includes, and the arguments that do not name a file in the unit's folder."""
    own = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    return sha256_json([includes, [word for word in compile.command if own not in word]])


def _precompile(compile: Compile, header: Path, made: Path) -> None:
    if shutil.disk_usage(header.parent).free < _ROOM:
        _log.debug("headers are not precompiled: %s has less than %d bytes left", header.parent, _ROOM)
        return
    begun = made.with_suffix(".begun")
    compile.of(header, begun, first=("-x", "c++-header")).run()
    with begun.open("rb") as stream:
        if stream.read(len(_GCC)) == _GCC:
            begun.replace(made)


@contextmanager
def kernels_with(headers: PrecompiledHeaders | None) -> Iterator[None]:
    """While active, compile a library's kernels with precompiled headers; if that fails, without."""
    from torch._inductor.cpp_builder import CppBuilder

    if headers is None:
        yield
        return
    build: Any = CppBuilder.build

    def build_with(self: Any) -> None:
        target, line = Path(self.get_target_file_path()), self.get_command_line()
        compile = Compile.read(line, target.with_suffix(".cpp"), target) if target.name.endswith(_KERNELS) else None
        if compile and (more := headers.arguments(compile)):
            try:
                with replaced(self, "get_command_line", lambda: " ".join([line, *more])):
                    build(self)
                return
            except Exception as error:  # any error that this torch raises; one in the code is raised again below
                _log.debug("kernels do not compile with precompiled headers: %s", error)
        build(self)

    with replaced(CppBuilder, "build", build_with):
        yield
