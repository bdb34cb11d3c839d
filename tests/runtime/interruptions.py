"""An exception of a signal's handler, at one after another of the places where Python looks for signals: after a call,
on entering a function, at the end of a loop's body. A trace function could raise anywhere, also where no signal does.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable, Iterator
from typing import Any

_CALLBACK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
_add = ctypes.pythonapi.Py_AddPendingCall
_add.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
_interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterruptEx, ctypes.c_void_p)
AT_ONCE = 32
"""Pending calls that Python makes at one place; one that adds itself again is made so often."""


class Interrupted(Exception):
    pass


def interruptions(function: Callable[[], Any]) -> Iterator[bool]:
    """Call `function` again and again, interrupted at its first such place, then at its second; whether it ended so.

    The last one is not. In the main thread alone.
    """
    left = 0

    @_CALLBACK
    def step(_: Any) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            _add(_interrupt, signal.SIGUSR1)
        elif left > 0:
            _add(ctypes.cast(step, ctypes.c_void_p), None)
        return 0

    def handle(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    number = 0
    try:
        while True:
            number += 1
            left, interrupted = number * AT_ONCE, False
            try:
                _add(ctypes.cast(step, ctypes.c_void_p), None)
                function()
                ended, left = left > 0, 0
                for _ in range(3):  # an interruption that is on its way
                    pass
            except Interrupted:
                interrupted, ended = True, False
            left = 0
            yield interrupted
            if ended and not interrupted:
                return
    finally:
        left = 0
        signal.signal(signal.SIGUSR1, before)
