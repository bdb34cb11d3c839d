"""Graphs go before their process group does.

NCCL waits, when a communicator is destroyed, for the CUDA graphs that hold its collectives: `destroy_process_group`
would wait for ever for those of compiled code that is still there. So it lets go of them first.
"""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import Any, Protocol

import torch.distributed as dist

from aotc.runtime.parallel.ranks import forget


class Releasable(Protocol):
    def release(self) -> None: ...


_held: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []


def released_with(group: Any, call: Releasable) -> None:
    """Release `call` when the group is destroyed, or the process ends."""
    _wrap()
    _held[:] = [pair for pair in _held if pair[1]() is not None]
    _held.append((weakref.ref(group), weakref.ref(call)))


def release_all(group: Any = None) -> None:
    """Release what was loaded with the group; with None, all."""
    for known, call in list(_held):
        if (group is None or known() is group) and (one := call()) is not None:
            one.release()
    forget(group)


@functools.cache
def _wrap() -> None:
    """Wrap `torch.distributed.destroy_process_group`, once in a process."""
    destroy: Any = dist.destroy_process_group

    @functools.wraps(destroy)
    def destroy_released(group: Any = None) -> None:
        release_all(None if group is None or group is dist.group.WORLD else group)
        destroy(group)

    for module in (dist, dist.distributed_c10d):
        module.destroy_process_group = destroy_released  # type: ignore[attr-defined]
    atexit.register(release_all)
