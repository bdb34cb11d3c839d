"""Graphs go before their process group does.

NCCL waits, when a communicator is destroyed, for the CUDA graphs that hold its collectives: `destroy_process_group`
would wait for ever for those of compiled code that is still there. So it lets go of them first.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import types
import weakref
from collections.abc import Callable
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
    """Let `torch.distributed.destroy_process_group` release first, once in a process.

    The function itself is changed, so that a name for it that was imported before does the same.
    """
    global _destroy
    found: Any = inspect.unwrap(dist.distributed_c10d.destroy_process_group)
    if found.__code__.co_freevars:  # another library's, by which all go
        _destroy = found
        for module in (dist, dist.distributed_c10d):
            module.destroy_process_group = _released_first  # type: ignore[attr-defined]
    else:
        _destroy = types.FunctionType(found.__code__, found.__globals__, found.__name__, found.__defaults__)
        found.__code__ = _released_first.__code__
    atexit.register(release_all)


def _released_first(group: Any = None) -> None:
    # It runs in the place of torch's code, among the globals of torch's module.
    from aotc.runtime.parallel.graph_release import destroy_released

    destroy_released(group)


_destroy: Callable[[Any], None] = dist.destroy_process_group
"""What `torch.distributed.destroy_process_group` does of its own."""


def destroy_released(group: Any) -> None:
    """Release what was loaded with the group, and destroy it."""
    release_all(None if group is None or group is dist.group.WORLD else group)
    _destroy(group)
