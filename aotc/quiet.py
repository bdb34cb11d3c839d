"""Timing on a GPU with nobody else on it: one benchmark at a time on each device, over all processes of a machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import torch


@contextmanager
def device_alone(device: torch.device | str) -> Iterator[None]:
    """Hold the device's lock; units that compile side by side wait here for each other's benchmarks.

    The lock is named by the GPU's UUID, so it holds whatever CUDA_VISIBLE_DEVICES calls the device. On a CPU there
    is nothing to hold.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    uuid = torch.cuda.get_device_properties(device).uuid
    # A singleton, so that one benchmark inside another holds the same lock and does not wait for itself.
    path = Path(tempfile.gettempdir()) / f"aotc-{os.getuid()}-gpu-{uuid}.lock"
    with filelock.FileLock(path, is_singleton=True):
        yield
