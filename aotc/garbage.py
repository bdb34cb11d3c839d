"""Python's garbage collector, kept from looking where there is nothing to find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Put off looking for garbage while objects are made that stay.

    Torch's modules are 170,000 objects. To look at all of them takes 80 ms, and a thousand new objects are enough to
    set that off; so much is an artifact's record. Where as many were made, the new ones alone are looked at in the end:
    else the next object would set it off.

    In all threads, so for work that waits for nothing.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            if 0 < gc.get_threshold()[0] < gc.get_count()[0]:
                gc.collect(0)
            gc.enable()
