"""aotc's log on standard error: what `$AOTC_LOG` and the commands' `-v` ask for.

A service that configures `logging` itself needs none of it: all of aotc logs to the logger `aotc`.
"""

from __future__ import annotations

import logging

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def log_to_stderr(level: str) -> None:
    """Print the log from this level on: DEBUG, INFO, WARNING or ERROR, in any case of letters.

    Another level is INFO, and is warned about.
    """
    logger = logging.getLogger("aotc")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.propagate = False
    known = level.upper() in LEVELS
    logger.setLevel(level.upper() if known else "INFO")
    if not known:
        logger.warning("AOTC_LOG is %r and may be %s", level, ", ".join(LEVELS).lower())
