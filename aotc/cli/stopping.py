"""How a command ends when it is told to stop: by Ctrl-C with exit code 130, by SIGTERM with 143."""

from __future__ import annotations

import signal


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
