"""aotc's log on standard error: what `$AOTC_LOG` and the commands' `-v` ask for.

A service that configures `logging` itself needs none of it: all of aotc logs to the logger `aotc`.
"""

from __future__ import annotations

import logging
import sys

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
JSON = "json"


class LineFormatter(logging.Formatter):
    """Time, level, logger and message. A message that is a line of JSON, as the startup report, is printed alone."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage() if hasattr(record, "aotc") else super().format(record)


class JsonFormatter(logging.Formatter):
    """Each record as one line of JSON: `time` (UTC), `level`, `logger`, `message`, of an error its `exception`; of the
    startup report its values in the place of the message."""

    def format(self, record: logging.LogRecord) -> str:
        import json
        from datetime import UTC, datetime

        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname, "logger": record.name}
        line |= getattr(record, "aotc", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(level: str) -> None:
    """Print the log from this level on: DEBUG, INFO, WARNING or ERROR, in any case of letters; `json` before it, or
    alone, for lines of JSON (`json:debug`; `json` is `json:info`).

    Another level is INFO, and is warned about.
    """
    logger = logging.getLogger("aotc")
    form, _, after = level.lower().partition(":")
    as_json = form == JSON
    wanted = (after or "info" if as_json else level).upper()
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if as_json else LineFormatter())
        logger.addHandler(handler)
        logger.propagate = False
    known = wanted in LEVELS
    logger.setLevel(wanted if known else "INFO")
    if not known:
        logger.warning("AOTC_LOG is %r and may be %s, json or json:LEVEL", level, ", ".join(LEVELS).lower())
