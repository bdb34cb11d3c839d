"""Headers that many units of a build include, precompiled once for all of them.

To read torch's headers is most of what a small unit's compilers do: 1.4 of 1.6 s for its kernels, 1 of 2 s for its
wrapper. To precompile them takes 4.5 s each, so a build of few units does without. The code is the same to the byte.
Where a compiler makes none, or there is no room for them, units compile as they do without.

GCC's alone: Clang's name the files that they were made of, some of which go with the unit that made them.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from aotc.compiler.toolchain.object_cache import KERNELS
from aotc.compiler.toolchain.wrapper_split import Compile
from aotc.digest import sha256_json
from aotc.errors import StoreError
from aotc.store.files.locks import locked

ENOUGH_UNITS = 6
"""From so many on it takes less time to precompile headers than to read them in each."""

_ROOM = 2 << 30
"""Bytes that are left free at least: precompiled, the headers of one way to compile are 150 MB."""
_GCC = b"gpch"
"""What its precompiled headers begin with: gcc/c-family/c-pch.cc."""
_LOCK_TIMEOUT = 600.0  # seconds; the lock is held while headers are precompiled

_log = logging.getLogger("aotc")


class PrecompiledHeaders:
    """In a folder of the build's own: how the compiler is called and what torch is does not change while it runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def arguments(self, compile: Compile) -> tuple[str, ...]:
        """More arguments for a command, with which it takes what its source includes at first precompiled. They are
        made for the first one that asks; none, where that cannot be.

        With debug information, which names them in the library, none; and none for who has some already.
        """
        if "-include" in compile.command or any(word.startswith("-g") and word != "-g0" for word in compile.command):
            return ()
        try:
            includes = first_includes(Path(compile.source).read_text())
            entry = self._folder / _key(compile, includes).removeprefix("sha256:")
            header = entry / "headers.h"
            made = header.with_name("headers.h.gch")  # the name that the compiler looks for
            with locked(entry / ".lock", _LOCK_TIMEOUT):
                if includes and not header.exists():  # else it was tried before
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
    """The arguments that do not name the unit's own folder: files, and what these are called in compiled code."""
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
    """Compile a library's kernels with precompiled headers; without, where the compiler cannot."""
    from torch._inductor.cpp_builder import CppBuilder

    if headers is None:
        yield
        return
    build: Any = CppBuilder.build

    def build_with(self: Any) -> None:
        target, line = Path(self.get_target_file_path()), self.get_command_line()
        compile = Compile.read(line, target.with_suffix(".cpp"), target) if target.name.endswith(KERNELS) else None
        if compile and (more := headers.arguments(compile)):
            try:
                with mock.patch.object(self, "get_command_line", lambda: " ".join([line, *more])):
                    build(self)
                return
            except Exception as error:  # whatever this torch raises of a compiler; if it is the code, it comes again
                _log.debug("kernels do not compile with precompiled headers: %s", error)
        build(self)

    with mock.patch.object(CppBuilder, "build", build_with):
        yield
