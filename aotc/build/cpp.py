"""The C++ compiles of a unit: nothing is prepared that one unit does not win back, what can runs side by side, and what
is the same in every library is compiled once."""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from aotc.build.compile_cache import CompileCache
from aotc.build.wrapper import Compile, apart, compile_common, link_arguments

_log = logging.getLogger("aotc")


@contextmanager
def compiling_side_by_side(cache: CompileCache | None = None) -> Iterator[None]:
    """Let a library's wrapper compile in the background, its kernels meanwhile; linking waits for it.

    What the background compile raises, the link raises.
    """
    from torch._inductor.cpp_builder import CppBuilder

    build: Any = CppBuilder.build
    compiled = CompileCache() if cache is None else cache
    wrappers: list[Future[Path | None]] = []

    def start_or_build(self: Any) -> None:
        target = self.get_target_file_path()
        if target.endswith("wrapper.o"):
            wrappers.append(pool.submit(wrapper, self))
        elif target.endswith(".so"):
            objects = [wrappers.pop().result() for _ in list(wrappers)]
            _link(self, build, [path for path in objects if path])
        else:
            build(self)

    def wrapper(builder: Any) -> Path | None:
        """The object of the common part, where it was compiled apart."""
        target = Path(builder.get_target_file_path())
        try:
            whole = Compile.read(builder.get_command_line(), target.with_suffix(".cpp"), target)
            parts = apart(whole) if whole else None
            if parts is None:
                _log.debug("this torch's wrapper is not as expected: it is compiled as it is")
            else:
                common = pool.submit(compile_common, parts.common, compiled)
                parts.own.run()
                known = common.result()
                _log.debug("the common part of the wrapper was %s", "compiled before" if known else "compiled")
                return Path(parts.common.target)
        except (OSError, subprocess.SubprocessError) as error:
            _log.debug("the wrapper does not compile apart, so it is compiled as it is: %s", _said(error))
        build(builder)
        return None

    with ThreadPoolExecutor(max_workers=2) as pool, mock.patch.object(CppBuilder, "build", start_or_build):
        yield


def _link(builder: Any, build: Any, objects: list[Path]) -> None:
    """Link with `objects` too, which stand before the libraries."""
    command = shlex.split(builder.get_command_line())
    at = next((index for index, word in enumerate(command) if word.endswith(".o")), len(command))
    more = link_arguments(command, Path(builder.get_target_file_path()).parent)
    line = shlex.join([*command[:at], *map(str, objects), *command[at:], *more])
    with mock.patch.object(builder, "get_command_line", lambda: line):
        build(builder)


def _said(error: Exception) -> str:
    return str(getattr(error, "stderr", "") or error)
