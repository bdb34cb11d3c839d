"""Targets: what code is for. `cpu:x86-64-v3`, `cpu:x86-64-v4`, `cpu:amx`, `cuda:sm_90`.

The CPU levels are those of the x86-64 psABI (gitlab.com/x86-psABIs/x86-64-ABI, section "Micro-Architecture Levels"),
with the names that Linux gives the features in `/proc/cpuinfo`; `cpu:amx` adds what Inductor's AMX kernels use.
"""

from __future__ import annotations

import re

import msgspec

_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = (*_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


class CpuLevel(msgspec.Struct, frozen=True):
    """A kind of CPU: the features that its code needs, and how code for it is asked for: the C++ compiler's `-march`,
    and the class of vector instructions in `torch._inductor.cpu_vec_isa`."""

    features: tuple[str, ...]
    march: str
    vectors: str


CPU_LEVELS = {
    "cpu:amx": CpuLevel(_AMX, "x86-64-v4", "VecAMX"),
    "cpu:x86-64-v4": CpuLevel(_V4, "x86-64-v4", "VecAVX512"),
    "cpu:x86-64-v3": CpuLevel(_V3, "x86-64-v3", "VecAVX2"),
}
"""Every CPU target, the most capable first. The table of GPUs is in `aotc.machine.gpus`."""

CPU_FEATURES = {name: level.features for name, level in CPU_LEVELS.items()}
"""Target → the CPU features that its code needs; the most capable first."""

_CUDA = re.compile(r"cuda:sm_(?P<number>[0-9]{2,3})")


class Target(msgspec.Struct, frozen=True):
    """A resolved target: `name`, the torch device type `device`, and for a GPU its compute `capability` ("9.0")."""

    name: str
    device: str
    cpu_features: tuple[str, ...] = ()
    capability: str = ""


def parse_target(name: str) -> Target:
    """Raises ValueError for a name that is not a resolved target (`native` and `cuda` are resolved before)."""
    if name in CPU_FEATURES:
        return Target(name, "cpu", cpu_features=CPU_FEATURES[name])
    if match := _CUDA.fullmatch(name):
        number = match["number"]
        return Target(name, "cuda", capability=f"{number[:-1]}.{number[-1]}")
    raise ValueError(f"`{name}` is not a target")


def best_cpu_target(features: frozenset[str] | set[str] | tuple[str, ...]) -> str | None:
    """The most capable CPU target that a machine with these features runs, or None below x86-64-v3."""
    return next((name for name, needed in CPU_FEATURES.items() if set(needed) <= set(features)), None)


def cuda_target(capability: tuple[int, int]) -> str:
    return f"cuda:sm_{capability[0]}{capability[1]}"
