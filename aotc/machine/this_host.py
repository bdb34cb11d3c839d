"""What this machine is, as far as that is known without torch: `aotc.machine.environment` says the rest."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import platform
import sys
from pathlib import Path
from typing import Literal

from aotc.errors import EnvironmentMismatchError

Compat = Literal["minor", "abi"]
"""Which torch may run an artifact: one of the same major.minor, or one whose C shim has what the code calls."""


def cpu_flags() -> frozenset[str]:
    """The features of this CPU in Linux's names: the flags of `/proc/cpuinfo`, empty where there is none.

    On aarch64 those that the kernel tells each process; with SVE, the length of its vectors in bits is added, as
    `sve256`.
    """
    if platform.machine() == "aarch64":
        from aotc.machine.hwcap import aarch64_flags

        return aarch64_flags()
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as lines:
            first = next((line for line in lines if line.startswith("flags")), "")  # CPU, of hundreds
            return frozenset(first.partition(":")[2].split())
    except OSError:
        return frozenset()


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


def numbers(version: str, count: int) -> tuple[int, ...]:
    parts = [*version.split("+")[0].split("."), *["0"] * count][:count]
    return tuple(int("".join(c for c in part if c in "0123456789")[:9] or 0) for part in parts)
