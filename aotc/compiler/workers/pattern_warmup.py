"""What Inductor would make anew in each unit's process, made before units are forked: a tenth of a second of each."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch
import torch.hub

_torch_hub: Any = torch.hub  # torch.fx shows its progress with what stands there: tqdm, or nothing
_log = logging.getLogger("aotc")


def make_patterns() -> None:
    """Make the patterns by which Inductor rewrites graphs for a CPU, as its first compile for one would.

    It keeps them for each device that it met. Where NVML knows of GPUs, units may be for those: each makes its own.
    """
    if torch.cuda.is_available():
        return
    try:
        from torch._inductor.fx_passes import joint_graph

        # A progress bar would start a thread, and this process is forked.
        with mock.patch.object(_torch_hub.tqdm, "monitor_interval", 0, create=True):
            joint_graph.lazy_init(torch.device("cpu"))
    except Exception as error:  # of another torch: a unit makes them when it needs them
        _log.debug("Inductor's patterns are left to the units: %s", error)
