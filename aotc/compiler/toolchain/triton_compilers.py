"""Inductor's processes that compile Triton kernels in parallel to the process that lowers the graph.

Without them the candidates of a race are compiled by threads of one process, which share Python's lock. They need
seconds to start, so they are started before the model is built, and the first race waits for them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

STARTING = 60.0
"""Seconds after which races continue without these processes."""

_log = logging.getLogger("aotc")


def begin_triton_compilers(options: Mapping[str, Any], *, absent_gpu: bool = False) -> None:
    """Start the processes in the background, with these options of Inductor, and make this process use their `ptxas`.

    For a GPU that is absent there are none, as they look for a GPU: kernels are compiled by this process.

    In torch 2.11 they use the `ptxas` that comes with torch, if there is one, but their parent uses Triton's. Keys of
    Triton's cache contain the assembler's version: the parent would find none of their kernels, and compile each
    candidate of a race again, one after the other.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()
    if absent_gpu:
        config.compile_threads = 1
        return
    with config.patch(dict(options)):
        AsyncCompile.use_process_pool()  # type: ignore[no-untyped-call]


@functools.cache
def wait_for_triton_compilers() -> None:
    """Return when the processes have started or failed to; at once if they were not begun, or at a second call."""
    from torch._inductor.async_compile import AsyncCompile

    ready = AsyncCompile._ready_future
    if ready is not None and wait([ready], STARTING).not_done:
        _log.warning("Inductor's compile processes have not started within %.0f s", STARTING)
