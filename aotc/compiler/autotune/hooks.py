"""What the hooks have in common: Inductor's modules, its patches, and times."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

from aotc.picks import Candidate

UNMEASURED = 1.0
"""What a locked build answers instead of a time, until it has found out all that is missing: any equal numbers do."""

Patch = tuple[Any, str, Callable[..., Any]]


def inductor(module: str) -> Any:
    return importlib.import_module(f"torch._inductor.{module}")


def with_time(candidate: Candidate, ms: float) -> Candidate:
    return Candidate(candidate.name, candidate.config, round(float(ms), 6) if math.isfinite(ms) else None)
