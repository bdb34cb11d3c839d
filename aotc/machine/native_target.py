"""The targets of this machine, and the interface of its Python."""

from __future__ import annotations

import platform
import sysconfig

import torch

from aotc.errors import EnvironmentMismatchError
from aotc.machine.environment import cpu_features
from aotc.machine.targets import below_all_targets, best_cpu_target, cuda_target


def native_target(device: str = "cpu") -> str:
    """The most capable target of this machine. Raises EnvironmentMismatchError where there is none."""
    if device == "cuda":
        if not torch.cuda.is_available():
            raise EnvironmentMismatchError(
                "the target is a CUDA GPU, and torch sees none here",
                hint="to build without a GPU, name its architecture, like cuda:sm_90; to use one, torch's CUDA build "
                f"and NVIDIA's driver are needed; torch here is {torch.__version__}",
            )
        return cuda_target(torch.cuda.get_device_capability())
    target = best_cpu_target(cpu_features())
    if target is None:
        raise EnvironmentMismatchError(
            f"no target is for this CPU ({platform.machine()}): {below_all_targets(platform.machine())}",
            hint="aotc compiles for x86-64 CPUs with AVX2, for Armv8.2 and newer, and for CUDA GPUs",
        )
    return target


def resolve_target(name: str) -> str:
    """`native` is this machine's GPU where torch sees one, else its CPU; `cuda` its GPU. A GPU's host that is of this
    machine's architecture is left out. Other names stay."""
    if name == "native":
        return native_target("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda":
        return native_target("cuda")
    return name.removesuffix(f"@{platform.machine()}")


def python_abi() -> str:
    """What an extension of this Python is compiled for: `cpython-313-x86_64-linux-gnu`."""
    return str(sysconfig.get_config_var("SOABI"))
