"""The startup report: what a process has loaded, how long that took, and that no compiler was imported."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from aotc.runtime.compiled import Compiled

COMPILERS = ("torch._dynamo", "torch._inductor", "triton", "sympy")
_log = logging.getLogger("aotc")


def startup_report(models: Mapping[str, Compiled]) -> dict[str, Any]:
    """The state of this process after its models were loaded, as JSON values.

    `seconds_since_process_start` is from Linux's record of the process, in steps of 10 ms; it and `rss_mib`, the
    resident memory, are None elsewhere. `early` is what `aotc.early` did. `load_ms` is the time of each part of a load,
    and `prepare_ms` that of `aotc.prepare`, in the parent where this process is `forked`. `compilers_imported` lists
    which of torch._dynamo, torch._inductor, triton and sympy the process has imported, by whatever means.

    Example:
        >>> report = startup_report({"quickstart": compiled})
        >>> report["models"]["quickstart"]["buckets"]
        2
        >>> list(report["models"]["quickstart"]["load_ms"])
        ['record', 'module', 'libraries', 'graphs']
    """
    import aotc

    early = sys.modules.get("aotc.early")
    return {
        "event": "aotc.startup",
        "seconds_since_process_start": seconds_since_process_start(),
        "early": early.report() if early is not None else None,
        "models": {name: _of_model(compiled) for name, compiled in models.items()},
        "compilers_imported": [name for name in COMPILERS if name in sys.modules],
        "rss_mib": _resident_mib(),
        "threads": torch.get_num_threads(),
        "aotc": aotc.__version__,
        "torch": torch.__version__,
    }


def log_startup(models: Mapping[str, Compiled]) -> None:
    """Log the startup report at INFO to the logger `aotc`: the message is one line of JSON.

    A formatter for structured logs finds the same values as the record's attribute `aotc`.
    """
    report = startup_report(models)
    _log.info("%s", json.dumps(report), extra={"aotc": report})


def seconds_since_process_start() -> float | None:
    """From Linux's own record of this process, in steps of 10 ms; None elsewhere."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return round(time.clock_gettime(time.CLOCK_BOOTTIME) - started, 2)
    except (OSError, AttributeError):
        return None


def _resident_mib() -> int | None:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _of_model(compiled: Compiled) -> dict[str, Any]:
    artifact, loaded = compiled.artifact, compiled.forward.loaded
    return {
        "target": artifact.target,
        "device": str(compiled.device),
        "buckets": len(artifact.variants),
        "weights": artifact.weights,
        **(loaded._asdict() if loaded else {}),
    }
