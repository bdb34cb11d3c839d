"""Inductor's processes that compile Triton kernels beside the one that lowers the graph.

Without them the candidates of a race are compiled by threads of one process, which take turns in Python. They need
seconds to start, so they begin before the model is built, and the first race waits for them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

STARTING = 60.0
"""Seconds after which races go on without them."""

_log = logging.getLogger("aotc")


def begin_triton_compilers(options: Mapping[str, Any]) -> None:
    """Start them with these options of Inductor's, in the background, and have this process assemble as they do.

    In torch 2.11 they take the `ptxas` that comes with torch, where there is one, and the process that asks them takes
    Triton's. What a kernel is cached under names the assembler's version: this process would find none of theirs, and
    compile each candidate of a race again, one after the other.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    with config.patch(dict(options)):
        AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]


@functools.cache
def wait_for_triton_compilers() -> None:
    """Return when they have started, or cannot; at once where they have never been begun, or have been waited for."""
    from torch._inductor.async_compile import AsyncCompile

    ready = AsyncCompile._ready_future
    if ready is not None and wait([ready], STARTING).not_done:
        _log.warning("Inductor's compile processes have not started within %.0f s", STARTING)
