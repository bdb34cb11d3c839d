"""Builds in the test's own process: a process of its own would only import torch and its compiler once more."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, chdir, closing, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import IO, Any
from unittest import mock

from processes import ROOT, ZOO, environment

from aotc.cli import main
from aotc.compiler.build_report import BuildReport
from aotc.compiler.messages import Settings
from aotc.compiler.pipeline import build, plan_build
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.compiler.publish.url_store import BuildStore
from aotc.compiler.request import BuildRequest
from aotc.compiler.workers import unit_servers
from aotc.compiler.workers.unit_servers import ForkServers, unit_environment
from aotc.manifest import Manifest, read_manifest

_OF_ONE_TEST = (
    *("PYTEST_CURRENT_TEST", "AOTC_CACHE_DIR", "PATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "CUBLAS_WORKSPACE_CONFIG", "TORCH_WARM_POOL", "RAY_CLIENT_MODE"),
)
"""Variables that each forked process is given, and no imported module has read. From the fourth on, torch's compiler or
Ray sets them in a process that uses it, for the rest of the session."""


def _read_by_imports() -> dict[str, str]:
    return {name: value for name, value in unit_environment().items() if name not in _OF_ONE_TEST}


with mock.patch.dict(os.environ, environment()):
    _usual = _read_by_imports()
_kept: dict[tuple[str, ...], ForkServers] = {}


@contextmanager
def shared_servers(imports: tuple[str, ...] = ()) -> Iterator[ForkServers]:
    """The fork servers of all builds in this process: to import torch's compiler takes 5 s. Those of a build of a
    library's models import its modules `imports`, too.

    A test that changes the environment gets servers of its own, since imported modules may have read it.
    """
    if _read_by_imports() != _usual:
        with closing(ForkServers()) as own:
            yield own
        return
    if imports not in _kept:
        _kept[imports] = ForkServers(common=(*unit_servers._COMMON, *imports))
        atexit.register(_kept[imports].close)
    servers = _kept[imports]
    try:
        servers.begin(unit_environment())
        yield servers
    except BaseException:
        del _kept[imports]
        servers.close()
        raise
    if servers.holder is not None:
        servers.holder.close()
        servers.holder = None


def request_of(manifest: Manifest, store: Path, **more: Any) -> BuildRequest:
    settings = Settings(**{name: more.pop(name) for name in Settings.__struct_fields__ if name in more})
    return BuildRequest(manifest, store, settings=settings, **more)


def build_here(manifest: Manifest | Path, store: Path, **more: Any) -> BuildReport:
    """`more` are fields of `BuildRequest` or `Settings`. The models' code is forgotten afterwards."""
    manifest = read_manifest(manifest) if isinstance(manifest, Path) else manifest
    with mock.patch.dict(os.environ, environment()), code_forgotten(manifest.folder), shared_servers() as servers:
        return build(request_of(manifest, store, **more), servers)


def run_here(
    *arguments: object, cwd: Path = ROOT, imports: tuple[str, ...] = (), **changes: str
) -> CompletedProcess[str]:
    """The command line, to its end, as `run_aotc` runs it in a process of its own. The models' code is forgotten.
    `imports` are of `shared_servers`."""
    words = [str(argument) for argument in arguments]
    folders = [(cwd / word).parent for word in words if word.endswith(".yaml")]
    with ExitStack() as during:
        during.enter_context(mock.patch.dict(os.environ, environment(**changes)))
        during.enter_context(code_forgotten(*([] if cwd == ROOT else [cwd]), *folders))
        during.enter_context(chdir(cwd))
        servers = during.enter_context(shared_servers(imports))
        during.enter_context(mock.patch.object(unit_servers, "ForkServers", lambda: servers))
        during.enter_context(mock.patch.object(servers, "close"))
        during.enter_context(_handlers_kept())
        out, err = during.enter_context(_output_taken())
        try:
            main(words, prog_name="aotc")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for file in (out, err):
            file.seek(0)
        return CompletedProcess(words, code, out.read().decode(), err.read().decode())


@contextmanager
def _output_taken() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Files in the place of both streams, also of what is written by number."""
    with ExitStack() as during:
        files = [during.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        for number, (name, file) in enumerate(zip(("stdout", "stderr"), files, strict=True), 1):
            getattr(sys, name).flush()
            before = os.dup(number)
            during.callback(os.close, before)
            during.callback(os.dup2, before, number)
            os.dup2(file.fileno(), number)
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - a handler of a log may keep it
            during.enter_context(mock.patch.object(sys, name, stream))
        yield files[0], files[1]


@contextmanager
def _handlers_kept() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


@contextmanager
def code_forgotten(*folders: Path) -> Iterator[None]:
    """Models are imported as in a process of their own, and forgotten: those of the zoo, of tests, and in `folders`."""

    theirs = tuple(f"{folder.absolute()}/" for folder in (ZOO, *folders))
    temporary, ours = f"{tempfile.gettempdir()}/", (f"{ROOT}/", f"{sys.prefix}/")

    def of_models() -> dict[str, ModuleType]:
        files = {name: getattr(module, "__file__", None) or "" for name, module in [*sys.modules.items()]}
        return {
            name: sys.modules[name]
            for name, file in files.items()
            if file.startswith(theirs) or (file.startswith(temporary) and not file.startswith(ours))
        }

    path, hidden = [*sys.path], of_models()
    for name in hidden:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.path[:] = path
        for name in of_models():
            del sys.modules[name]
        sys.modules.update(hidden)


def plan_here(manifest: Manifest, store: Path, **more: Any) -> list[PlannedUnit]:
    planned, _ = plan_build(request_of(manifest, store, **more), BuildStore(store))
    return planned
