"""Modules of a manifest that are slow to build are built once for the whole build, while it plans.

A fork of the planning process keeps them, and the processes of their units are forked from it: all buckets share one
copy in memory, and a large model is not initialised twice for each of them.

A new thread forks: OpenMP's threads belong to the thread that started them (a factory's), and a fork of that thread
would wait for them for ever.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from aotc.compiler.capture.analysis.custom_operators import Registrations
from aotc.compiler.planning.plan import InspectedModels, inspect_models
from aotc.compiler.scoped import replaced, replaced_items
from aotc.compiler.workers.fork_server import ASK_NVML
from aotc.compiler.workers.unit_servers import ForkServers, Holder
from aotc.manifest import Manifest
from aotc.models.factory import made_before
from aotc.reads.modes import take_ambient
from aotc.reads.tensors import plain_state
from aotc.store.layout.units import StoredUnits

CHOSEN_KERNELS = "ATEN_CPU_CAPABILITY"
"""The variable that limits torch's own kernels, read once in a process: units run without it."""


def modules_made_once(
    manifest: Manifest, servers: ForkServers, stored: StoredUnits | None, dummy_weights: bool = False
) -> InspectedModels:
    """Build every model's module, and fork a process that keeps the slow ones for their units.

    This process then holds only those that the plan needs, of models by regions.
    """
    made = make_modules(manifest, stored, dummy_weights)
    servers.holder = hold(made)
    inspected, models = made.inspected, manifest.models
    return inspected._replace(slow={name: module for name, module in inspected.slow.items() if models[name].regions})


class MadeModules(NamedTuple):
    """The inspected models; the names of the slow ones that a process may keep; the operators that the factories
    registered."""

    inspected: InspectedModels
    long: tuple[str, ...]
    registrations: Registrations


def make_modules(manifest: Manifest, stored: StoredUnits | None = None, dummy_weights: bool = False) -> MadeModules:
    """Call every factory of the manifest. Raises the errors of `inspect_models`."""
    registrations = Registrations()
    thread, process = _state_of_thread(), _state_of_process()
    with _asking_nvml(), registrations.watched():
        inspected = inspect_models(manifest, stored, dummy_weights, all_slow=True)
    alone = (_state_of_thread(), _state_of_process()) == (thread, process)
    # A factory that changes global state must not affect the units of other models.
    # One of a parallel model may have a device mesh, which is not that of its units' device.
    slow = inspected.slow.items() if alone else ()
    long = tuple(name for name, module in slow if not (manifest.models[name].parallel or _is_shared(module)))
    if long:
        registrations.take_down()
    return MadeModules(inspected, long, registrations)


@contextmanager
def _asking_nvml() -> Iterator[None]:
    """While active, looking for GPUs does not initialise CUDA, which a fork could not use afterwards."""
    absent = ASK_NVML not in os.environ
    os.environ.setdefault(ASK_NVML, "1")
    try:
        yield
    finally:
        if absent:
            os.environ.pop(ASK_NVML, None)


def hold(made: MadeModules) -> Holder | None:
    """A process that keeps the slow modules; None where there are none, where forks could not use them, or where the
    system refuses a fork of this size."""
    spoilt = torch.cuda.is_initialized() or CHOSEN_KERNELS in os.environ  # type: ignore[no-untyped-call]
    if not made.long or sys.platform != "linux" or spoilt:
        return None
    # For the fork, and the processes forked from it; this process does not build the modules again.
    with (
        suppress(OSError),
        replaced_items(made_before, {name: made.inspected.slow[name] for name in made.long}),
        replaced(Registrations, "before", made.registrations),
    ):
        return Holder(made.long)
    return None


def _state_of_thread() -> tuple[Any, ...]:
    """torch's settings of this thread, which a factory may change."""
    devices = ("cpu", "cuda")
    smallest = torch.tensor(5e-324, dtype=torch.float64, device="cpu")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_device(),
        *(torch.is_autocast_enabled(device) for device in devices),
        *(torch.get_autocast_dtype(device) for device in devices),
        bool(smallest * 1),  # False where denormal numbers are flushed to 0
    )


def _state_of_process() -> tuple[Any, ...]:
    """Settings of this process, which a factory may change, with Inductor's, and the number of its threads."""
    inductor = sys.modules.get("torch._inductor.config")
    options = inductor._get_dict(skip_default=True) if inductor else {}
    return take_ambient("cpu"), take_ambient("cuda"), options, torch.get_num_threads(), threading.active_count()


def _is_shared(module: nn.Module) -> bool:
    """Whether processes forked from this one would share writable memory of the module."""
    return any(tensor.is_shared() for tensor in plain_state(module).values())  # type: ignore[no-untyped-call]
