"""The modes of the process that a capture bakes in: autocast, default dtype, TF32 and others; and what forward asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aotc.reads.tensors import dtype_name
from aotc.records import Ambient, Scalar


def mode_readers(device: str) -> dict[str, Callable[[], Any]]:
    """A reader for each mode of this thread on which code for torch device type `device` depends, as in `Ambient`.

    A record holds a dtype by its name, and `num_threads` only where code was compiled for so many.
    """
    is_autocast, autocast_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return {
        "autocast": lambda: autocast_dtype(device) if is_autocast(device) else None,
        "default_dtype": torch.get_default_dtype,
        "float32_matmul_precision": matmul_precision,
        "deterministic": torch.are_deterministic_algorithms_enabled,
        "num_threads": torch.get_num_threads,
    }


ASKED: dict[str, Callable[[], Scalar]] = {
    "grad": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "device": lambda: default_device(),
}
"""A reader for each mode that a forward may ask for. A call is compared only by those that its forward asked for."""

OF_STATE = "requires_grad of "
"""Asked of a parameter or buffer: the name follows."""
OF_INPUT = "requires_grad"
"""Asked of an input, or of what is computed from inputs."""


def default_device() -> str:
    """The kind of device on which tensors are made that are given none, as `torch.set_default_device` sets it, or a
    `with torch.device(…)`: both are modes that see each function of torch's."""
    return torch.get_default_device().type if torch._C._len_torch_function_stack() else "cpu"


def take_ambient(device: str) -> Ambient:
    """The modes of this thread, except `num_threads`, that compiled code for torch device type `device` depends on."""
    now: dict[str, Any] = {name: read() for name, read in mode_readers(device).items() if name != "num_threads"}
    now |= {name: dtype_name(mode) for name, mode in now.items() if isinstance(mode, torch.dtype)}
    return Ambient(**now)


def matmul_precision() -> str:
    """`highest`, `high`, `medium`, or `mixed` where it was set for each backend, which torch refuses to sum up."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "mixed"


def ambient_here(device: str) -> dict[str, str | None]:
    """The modes of torch that this call is made in, as a manifest says those that are not torch's default."""
    found: dict[str, str | None] = {}
    if torch.is_autocast_enabled(device):
        found["autocast"] = dtype_name(torch.get_autocast_dtype(device))
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        found["float32_matmul_precision"] = precision
    return found
