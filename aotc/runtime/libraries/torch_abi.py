"""Code that another torch minor built: is there everything of torch that it calls? Imported for `compat="abi"` alone.

torch promises that the functions of its C shim (`aoti_torch_…`, `torch_…`: torch/csrc/inductor/aoti_torch/c/shim.h,
torch/csrc/stable/c/shim.h) keep their form in all newer versions: one of another form gets another name. In an older
torch newer functions are missing, which glibc says only when one is called, and then it ends the process. So each
undefined symbol is looked for before a library is opened.

Beside the shim, Inductor's code calls SLEEF's functions, which torch exports (`Sleef_expf8_u10`); a name of SLEEF holds
its form. Names of torch's C++ are not promised: code that calls one is refused.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from aotc.errors import EnvironmentMismatchError, Issue, LibraryError
from aotc.machine.elf import undefined_symbols
from aotc.machine.environment import this_environment
from aotc.machine.this_host import numbers
from aotc.records import Artifact, Variant, part_name
from aotc.runtime.libraries.files import FilesInMemory, opened

if TYPE_CHECKING:
    from aotc.runtime.libraries.library_folder import LibraryFiles


def check_symbols(artifact: Artifact, files_of: Callable[[Variant], LibraryFiles]) -> None:
    """Raises EnvironmentMismatchError where this torch is of another minor than the artifact's, and a library calls
    something that this torch does not promise or does not have: every symbol is listed."""
    built, here = artifact.environment.torch, str(torch.__version__)
    if numbers(built, 2) == numbers(here, 2):
        return
    issues = []
    for variant in artifact.variants:
        files = files_of(variant)
        where = part_name(variant.region, variant.bucket)
        if Path(files.library).with_suffix(".json").name in files.names:
            message = "calls operators by name, through torch's C++ runner and not through the C shim"
            issues.append(Issue(message, where=where, expected="the C shim", actual="operators by name"))
            continue
        libraries = [files] if variant.backward is None else [files, files.of(variant.backward.library)]
        symbols = [symbol for each in libraries for symbol in _symbols(each)]
        for symbol in dict.fromkeys(symbols):
            if message := _refused(symbol):
                issues.append(Issue(f"calls `{symbol}`, which {message}", where=where, expected=symbol, actual=here))
    if issues:
        raise EnvironmentMismatchError(
            f"`{artifact.model}` was built with torch {built}, and torch {here} cannot run it by the C shim alone",
            issues=tuple(issues),
            hint="build it with the service's torch",
            here=this_environment(),
        )


def _symbols(files: LibraryFiles) -> list[str]:
    """From the bytes of this load: the path that `opened` gives for a library that is loaded already is but a name."""
    try:
        if isinstance(files, FilesInMemory):
            return undefined_symbols(f"/proc/self/fd/{files.streams[files.library].fileno()}")
        with opened(files) as path:
            return undefined_symbols(path)
    except (OSError, ValueError) as error:
        raise LibraryError(f"the library {files.library} cannot be read: {error}", hint="build it again") from error


@functools.cache
def _refused(symbol: str) -> str:
    """Why code may not call a symbol; "" where it may."""
    if symbol.startswith("_Z"):  # C++
        return "" if hasattr(_opened("libstdc++.so.6"), symbol) else "is of torch's C++, which is not promised"
    # Of libtorch_cpu and the libraries that it is loaded with: glibc, OpenMP.
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return "" if hasattr(_opened(str(library)), symbol) else f"torch {torch.__version__} does not have"


@functools.cache
def _opened(library: str) -> ctypes.CDLL:
    return ctypes.CDLL(library)
