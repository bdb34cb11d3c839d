"""The C++ compiles of a unit: nothing is prepared that one unit does not win back, and what can runs side by side."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def compiling_side_by_side() -> Iterator[None]:
    """Let a library's wrapper compile in the background, its kernels meanwhile; linking waits for it.

    What the background compile raises, the link raises.
    """
    from torch._inductor.cpp_builder import CppBuilder

    build: Any = CppBuilder.build
    wrappers: list[Future[None]] = []

    def start_or_build(self: Any) -> None:
        target = self.get_target_file_path()
        if target.endswith("wrapper.o"):
            wrappers.append(pool.submit(build, self))
            return
        if target.endswith(".so"):
            while wrappers:
                wrappers.pop().result()
        build(self)

    with ThreadPoolExecutor(max_workers=1) as pool, mock.patch.object(CppBuilder, "build", start_or_build):
        yield
