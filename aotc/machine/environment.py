"""What this machine is: `aotc.machine.compatibility` says whether an artifact runs on it."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from pathlib import Path

import torch

from aotc.machine.this_host import cpu_flags, glibc_version, libstdcxx_versions
from aotc.records import Environment

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
    found = cpu_flags() - denied
    if "amx_tile" in found and not torch.cpu._init_amx():
        return frozenset(flag for flag in found if not flag.startswith("amx"))
    return found


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


@functools.cache
def torch_library() -> ctypes.CDLL:
    """torch's own library for CPUs, which compiled code calls."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
