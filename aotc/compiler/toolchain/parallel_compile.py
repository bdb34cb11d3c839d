"""The C++ compiles of a unit: in parallel where possible, and the part that is the same in every library only once."""

from __future__ import annotations

import logging
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotc.compiler.scoped import replaced
from aotc.compiler.toolchain.precompiled_headers import PrecompiledHeaders
from aotc.compiler.toolchain.wrapper_split import (
    Compile,
    apart,
    common_of,
    compile_common_once,
    link_arguments,
    needing_torch,
)
from aotc.store.compile_cache import CompileCache

_log = logging.getLogger("aotc")


@contextmanager
def compiling_side_by_side(
    cache: CompileCache | None = None,
    expected: Callable[[], Compile | None] = lambda: None,
    shared: CompileCache | None = None,
    headers: PrecompiledHeaders | None = None,
) -> Iterator[None]:
    """While active, a library's wrapper compiles in the background, in parallel to its kernels; linking waits for it.

    The part that all wrappers have in common is compiled once on a machine. This compile begins at once, with the
    command that `expected()` predicts; CPU benchmarks wait for it. `shared` keeps its object for the units of a build.
    A wrapper's own part uses the precompiled `headers`.

    Errors of the background compile are raised by the link.
    """
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.runtime.benchmarking import Benchmarker

    build: Any = CppBuilder.build
    benchmark: Any = Benchmarker.benchmark_cpu
    kept = CompileCache() if cache is None else cache
    wrappers: list[Future[Path | None]] = []

    def make_common(common: Compile) -> None:
        compile_common_once(common, kept, shared)

    def start_or_build(self: Any) -> None:
        target = self.get_target_file_path()
        if target.endswith("wrapper.o"):
            wrappers.append(pool.submit(_compile_wrapper, self, build, pool, make_common, headers))
        elif target.endswith(".so") and wrappers:  # without a wrapper, `target` is a candidate of autotuning
            objects = [wrappers.pop().result() for _ in list(wrappers)]
            _link(self, build, [path for path in objects if path])
        else:
            build(self)

    def undisturbed(*args: Any, **kwargs: Any) -> Any:
        wait([ahead])
        return benchmark(*args, **kwargs)

    with (
        ThreadPoolExecutor(max_workers=3) as pool,  # the compile ahead, a wrapper's own part, and its common part
        replaced(CppBuilder, "build", start_or_build),
        replaced(Benchmarker, "benchmark_cpu", undisturbed),
    ):
        ahead = pool.submit(_compile_ahead, _expectation(expected), make_common)
        yield


def _expectation(expected: Callable[[], Compile | None]) -> Compile | None:
    try:
        return expected()
    except Exception as error:  # another torch's classes: the prediction is optional
        _log.debug("the wrapper's compile command cannot be predicted: %s", error)
        return None


def _compile_ahead(expected: Compile | None, make_common: Callable[[Compile], None]) -> None:
    try:
        if expected and (common := common_of(expected, Path(expected.source).with_suffix(".parts"))):
            make_common(common)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("the common part of wrappers does not compile: %s", _said(error))


def _compile_wrapper(
    builder: Any,
    build: Any,
    pool: ThreadPoolExecutor,
    make_common: Callable[[Compile], None],
    headers: PrecompiledHeaders | None,
) -> Path | None:
    """Compile a wrapper. Returns the object of the common part, None if the wrapper was compiled as a whole."""
    target = Path(builder.get_target_file_path())
    source = target.with_suffix(".cpp")
    try:
        whole = Compile.read(builder.get_command_line(), source, target)
        parts = apart(whole, source.with_suffix(".parts")) if whole else None
        if parts is not None:
            common = pool.submit(make_common, parts.common)
            _compile_own(parts.own, headers.arguments(parts.own) if headers else ())
            common.result()
            return Path(parts.common.target)
        _log.debug("the wrapper is compiled as a whole: its text is not as expected")
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("the wrapper is compiled as a whole: its parts do not compile: %s", _said(error))
    build(builder)
    return None


def _compile_own(own: Compile, more: Sequence[str]) -> None:
    if more:
        try:
            own.run(*more)
            return
        except subprocess.SubprocessError as error:
            _log.debug("a wrapper does not compile with precompiled headers: %s", _said(error))
    own.run()


def _link(builder: Any, build: Any, objects: list[Path]) -> None:
    """Link with `objects` too, placed before the libraries."""
    folder = Path(builder.get_target_file_path()).parent
    command = _needing_torch(shlex.split(builder.get_command_line()), folder)
    at = next((index for index, word in enumerate(command) if word.endswith(".o")), len(command))
    more = link_arguments(command, folder)
    line = shlex.join([*command[:at], *map(str, objects), *command[at:], *more])
    with replaced(builder, "get_command_line", lambda: line):
        build(builder)


def _needing_torch(command: Sequence[str], folder: Path) -> list[str]:
    try:
        return needing_torch(command, folder)
    except (OSError, subprocess.SubprocessError) as error:
        _log.debug("the linker reads torch's library: %s", _said(error))
        return [*command]


def _said(error: Exception) -> str:
    return str(getattr(error, "stderr", "") or error)
