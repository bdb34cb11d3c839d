"""Compile C++ kernels of equal source once: a unit takes the object that another unit of the build compiled."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aotc.compiler.toolchain.compile_cache import FOLDER, CompileCache
from aotc.digest import sha256_json
from aotc.machine.cpp_compiler import compiler_version

KERNELS = "kernel.o"
_NAMES_WRAPPER = "// Triton kernels are embedded as comments in "


class SharedObjects:
    """The number of objects taken from other units."""

    def __init__(self) -> None:
        self.taken = 0


@contextmanager
def objects_shared(folder: Path | None) -> Iterator[SharedObjects]:
    """While active, take kernels of equal source from other units by way of `folder`; None switches sharing off.

    The folder belongs to one build: headers and compiler do not change while a build runs, so the key leaves them out.
    """
    from torch._inductor.cpp_builder import CppBuilder

    build: Any = CppBuilder.build
    shared = SharedObjects()
    if folder is None:
        yield shared
        return
    cache = CompileCache(folder)

    def build_or_take(self: Any) -> None:
        target = Path(self.get_target_file_path())
        if not target.name.endswith(KERNELS):
            build(self)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shared.taken += cache.fetch(_key(self.get_command_line()), target, lambda _: build(self))

    with mock.patch.object(CppBuilder, "build", build_or_take):
        yield shared


def _key(line: str) -> str:
    """The key of a compile: its command and source, without file names and folders, which the code does not contain."""
    sources = [Path(word) for word in shlex.split(line) if word.endswith(".cpp")]
    command = line.replace(os.environ["TORCHINDUCTOR_CACHE_DIR"], FOLDER)
    for source in sources:
        command = command.replace(source.stem, "SOURCE")
    return sha256_json([command, [*map(_code, sources)], compiler_version(), str(torch.__version__)])


def _code(source: Path) -> str:
    """The source without Inductor's comment that names the wrapper, which differs in each unit."""
    return "".join(line for line in source.read_text().splitlines(keepends=True) if not line.startswith(_NAMES_WRAPPER))
