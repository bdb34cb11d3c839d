"""This machine, and the extension `aotc.core._cpu`, without torch."""

from __future__ import annotations

import ctypes
import functools
import importlib
import platform
import sys
from typing import Any

from aotc.errors import LibraryError
from aotc.machine.this_host import cpu_flags, glibc_version, libstdcxx_versions
from aotc.records import Environment

_NEEDED_FEATURES = {"x86_64": frozenset({"avx2", "bmi2", "fma"})}
"""By architecture, what the extension itself is compiled for; each CPU of the others has it."""
_ARCH_PRCTL, _REQUEST, _TILES = 158, 0x1023, 18
"""The system call, `ARCH_REQ_XCOMP_PERM` and the number of AMX's tiles, of `man 2 arch_prctl`."""


@functools.cache
def open_cpu() -> Any:
    """The module `aotc.core._cpu`. Raises LibraryError where this machine or this installation lacks it."""
    needed = _NEEDED_FEATURES.get(platform.machine(), frozenset())
    if absent := needed - cpu_flags():
        raise LibraryError(
            f"the standalone runtime needs a CPU with {', '.join(sorted(needed))}; this one has no "
            f"{', '.join(sorted(absent))}",
            hint="load it with aotc.load, where torch is installed",
        )
    try:
        return importlib.import_module("aotc.core._cpu")
    except ImportError as error:
        raise LibraryError(
            f"this installation has no standalone runtime: {error}",
            hint=f"install a wheel of aotc for {platform.machine()} and glibc 2.35 or newer, with libgomp1 beside it; "
            "from a clone, install g++ first, and then aotc again",
        ) from error


def set_num_threads(count: int) -> None:
    """How many threads a call that this thread makes uses, as `torch.set_num_threads`. Raises ValueError below 1."""
    if count < 1:
        raise ValueError(f"{count} threads were asked for, and a call needs one")
    open_cpu().threads(count)


@functools.cache
def usable_features() -> frozenset[str]:
    """The CPU features that code may use: without AMX where the kernel refuses its tiles to this process."""
    found = cpu_flags() - frozenset(open_cpu().absent_features())
    if "amx_tile" in found and ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST, _TILES):
        return frozenset(flag for flag in found if not flag.startswith("amx"))
    return found


def cpu_environment() -> Environment:
    """This machine, as `aotc.machine.environment.this_environment` says it, without a torch."""
    return Environment(
        os=sys.platform,
        machine=platform.machine(),
        torch="",
        libc=glibc_version(),
        libstdcxx=libstdcxx_versions(),
        cpu_features=tuple(sorted(usable_features())),
    )
