"""The first check: torch itself, and how long its import takes. Imports nothing before that imports torch."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import time

from aotc.store.extras import install_hint
from aotc.tools.doctor.checks import Check


def check_torch() -> Check:
    """Import torch: `warn` where it is not installed, `fail` where it cannot be imported or is too old."""
    before = "torch" in sys.modules
    began = time.perf_counter()
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            about = "not installed: aotc.load and builds need it, aotc.standalone.load does not"
            return Check(_PART, "torch", "warn", about, hint=f"{install_hint('torch')}; {_WHERE}")
        hint = f"pip install torch: {_WHERE}"
        return Check(_PART, "torch", "fail", f"cannot be imported: {type(error).__name__}: {error}", hint=hint)
    took = "" if before else f", imported in {time.perf_counter() - began:.1f} s"
    from aotc.machine.this_host import numbers

    found, oldest = str(torch.__version__), _oldest_torch()
    if oldest and numbers(found, 2) < numbers(oldest, 2):
        hint = f"pip install 'torch>={oldest}'"
        return Check(_PART, "torch", "fail", f"{found}{took}", f"{oldest} or newer", hint)
    return Check(_PART, "torch", "ok", f"{found}{took}")


def _oldest_torch() -> str:
    """The oldest version that aotc's own requirements name; "" where aotc runs without having been installed."""
    try:
        needed = importlib.metadata.requires("aotc") or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    found = (re.match(r"torch\s*(?:[<!~=][^;]*)?>=\s*([0-9.]+)", one) for one in needed)
    return next((match[1] for match in found if match), "")


_PART = "this machine"
_WHERE = "see https://pytorch.org/get-started"
