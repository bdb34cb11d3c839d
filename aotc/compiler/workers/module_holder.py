"""The modules of a manifest, made once for a whole build where that takes long: while it plans.

A fork of the process that has made them keeps them, and the processes of their units are forked from that one: all
buckets share one copy in memory, and a large model need not be initialised for each of them, twice.

The fork is made in a thread of its own: the threads that compute beside a factory (OpenMP's) belong to the thread that
began them, and a process that was forked from that one would wait for them for ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from aotc.compiler.capture.custom_operators import Registrations
from aotc.compiler.workers.fork_server import ASK_NVML
from aotc.compiler.workers.forks import ForkServers, Holder
from aotc.manifest import Manifest
from aotc.models.factory import build_modules, made_before
from aotc.snapshot import named_state, take_ambient

WORTH = 3.0
"""Seconds from which on a module is kept: the process that keeps it imports the compiler, which takes about as long."""

CHOSEN_KERNELS = "ATEN_CPU_CAPABILITY"
"""What torch's own kernels may use, read once in a process: units are made without it."""


def modules_made_once(manifest: Manifest, servers: ForkServers) -> dict[str, nn.Module]:
    """Every model's module; a process is forked that keeps those which took long to make, for their units."""
    made = make_modules(manifest)
    servers.holder = hold(made)
    return made.modules


class MadeModules(NamedTuple):
    """The modules by model; which of them took long to make, and may be kept; what making them has registered."""

    modules: dict[str, nn.Module]
    long: tuple[str, ...]
    registrations: Registrations


def make_modules(manifest: Manifest) -> MadeModules:
    """Call every factory of the manifest. Raises what `build_modules` does."""
    seconds: dict[str, float] = {}
    registrations = Registrations()
    thread, process = _state_of_thread(), _state_of_process()
    with _asking_nvml(), registrations.watched():
        modules = build_modules(manifest, seconds)
    alone = (_state_of_thread(), _state_of_process()) == (thread, process)
    # What one factory sets for its process is not for the units of other models.
    long = [name for name in modules if seconds[name] >= WORTH and not _is_shared(modules[name])] if alone else []
    if long:
        registrations.take_down()
    return MadeModules(modules, tuple(long), registrations)


@contextmanager
def _asking_nvml() -> Iterator[None]:
    """Let what asks for GPUs meanwhile not initialise CUDA, which no fork could use then."""
    absent = ASK_NVML not in os.environ
    os.environ.setdefault(ASK_NVML, "1")
    try:
        yield
    finally:
        if absent:
            os.environ.pop(ASK_NVML, None)


def hold(made: MadeModules) -> Holder | None:
    """A process that keeps those which took long to make; None where there are none, no process could use them, or the
    system refuses one of this size."""
    spoilt = torch.cuda.is_initialized() or CHOSEN_KERNELS in os.environ  # type: ignore[no-untyped-call]
    if not made.long or sys.platform != "linux" or spoilt:
        return None
    # In the fork, and so in what is forked from it. Here the question does not arise again.
    with (
        suppress(OSError),
        mock.patch.dict(made_before, {name: made.modules[name] for name in made.long}),
        mock.patch.object(Registrations, "before", made.registrations),
    ):
        return Holder(made.long)
    return None


def _state_of_thread() -> tuple[Any, ...]:
    """What torch keeps for each thread, and a factory may set for what comes after it."""
    devices = ("cpu", "cuda")
    smallest = torch.tensor(5e-324, dtype=torch.float64, device="cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
        bool(smallest * 1),  # False where such numbers are flushed, when they would be equal to 0, too
    )


def _state_of_process() -> tuple[Any, ...]:
    """What a factory may set for its whole process, and the threads that it may leave."""
    return take_ambient("cpu"), take_ambient("cuda"), torch.get_num_threads(), threading.active_count()


def _is_shared(module: nn.Module) -> bool:
    """Whether processes that were forked from this one would write into one memory."""
    return any(tensor.is_shared() for tensor in named_state(module).values())  # type: ignore[no-untyped-call]
