"""How a command ends when it is told to stop: exit code 130 by Ctrl-C, 143 by SIGTERM, 1 at a limit of its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


class OutOfTime(KeyboardInterrupt):
    """The limit that the caller set, which ends a command as Ctrl-C does."""


def exit_code(stop: KeyboardInterrupt) -> int:
    """128 and the signal's number, as a shell gives; 1 at a limit of the command's own."""
    if isinstance(stop, OutOfTime):
        return 1
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def in_words(stop: KeyboardInterrupt) -> str:
    """`interrupted`, `ended by SIGTERM`, or which limit was reached."""
    return str(stop) or ("ended by SIGTERM" if isinstance(stop, Terminated) else "interrupted")


@contextmanager
def limited(seconds: float, message: str) -> Iterator[None]:
    """Raise OutOfTime with this message in the main thread, if what is within takes longer."""

    def end(number: int, frame: object) -> None:
        raise OutOfTime(message)

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))  # 0 would disarm the timer
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
