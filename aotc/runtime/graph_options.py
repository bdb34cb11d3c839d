"""How the variants of a model are launched on a GPU."""

from __future__ import annotations

from typing import Literal

import msgspec

OutputMode = Literal["copy", "view"]


class GraphOptions(msgspec.Struct, frozen=True):
    """How a callable uses CUDA graphs: which launches (the build's picks, or all, or none), when, and its outputs."""

    use: Literal["picked", "always", "never"] = "picked"
    capture: Literal["eager", "lazy"] = "eager"
    outputs: OutputMode = "copy"
