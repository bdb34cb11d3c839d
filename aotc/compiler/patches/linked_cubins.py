"""The object file of a GPU kernel does not depend on its folder."""

from __future__ import annotations

import re
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from aotc.compiler.patches.machinery.patch import Patch
from aotc.compiler.patches.machinery.replacing import replaced

PATCH = Patch(
    __name__,
    kind="determinism",
    device="cuda",
    targets=("torch._inductor.codecache:convert_cubin_to_obj(cubin_file, kernel_name, ld, objcopy)",),
)


def apply() -> AbstractContextManager[Any]:
    """While active, the object file of a GPU kernel does not depend on its folder."""
    from torch._inductor import codecache

    return replaced(codecache, "convert_cubin_to_obj", _object_of_cubin)


def _object_of_cubin(cubin_file: str, kernel_name: str, ld: str, objcopy: str) -> str:
    """As Inductor's, but run in the file's folder: the linker names and orders symbols by the path on its command line.

    Source: `torch._inductor.cpp_builder.convert_cubin_to_obj`.
    """
    cubin = Path(cubin_file)
    made = f"{cubin.name}.o"
    name = re.sub(r"\W", "_", cubin.name)
    symbols = [f"--redefine-sym=_binary_{name}_{end}=__{kernel_name}_{end}" for end in ("start", "end", "size")]
    for command in (
        [*ld.split(), "-r", "-b", "binary", "-z", "noexecstack", "-o", made, cubin.name],
        [*objcopy.split(), "--rename-section", ".data=.rodata,alloc,load,readonly,data,contents", made],
        [*objcopy.split(), *symbols, made],
    ):
        subprocess.run(command, cwd=cubin.parent, capture_output=True, text=True, check=True)
    return str(cubin.with_name(made))
