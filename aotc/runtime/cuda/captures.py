"""Captures by the caller: a load is refused within one, a call is recorded."""

from __future__ import annotations

from typing import Any

import torch

from aotc.call_table.dispatch import Plan
from aotc.errors import BindError, LibraryError
from aotc.machine.cuda_capture import is_captured
from aotc.records import bucket_name
from aotc.runtime.state.call_state import State
from aotc.runtime.variant import Attached


def refuse_captures(device: torch.device, model: str) -> None:
    """Raises BindError while a CUDA graph is captured."""
    if torch.cuda.is_initialized() and is_captured(device):  # type: ignore[no-untyped-call]
        raise BindError(
            f"`{model}` cannot be loaded while a CUDA graph is captured",
            hint="load it, and call it once, before the capture",
        )


def run_captured(attached: Attached, leaves: list[Any], state: State, plan: Plan, given: list[Any]) -> Any:
    """Run while the caller records a CUDA graph: directly, as a graph of ours cannot be launched into another one.

    Raises LibraryError before anything is launched where that could not be recorded.
    """
    if not attached.has_run:
        raise LibraryError(
            f"the first call of bucket {bucket_name(attached.variant.bucket)} was made while a CUDA graph is captured, "
            "and loads kernels, which no capture can hold",
            hint="call it once with such arguments before the capture, on the stream that is captured",
        )
    try:
        return attached.run(leaves, state, plan, given, attached.direct)
    except LibraryError as error:
        raise LibraryError(
            f"{error.message}; a CUDA graph is captured around this call",
            hint="a model that waits for the GPU or calls a CPU operator cannot be captured: call it outside",
        ) from error
