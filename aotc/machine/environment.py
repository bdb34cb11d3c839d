"""What this machine is: `aotc.machine.compatibility` says whether an artifact runs on it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import sys
from pathlib import Path
from typing import Literal

import torch

from aotc.errors import EnvironmentMismatchError
from aotc.records import Environment

Compat = Literal["minor", "abi"]
"""Which torch may run an artifact: one of the same major.minor, or one whose C shim has what the code calls."""


_CPUID = {
    **{name: name for name in ("avx", "avx2", "bmi2", "f16c", "avx512_vnni", "avx512_bf16")},
    **{name: name for name in ("amx_tile", "amx_int8", "amx_bf16")},
    **{f"avx512_{name}": f"avx512{name}" for name in ("f", "bw", "cd", "dq", "vl")},
    "bmi": "bmi1",
    "fma3": "fma",
    "lzcnt": "abm",
}
"""What torch reads from CPUID, in the names of `torch.cpu.get_capabilities` → those of `/proc/cpuinfo`."""


@functools.cache
def cpu_features() -> frozenset[str]:
    """The CPU features that code in this process may use: without AMX where the kernel refuses its tiles.

    Linux gives tiles only to a process that has asked for them (`ARCH_REQ_XCOMP_PERM` in `man 2 arch_prctl`); without,
    an AMX instruction ends it. This function asks; the answer counts for all of the process's threads, and for what is
    forked from it.
    """
    # An emulator or a mask of CPUID leaves /proc/cpuinfo as it is.
    denied = {_CPUID[name] for name, here in torch.cpu.get_capabilities().items() if name in _CPUID and not here}
    found = _cpu_flags() - denied
    if "amx_tile" in found and not torch.cpu._init_amx():
        return frozenset(flag for flag in found if not flag.startswith("amx"))
    return found


def _cpu_flags() -> frozenset[str]:
    """The feature flags of `/proc/cpuinfo`, empty where there is none. Of the first CPU: there may be hundreds."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def glibc_version() -> str:
    """`2.36`, or "" where the C library is another."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (AttributeError, OSError, ValueError):
        return ""
    return version if name == "glibc" else ""


@functools.cache
def libstdcxx_versions() -> tuple[str, ...]:
    """The newest version that the loaded libstdc++ has of each family of symbols: `CXXABI_1.3.13`, `GLIBCXX_3.4.30`.

    Empty where there is none. A library has a symbol of the name of each version, at address 0, and none is left out.
    """
    try:
        library, here = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        find, error = here.dlvsym, here.dlerror
    except (OSError, AttributeError):
        return ()
    error.restype = ctypes.c_char_p

    def has(version: str) -> bool:
        error()
        find(ctypes.c_void_p(library._handle), version.encode(), version.encode())
        return error() is None

    found = []
    for family in ("CXXABI_1.3", "GLIBCXX_3.4"):
        names = (f"{family}.{number}" for number in itertools.count(1))
        found += [*itertools.takewhile(has, names)][-1:]
    return tuple(found)


def refuse_free_threading() -> None:
    """Raises EnvironmentMismatchError where Python's threads run without the global lock.

    What several of them do to one compiled module was never tested so.
    """
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise EnvironmentMismatchError(
            f"this Python {platform.python_version()} runs free-threaded, without the global interpreter lock",
            hint="start it with PYTHON_GIL=1 or `python -X gil=1`, or use a Python that is not free-threaded; calls of "
            "compiled code release the lock, so threads run side by side with it",
        )


def this_environment(device: torch.device | str = "cpu") -> Environment:
    """This machine; the GPU fields are those of `device`, filled only where it is a CUDA device."""
    device = torch.device(device)
    gpu = device.type == "cuda" and torch.cuda.is_available()
    capability = torch.cuda.get_device_capability(device) if gpu else None
    return Environment(
        os=sys.platform,
        machine=platform.machine(),
        torch=str(torch.__version__),
        libc=glibc_version(),
        libstdcxx=libstdcxx_versions(),
        cpu_features=tuple(sorted(cpu_features())),
        cuda_capability=f"{capability[0]}.{capability[1]}" if capability else "",
        cuda=torch.version.cuda or "",
        gpu=torch.cuda.get_device_name(device) if gpu else "",
    )


def numbers(version: str, count: int) -> tuple[int, ...]:
    parts = [*version.split("+")[0].split("."), *["0"] * count][:count]
    return tuple(int("".join(c for c in part if c in "0123456789")[:9] or 0) for part in parts)
