"""The modules of a manifest, made once for a whole build where that takes long: while it plans.

A fork of the process that has made them keeps them, and the processes of their units are forked from that one: all
buckets share one copy in memory, and a large model need not be initialised for each of them, twice.

They are made in a thread of their own. The threads that compute beside it (OpenMP's) belong to the thread that began
them, so a process that was forked from that one would wait for them for ever; the main thread has begun none. Nor does
that thread end: a fork while they end finds MKL's allocator half changed.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import nn

from aotc.compiler.capture.custom_operators import Registrations
from aotc.compiler.workers.fork_server import ASK_NVML
from aotc.compiler.workers.forks import ForkServers, Holder
from aotc.errors import ManifestError
from aotc.manifest import Manifest
from aotc.models.factory import build_modules, made_before
from aotc.snapshot import named_state, take_ambient

T = TypeVar("T")

WORTH = 3.0
"""Seconds from which on a module is kept: the process that keeps it imports the compiler, which takes about as long."""

CHOSEN_KERNELS = "ATEN_CPU_CAPABILITY"
"""What torch's own kernels may use, read once in a process: units are made without it."""

INTERRUPTED_SECONDS = 10.0
"""How long a factory may go on after Ctrl-C."""


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
    before = _state_of_thread()

    def make() -> tuple[dict[str, nn.Module], Any, bool]:
        process = _state_of_process()
        with registrations.watched():
            modules = build_modules(manifest, seconds)
        return modules, _state_of_thread(), _state_of_process() == process

    with _asking_nvml():
        try:
            modules, after, alone = _in_a_thread(make)
        except ManifestError as error:
            if not re.search(r"\bthread\b", str(error)):
                raise
            after = None  # it would be made in the main thread, like what handles signals
        if after != before:
            return MadeModules(build_modules(manifest), (), registrations)
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
    # In the fork, and so in what is forked from it. Here nobody asks any more.
    with (
        suppress(OSError),
        mock.patch.dict(made_before, {name: made.modules[name] for name in made.long}),
        mock.patch.object(Registrations, "before", made.registrations),
    ):
        return Holder(made.long)
    return None


def _in_a_thread(function: Callable[[], T]) -> T:
    """What the function gives, or raises, in a thread that stays when it has ended. Ctrl-C interrupts the function."""
    found: list[T] = []
    raised: list[BaseException] = []
    begun, done = threading.Event(), threading.Event()

    def run() -> None:
        try:
            begun.set()
            found.append(function())
        except BaseException as error:
            raised.append(error)
        done.set()
        threading.Event().wait()

    thread = threading.Thread(target=run, name="factories", daemon=True)
    try:
        thread.start()  # which waits until it runs: an interrupt may come meanwhile
        done.wait()
    except KeyboardInterrupt as interrupt:
        begun.wait(INTERRUPTED_SECONDS)
        kind = ctypes.py_object(type(interrupt))
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), kind)
        done.wait(INTERRUPTED_SECONDS)  # ended within C++, it would take the process with it
        raise
    for error in raised:
        raise error
    return found[0]


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
        (smallest * 1).item(),  # 0 where such numbers are flushed
    )


def _state_of_process() -> tuple[Any, ...]:
    """What a factory may set for its whole process, and the threads that it may leave."""
    return take_ambient("cpu"), take_ambient("cuda"), torch.get_num_threads(), threading.active_count()


def _is_shared(module: nn.Module) -> bool:
    """Whether processes that were forked from this one would write into one memory."""
    return any(tensor.is_shared() for tensor in named_state(module).values())  # type: ignore[no-untyped-call]
