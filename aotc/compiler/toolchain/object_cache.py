"""C++ kernels compiled once for equal source: units of one build take the object that another one compiled."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from aotc.compiler.key import compiler_version
from aotc.compiler.patches.determinism.repeatable_code import FOLDER
from aotc.compiler.toolchain.compile_cache import CompileCache
from aotc.digest import sha256_json

KERNELS = "kernel.o"
_NAMES_WRAPPER = "// Triton kernels are embedded as comments in "


class SharedObjects:
    """Counts how many objects another unit had compiled."""

    def __init__(self) -> None:
        self.taken = 0


@contextmanager
def objects_shared(folder: Path | None) -> Iterator[SharedObjects]:
    """Let the kernels that are compiled in this context be those of other units in `folder`, where they are equal.

    A folder of the build's own: how the compiler is called and with what headers does not change while it runs. Without
    one, nothing is changed.
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
    """The command and the source; without what the files are called and where they lie, which no code names."""
    sources = [Path(word) for word in shlex.split(line) if word.endswith(".cpp")]
    command = line.replace(os.environ["TORCHINDUCTOR_CACHE_DIR"], FOLDER)
    for source in sources:
        command = command.replace(source.stem, "SOURCE")
    return sha256_json([command, [*map(_code, sources)], compiler_version(), str(torch.__version__)])


def _code(source: Path) -> str:
    """Without Inductor's comment that names the wrapper, another file in each unit."""
    return "".join(line for line in source.read_text().splitlines(keepends=True) if not line.startswith(_NAMES_WRAPPER))
