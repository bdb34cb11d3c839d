"""Import Inductor's modules on demand, so that only a process that compiles imports them."""

from __future__ import annotations

import importlib
from typing import Any


def inductor(module: str) -> Any:
    return importlib.import_module(f"torch._inductor.{module}")
