"""Bounds of torch versions, by major and minor."""

from __future__ import annotations

import re


def within(bounds: str, version: str) -> bool:
    """Whether a torch version, by its major and minor, is within bounds like ">=2.11,<2.15". Raises ValueError."""
    own = release(version)
    for bound in bounds.split(","):
        least = release(bound[1:].lstrip("="))
        if (bound.startswith(">=") and own < least) or (bound.startswith("<") and own >= least):
            return False
    return True


def release(version: str) -> tuple[int, int]:
    """The major and minor of a version. Raises ValueError."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is not a version: it has no major and minor")
    return int(found[1]), int(found[2])
