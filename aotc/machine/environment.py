"""What this machine is, and whether an artifact can run on it.

The rule (`mismatches`) compares what an artifact's code needs with what is here, and gives every mismatch at once, each
with both values and a hint:

- operating system and architecture: equal.
- CPU features: all that the target needs are here (FACTS of the hardware: a missing one ends in SIGILL).
- frozen weights on a CPU: oneDNN packed them for one CPU level, so the level must be equal, not only sufficient.
- glibc: at least the version whose symbols the libraries use.
- torch: the same major.minor. AOTInductor's C interface is meant to be stable, but nothing in torch checks it.
- CUDA: the same compute capability, or, where the artifact carries PTX, a higher one; torch's CUDA of the same major.
"""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path

import torch

from aotc.errors import EnvironmentMismatchError, Issue
from aotc.machine.targets import best_cpu_target, cuda_target, parse_target
from aotc.records import Artifact, Environment


@functools.cache
def cpu_features() -> frozenset[str]:
    """What code may use of the CPU in this process: its features, without AMX where the kernel refuses its tiles.

    Linux gives tiles only to a process that has asked for them (`ARCH_REQ_XCOMP_PERM` in `man 2 arch_prctl`); without,
    an AMX instruction ends it. This function asks; the answer counts for all of the process's threads, and for what is
    forked from it.
    """
    found = _cpu_flags()
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
        cpu_features=tuple(sorted(cpu_features())),
        cuda_capability=f"{capability[0]}.{capability[1]}" if capability else "",
        cuda=torch.version.cuda or "",
        gpu=torch.cuda.get_device_name(device) if gpu else "",
    )


def native_target(device: str = "cpu") -> str:
    """The most capable target of this machine. Raises EnvironmentMismatchError where there is none."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentMismatchError(
                "the target is a CUDA GPU, and torch sees none here",
                hint=f"torch is {torch.__version__}; a GPU build and a driver are needed, or target `native`",
            )
        return cuda_target(torch.cuda.get_device_capability())
    target = best_cpu_target(cpu_features())
    if platform.machine() not in ("x86_64", "AMD64") or target is None:
        raise EnvironmentMismatchError(
            f"this CPU ({platform.machine()}) is below the oldest target, cpu:x86-64-v3",
            hint="aotc compiles for x86-64 CPUs with AVX2 and for CUDA GPUs",
        )
    return target


def resolve_target(name: str) -> str:
    """`native` is this machine's GPU where torch sees one, else its CPU; `cuda` its GPU; other names stay."""
    if name == "native":
        return native_target("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        return native_target("cuda")
    return name


def _numbers(version: str, count: int) -> tuple[int, ...]:
    parts = [*version.split("+")[0].split("."), *["0"] * count][:count]
    return tuple(int("".join(c for c in part if c in "0123456789")[:9] or 0) for part in parts)


def mismatches(artifact: Artifact, here: Environment) -> list[Issue]:
    """Every reason why the artifact cannot run in `here`; empty where it can."""
    needed = artifact.environment
    return [
        *_platform_issues(needed, here),
        *_cpu_issues(artifact, here),
        *_torch_issues(needed, here),
        *(_cuda_issues(needed, here) if needed.cuda_capability else ()),
    ]


def _platform_issues(needed: Environment, here: Environment) -> list[Issue]:
    issues = [
        Issue(
            f"built for {label} {expected}, this machine is {actual}",
            expected=expected,
            actual=actual,
            hint=f"build on, or for, {actual}",
        )
        for label, expected, actual in (
            ("operating system", needed.os, here.os),
            ("architecture", needed.machine, here.machine),
        )
        if expected != actual
    ]
    if needed.libc and _numbers(here.libc or "0", 2) < _numbers(needed.libc, 2):
        issues.append(
            Issue(
                f"its libraries need glibc {needed.libc}, here is {here.libc or 'another C library'}",
                expected=needed.libc,
                actual=here.libc,
                hint="build on the oldest distribution that you run on",
            )
        )
    return issues


def _cpu_issues(artifact: Artifact, here: Environment) -> list[Issue]:
    missing = sorted(set(artifact.environment.cpu_features) - set(here.cpu_features))
    best = best_cpu_target(here.cpu_features)
    if missing:
        add = f"add `{best}` to the model's targets" if best else "this CPU is below the oldest target"
        refused = "; where /proc/cpuinfo has them, the kernel refuses AMX to this process"
        return [
            Issue(
                f"built for {artifact.target}, this CPU has no {', '.join(missing)}",
                expected=" ".join(artifact.environment.cpu_features),
                actual=best or "below x86-64-v3",
                hint=add + (refused if "amx_tile" in missing else ""),
            )
        ]
    if artifact.weights == "frozen" and artifact.target.startswith("cpu:") and best != artifact.target:
        return [
            Issue(
                f"its frozen weights are packed for {artifact.target}, this CPU is {best}",
                expected=artifact.target,
                actual=best or "",
                hint="build frozen weights on the kind of CPU that serves them, or use `weights: live`",
            )
        ]
    return []


def _torch_issues(needed: Environment, here: Environment) -> list[Issue]:
    if _numbers(needed.torch, 2) == _numbers(here.torch, 2):
        return []
    return [
        Issue(
            f"built with torch {needed.torch}, this process has torch {here.torch}",
            expected=needed.torch,
            actual=here.torch,
            hint="rebuild with the service's torch; an artifact is good for one major.minor version",
        )
    ]


def _cuda_issues(needed: Environment, here: Environment) -> list[Issue]:
    if not here.cuda_capability:
        return [
            Issue(
                f"built for a GPU of capability {needed.cuda_capability}, torch {here.torch} sees no CUDA GPU here",
                expected=needed.cuda_capability,
                hint="check the driver and CUDA_VISIBLE_DEVICES, or build the model for a CPU target too",
            )
        ]
    issues = []
    built, actual = _numbers(needed.cuda_capability, 2), _numbers(here.cuda_capability, 2)
    if built != actual and not (needed.ptx and actual > built):
        here_target = parse_target(cuda_target((actual[0], actual[1]))).name
        issues.append(
            Issue(
                f"built for {cuda_target((built[0], built[1]))}, this GPU ({here.gpu}) is {here_target}",
                expected=needed.cuda_capability,
                actual=here.cuda_capability,
                hint=f"build on such a GPU with `{here_target}` among the model's targets",
            )
        )
    if _numbers(needed.cuda, 1) != _numbers(here.cuda or "0", 1):
        issues.append(
            Issue(
                f"built with torch for CUDA {needed.cuda}, this torch is for CUDA {here.cuda or 'none'}",
                expected=needed.cuda,
                actual=here.cuda,
                hint="use torch builds of one CUDA major version",
            )
        )
    return issues
