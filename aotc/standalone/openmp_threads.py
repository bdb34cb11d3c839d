"""The threads of a call, which are OpenMP's."""

from __future__ import annotations

from aotc.standalone.cpu_environment import open_cpu


def set_num_threads(count: int) -> None:
    """How many threads a call that this thread makes uses, as `torch.set_num_threads`. Raises ValueError below 1."""
    if count < 1:
        raise ValueError(f"{count} threads were asked for, and a call needs one")
    open_cpu().threads(count)
