"""The runtime of an exported folder: this machine's lies beside the extension; another architecture's is compiled."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import aotc.core
from aotc.digest import sha256_file, sha256_json
from aotc.errors import LibraryError
from aotc.machine.cpp_compiler import compiler_name, compiler_version, has_cross_compiler, how_to_install, is_foreign
from aotc.standalone.cpu_environment import open_cpu
from aotc.store.compile_cache import CompileCache

RUNTIME, HEADER = "libaotc.so", "aotc.h"

_CORE = Path(aotc.core.__file__).parent
COMPILE_OPTIONS = ("-std=c++20", "-O3", "-fopenmp", "-fvisibility=hidden", "-g0", "-Wno-psabi")
LINK_OPTIONS = ("-fopenmp", "-lm", f"-Wl,-soname,{RUNTIME}", "-Wl,-Bsymbolic", "-Wl,-z,nodelete")
"""As pyproject.toml has for `aotc.core._libaotc`; `instructions.h` says for which CPUs."""


def header() -> Path:
    return _CORE / "cpu" / HEADER


def runtime_sources() -> list[Path]:
    return [*sorted((_CORE / "cpu").glob("*.cpp")), _CORE / "openmp.cpp"]


def folder_runtime(machine: str, folder: Path) -> Path:
    """The runtime for an architecture, as of `platform.machine()`; in `folder` where it is not of this installation.

    One that is compiled takes 15 s of CPU time, once for a machine: it is kept in the cache folder. Raises
    LibraryError.
    """
    if is_foreign(machine):
        return _compiled(machine, folder)
    extension = Path(open_cpu().__file__)
    path = extension.with_name(extension.name.replace("_cpu", "_libaotc"))
    if not path.exists():
        raise LibraryError(
            f"this installation has no runtime for programs without Python: there is no {path.name}",
            hint=f"install a wheel of aotc for {machine} and glibc 2.35 or newer; from a clone, install aotc again",
        )
    return path


def _compiled(machine: str, folder: Path) -> Path:
    name = compiler_name(machine)
    if not has_cross_compiler(machine):
        raise LibraryError(
            f"the code is for {machine}, this machine is {platform.machine()}, and there is no `{name}` to compile the "
            "runtime beside it",
            hint=how_to_install(machine),
        )
    options = (*COMPILE_OPTIONS, "-shared", "-fPIC", "-s")

    def compile(into: Path) -> None:
        command = [name, *options, *map(str, runtime_sources()), "-o", str(into), *LINK_OPTIONS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[:1]
            raise LibraryError(
                f"the runtime for {machine} does not compile: {(errors or [''])[0][:400]}",
                hint=f"{name} must be GCC 12 or newer, with the C++ library of {machine}",
            )

    headers = [*_CORE.glob("*.h"), *(_CORE / "cpu").glob("*.h")]
    digests = {path.name: sha256_file(path) for path in [*runtime_sources(), *headers]}
    key = sha256_json([compiler_version(machine), options, LINK_OPTIONS, digests])
    CompileCache().fetch(key, folder / RUNTIME, compile)
    return folder / RUNTIME
