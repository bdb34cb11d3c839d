"""Build Inductor's patterns before units are forked: this saves a tenth of a second in each unit."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.hub

from aotc.compiler.scoped import replaced

_torch_hub: Any = torch.hub  # torch.fx shows progress with torch.hub's tqdm
_log = logging.getLogger("aotc")


def make_patterns() -> None:
    """Build the patterns by which Inductor rewrites graphs for a CPU, as its first compile for one would.

    Inductor keeps patterns by device. Where there are GPUs, units may be for those, so each builds its own.
    """
    if torch.cuda.is_available():
        return
    try:
        from torch._inductor.fx_passes import joint_graph

        # A progress bar would start a thread, and this process is forked.
        with replaced(_torch_hub.tqdm, "monitor_interval", 0, create=True):
            joint_graph.lazy_init(torch.device("cpu"))
    except Exception as error:  # another version of torch: each unit builds its own
        _log.debug("Inductor's patterns are left to the units: %s", error)
