"""The C++ compiler of a build: for this machine `$CXX`, else `g++`; for another architecture GCC's cross compiler.

A cross compiler is found by the name that Debian, Ubuntu and Fedora give it, `aarch64-linux-gnu-g++`. It brings the C
and C++ libraries of its architecture. `$CXX` is not asked: it is for this machine.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess

NOT_RUN = "cannot be run"
_CROSS = "-linux-gnu-g++"


def is_foreign(machine: str) -> bool:
    """Whether `machine`, as of `platform.machine()`, is another architecture than this one's; "" is this one."""
    return machine not in ("", platform.machine())


def compiler_name(machine: str = "") -> str:
    """The compiler's name for an architecture, as of `platform.machine()`; "" is this machine's."""
    return f"{machine}{_CROSS}" if is_foreign(machine) else os.environ.get("CXX", "g++")


def is_cross_compiler(name: str) -> bool:
    machine = name.removesuffix(_CROSS)
    return machine != name and is_foreign(machine)


def has_cross_compiler(machine: str) -> bool:
    return shutil.which(compiler_name(machine)) is not None


def how_to_install(machine: str) -> str:
    """A hint: what to install, by name, to compile for another architecture."""
    return f"install {machine}'s cross compiler, on Debian and Ubuntu `apt-get install g++-{machine}-linux-gnu`"


@functools.cache
def compiler_version(machine: str = "") -> str:
    """The first line of `--version` of the C++ compiler, or a text that says that it cannot be run."""
    name = compiler_name(machine)
    try:
        shown = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return f"{name}: {NOT_RUN}"
    # The program's own name comes first and may be a path.
    return shown.partition("\n")[0].partition(" ")[2]
