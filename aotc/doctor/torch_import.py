"""The first check: torch itself, and how long its import takes. Imports nothing that imports torch."""

from __future__ import annotations

import sys
import time

from aotc.doctor.checks import Check


def check_torch() -> Check:
    """Import torch; `fail` where it cannot be imported, and then nothing else can be checked."""
    before = "torch" in sys.modules
    began = time.perf_counter()
    try:
        import torch
    except Exception as error:  # a broken installation raises anything
        hint = "pip install torch: see https://pytorch.org/get-started"
        return Check(_PART, "torch", "fail", f"cannot be imported: {type(error).__name__}: {error}", hint=hint)
    took = "" if before else f", imported in {time.perf_counter() - began:.1f} s"
    return Check(_PART, "torch", "ok", f"{torch.__version__}{took}")


_PART = "this machine"
