"""The extension that makes calls of compiled code (`native_call.cpp`): one for all artifacts of this torch and Python.

Compiling it takes five seconds, beside the units, once for a user: it is kept by all that its bytes depend on. Where it
cannot be compiled, artifacts are published without it, and Python makes the calls.
"""

from __future__ import annotations

import functools
import logging
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from aotc.compiler.toolchain.compile_cache import CompileCache
from aotc.digest import sha256_json
from aotc.machine.cpp_compiler import compiler_name, compiler_version
from aotc.machine.native import python_abi
from aotc.records import NATIVE_INTERFACE, NativeCall
from aotc.store.layout.store import Store

SOURCE = Path(__file__).with_name("native_call.cpp")
_OPTIONS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,--build-id=none")
_LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-lc10")

_log = logging.getLogger("aotc")


@contextmanager
def native_call_compiled(store: Store, *, early: bool = False) -> Iterator[Callable[[], NativeCall | None]]:
    """Give a function that compiles the extension into the store when it is first called, and returns its record, or
    None where the extension cannot be compiled. With `early`, the extension is compiled while the block runs."""
    with ThreadPoolExecutor(1) as pool:
        compiling = functools.cache(lambda: pool.submit(_compiled, store))
        if early:
            compiling()
        yield lambda: compiling().result()


def _compiled(store: Store) -> NativeCall | None:
    inputs = [SOURCE.read_text(), _OPTIONS, _LIBRARIES, compiler_version(), str(torch.__version__), python_abi()]
    with tempfile.TemporaryDirectory(prefix="aotc-native-") as folder:
        library = Path(folder) / "native_call.so"
        try:
            CompileCache().fetch(sha256_json(inputs), library, _compile)
        except (OSError, subprocess.SubprocessError) as error:
            reason = (getattr(error, "stderr", "") or str(error)).strip().partition("\n")[0]
            _log.warning("calls of what is built here will be made by Python, which takes longer: %s", reason[:400])
            return None
        file = store.blobs.put_file_zstd(library, name=library.name)
    return NativeCall(file, str(torch.__version__), python_abi(), NATIVE_INTERFACE)


def _compile(library: Path) -> None:
    """Raises OSError, SubprocessError: no compiler, or no headers of Python."""
    home = Path(torch.__file__).parent
    folders = {"torch": home / "include", "python": Path(sysconfig.get_paths()["include"])}
    command = [compiler_name(), *_OPTIONS]
    for name, folder in folders.items():  # the code holds names of headers: no folder of this machine
        command += ["-I", str(folder), f"-fmacro-prefix-map={folder}={name}"]
    command += ["-o", str(library), str(SOURCE), f"-fmacro-prefix-map={SOURCE.parent}=aotc", "-L", str(home / "lib")]
    subprocess.run([*command, *_LIBRARIES], capture_output=True, text=True, check=True)
