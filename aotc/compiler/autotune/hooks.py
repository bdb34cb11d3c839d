"""What the hooks have in common."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from aotc.picks import Candidate

UNMEASURED = 1.0
"""What a locked build answers instead of a time, until it has found out all that is missing: any equal numbers do."""

Patch = tuple[Any, str, Callable[..., Any]]


def with_time(candidate: Candidate, ms: float) -> Candidate:
    return Candidate(candidate.name, candidate.config, round(float(ms), 6) if math.isfinite(ms) else None)
