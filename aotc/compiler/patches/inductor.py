"""Inductor's modules, which are imported only where something is compiled."""

from __future__ import annotations

import importlib
from typing import Any


def inductor(module: str) -> Any:
    return importlib.import_module(f"torch._inductor.{module}")
