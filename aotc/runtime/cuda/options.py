"""How the variants of a model are launched on a GPU."""

from __future__ import annotations

from typing import Literal

import msgspec
import torch

from aotc.errors import BindError
from aotc.machine.cuda_capture import is_captured

OutputMode = Literal["copy", "view"]


class GraphOptions(msgspec.Struct, frozen=True):
    """How a callable uses CUDA graphs: which launches (the build's picks, or all, or none), when, and its outputs."""

    use: Literal["picked", "always", "never"] = "picked"
    capture: Literal["eager", "lazy"] = "eager"
    outputs: OutputMode = "copy"


def refuse_captures(device: torch.device, model: str) -> None:
    """Raises BindError while a CUDA graph is captured."""
    if torch.cuda.is_initialized() and is_captured(device):  # type: ignore[no-untyped-call]
        raise BindError(
            f"`{model}` cannot be loaded while a CUDA graph is captured",
            hint="load it, and call it once, before the capture",
        )
