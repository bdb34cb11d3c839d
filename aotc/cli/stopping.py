"""How a command ends when it is told to stop: by Ctrl-C with exit code 130, by SIGTERM with 143."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """128 and the signal's number, as a shell gives."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def end_on_sigterm() -> None:
    """Treat SIGTERM, which stops a CI job, as Ctrl-C: every process of the build ends with this one."""

    def interrupt(number: int, frame: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def ctrl_c_kept() -> Iterator[None]:
    """Raises KeyboardInterrupt in the end where a Ctrl-C within did nothing.

    Imports may drop the exception: torch's C++ code, the first of torch to import NumPy, clears every error, and Python
    ignores those of the import system's callbacks.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:  # an import that was interrupted may leave half a module to the next one
        if not pressed:
            raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:  # a model's factory may have set another
            signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
