"""Compile the libraries that stand in for the CUDA runtime and the driver's library, with the build's own compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from aotc.errors import BuildError
from aotc.machine.cpp_compiler import compiler_name

HERE = Path(__file__).parent

DRIVER = "libcuda.so.1"
STAGE = "stand-in for CUDA"


def compiled_stand_ins(folder: Path) -> tuple[str, ...]:
    """Compile both libraries into the folder. Returns their paths, in the order in which to load them.

    Raises BuildError where torch has no CUDA, where CUDA's headers are missing, and where the compiler fails.
    """
    real = _runtime_library()
    own, script = folder / "functions.cpp", folder / "version.map"
    header = (cuda_home() / "include" / "cuda.h").read_text(errors="replace")
    names = sorted({name.decode() for name in _FUNCTION.findall(real.read_bytes())} | _driver_functions(header))
    missing = (f'__attribute__((weak)) int {name}() {{ return aotc_refuse("{name}"); }}\n' for name in names)
    own.write_text(f'extern "C" {{\nint aotc_refuse(const char *);\n{"".join(missing)}}}\n')
    script.write_text(f"{real.name} {{ global: *; }};\n")
    includes = ["-I", str(cuda_home() / "include")]
    _compile(folder / DRIVER, [HERE / "driver.cpp"], includes)
    _compile(folder / real.name, [HERE / "runtime.cpp", own], [*includes, f"-Wl,--version-script={script}"])
    (folder / "libcuda.so").symlink_to(DRIVER)  # by which a linker finds it
    return str(folder / DRIVER), str(folder / real.name)


_FUNCTION = re.compile(rb"\0((?:__)?cuda[A-Z]\w+)(?=\0)")
"""A name in a library's table of symbols."""


def _driver_functions(header: str) -> set[str]:
    """The driver's functions in CUDA's header. Those that `driver.cpp` lacks are errors where they are called, so that
    code which names them can be loaded; they are in the library that stands in for the runtime, and so a caller that
    looks them up in the driver's library finds them absent."""
    return set(re.findall(r"^(?:CUresult CUDAAPI |#define cu\w+ +)(cu[A-Z]\w+)", header, re.MULTILINE))


def _compile(library: Path, sources: Sequence[Path], options: Sequence[str]) -> None:
    command = [compiler_name(), "-std=c++17", "-O0", "-shared", "-fPIC", *map(str, sources), *options]
    command += [f"-Wl,-soname,{library.name}", "-o", str(library)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(
            f"the C++ compiler cannot be run: {error}", hint="install g++, or set CXX", stage=STAGE
        ) from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()[:1]
        raise BuildError(
            f"the stand-in for CUDA's libraries cannot be compiled: {(errors or [''])[0][:400]}",
            hint="CUDA_HOME may name a toolkit of another CUDA version than torch's",
            stage=STAGE,
        )


def _runtime_library() -> Path:
    """The CUDA runtime that this process has loaded with torch. Raises BuildError where there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if Path(path).name.startswith("libcudart.so"):
            return Path(path).with_name(_soname(Path(path).name))
    import torch

    raise BuildError(
        f"torch {torch.__version__} has no CUDA: it cannot compile for a GPU",
        hint="install torch's CUDA build, which needs no GPU to compile: `pip install torch`",
    )


def _soname(name: str) -> str:
    """`libcudart.so.13` of `libcudart.so.13.0.96`."""
    return ".".join(name.split(".")[:3])


_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h", "nv/target")
"""Of CUDA's headers, one from each package that code for a GPU includes: the runtime, its compiler's, and CCCL."""

TOOLKIT = Path("/usr/local/cuda")


def cuda_home() -> Path:
    """The folder of a CUDA toolkit, or that of CUDA's wheels, with all headers that are needed. Raises BuildError."""
    found = [*_as_torch_looks(), TOOLKIT, _runtime_library().parents[1]]
    complete = [home for home in found if all((home / "include" / name).exists() for name in _HEADERS)]
    if complete:
        return complete[0]
    raise BuildError(
        f"CUDA's headers ({', '.join(_HEADERS)}) are not all in one of {', '.join(map(str, dict.fromkeys(found)))}",
        hint="run `pip install nvidia-cuda-crt nvidia-cuda-cccl` of torch's CUDA version, or set CUDA_HOME to the "
        "folder of a CUDA toolkit",
        stage=STAGE,
    )


def _as_torch_looks() -> list[Path]:
    """The first folder that torch takes for a toolkit's, if there is any (torch.utils.cpp_extension)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    return [Path(home)] if home else [Path(nvcc).parents[1]] if nvcc else []


def build_variables(folder: Path) -> dict[str, str]:
    """Variables by which a unit's compilers find CUDA's headers and the stand-ins."""
    home = cuda_home()
    variables = {
        "TRITON_LIBCUDA_PATH": str(folder),
        "LIBRARY_PATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("LIBRARY_PATH")))),
        "CUDA_VISIBLE_DEVICES": "0",
    }
    return variables if home in _as_torch_looks() else {**variables, "CUDA_HOME": str(home)}
