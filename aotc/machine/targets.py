"""Targets: what code is for. `cpu:x86-64-v3`, `cpu:amx`, `cpu:neon`, `cuda:sm_90`.

Features of a CPU have the names of Linux, as `aotc.machine.this_host` finds them. The levels of x86-64 are those of its
psABI (gitlab.com/x86-psABIs/x86-64-ABI, section "Micro-Architecture Levels"); `cpu:amx` adds what Inductor's AMX
kernels use.
Those of aarch64 are an Armv8.2 without SVE (`cpu:neon`), Neoverse V1 (`cpu:sve256`: Graviton3) and Neoverse V2
(`cpu:sve128`: Grace, Graviton4, Axion). Code for SVE is compiled for one length of its vectors, which no feature of
Linux names: `aotc.machine.this_host` adds `sve128` and the like.
"""

from __future__ import annotations

import re

import msgspec

_V3 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = (*_V4, "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")

_NEON = ("asimd", "asimdrdm", "atomics", "crc32", "fp")
_SVE = (
    *(*_NEON, "asimddp", "asimdhp", "bf16", "fcma", "flagm", "fphp", "i8mm", "ilrcpc", "jscvt", "lrcpc", "sve"),
    *("svebf16", "svei8mm"),
)
_SVE2 = (*_SVE, "flagm2", "frint", "sb", "sve2")


class CpuLevel(msgspec.Struct, frozen=True):
    """A kind of CPU: its architecture, as of `platform.machine()`, the features that its code needs, and how code for
    it is asked for: the C++ compiler's `-march`, and the class of vector instructions in
    `torch._inductor.cpu_vec_isa`, with its number of bits where that class has several."""

    machine: str
    features: tuple[str, ...]
    march: str
    vectors: str
    bits: int | None = None


CPU_LEVELS = {
    "cpu:sve256": CpuLevel("aarch64", (*_SVE, "sve256"), "armv8.4-a+sve+bf16+i8mm", "VecSVE", 256),
    "cpu:sve128": CpuLevel("aarch64", (*_SVE2, "sve128"), "armv9-a+bf16+i8mm", "VecSVE", 128),
    "cpu:neon": CpuLevel("aarch64", _NEON, "armv8.2-a", "VecNEON"),
    "cpu:amx": CpuLevel("x86_64", _AMX, "x86-64-v4", "VecAMX"),
    "cpu:x86-64-v4": CpuLevel("x86_64", _V4, "x86-64-v4", "VecAVX512"),
    "cpu:x86-64-v3": CpuLevel("x86_64", _V3, "x86-64-v3", "VecAVX2"),
}
"""Every CPU target; of each architecture the most capable first. The table of GPUs is in `aotc.machine.gpus`."""

CPU_FEATURES = {name: level.features for name, level in CPU_LEVELS.items()}
"""Target → the CPU features that its code needs; the most capable first."""

_CUDA = re.compile(r"cuda:sm_(?P<number>[0-9]{2,3})(?:@(?P<machine>aarch64|x86_64))?")


class Target(msgspec.Struct, frozen=True):
    """A resolved target: `name`, the torch device type `device`, for a GPU its compute `capability` ("9.0"), and the
    architecture `machine` of the CPU or of the GPU's host, as of `platform.machine()`; "" is the build machine's."""

    name: str
    device: str
    cpu_features: tuple[str, ...] = ()
    capability: str = ""
    machine: str = ""


def parse_target(name: str) -> Target:
    """Raises ValueError for a name that is not a resolved target (`native` and `cuda` are resolved before)."""
    if name in CPU_FEATURES:
        return Target(name, "cpu", cpu_features=CPU_FEATURES[name], machine=CPU_LEVELS[name].machine)
    if match := _CUDA.fullmatch(name):
        number = match["number"]
        return Target(name, "cuda", capability=f"{number[:-1]}.{number[-1]}", machine=match["machine"] or "")
    raise ValueError(f"`{name}` is not a target")


def best_cpu_target(features: frozenset[str] | set[str] | tuple[str, ...]) -> str | None:
    """The most capable CPU target that a machine with these features runs; None below all of them."""
    return next((name for name, needed in CPU_FEATURES.items() if set(needed) <= set(features)), None)


def below_all_targets(machine: str) -> str:
    """How a CPU of an architecture, as of `platform.machine()`, is called that runs no target: `below neon`."""
    oldest = [name for name, level in CPU_LEVELS.items() if level.machine == machine][-1:]
    return f"below {oldest[0].removeprefix('cpu:')}" if oldest else f"a CPU of {machine}"


def cuda_target(capability: tuple[int, int]) -> str:
    return f"cuda:sm_{capability[0]}{capability[1]}"
