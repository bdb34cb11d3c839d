"""What a command does when it is told to stop."""

from __future__ import annotations

import signal


def end_on_sigterm() -> None:
    """A CI runner's stop is a Ctrl-C: every process of the build ends with it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
