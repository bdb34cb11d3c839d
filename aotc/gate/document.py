"""The file of a gate: `gate.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from aotc.errors import Issue, ManifestError
from aotc.records import Record

SIZE_LIMIT = 1 << 20  # bytes

LAST = "last"


class Numbers(Record, frozen=True):
    """error: the largest error of any output, relative to its size (rms). of_allowed: the largest share of what
    `aotc verify` allows."""

    error: float | None = None
    of_allowed: float | None = None


class Latency(Record, frozen=True):
    """worse: how much longer a call may take than with the baseline, in any bucket. baseline: a reference, or `last`:
    the tag of the model that was set last and names another bundle."""

    worse: float
    baseline: str = LAST


class Startup(Record, frozen=True):
    """Seconds. load: from the module to a callable. first_output: from the start of a process, all of its imports and
    the module's construction included."""

    load: float | None = None
    first_output: float | None = None


class Coverage(Record, frozen=True):
    """The share of the calls of a trace that must find a bucket; `trace` is a file beside the gate's."""

    trace: str
    share: float = 1.0


class Gate(Record, frozen=True):
    """What a build must keep. A part that is left out has no limit."""

    version: Literal[1]
    numbers: Numbers | None = None
    latency: Latency | None = None
    startup: Startup | None = None
    coverage: Coverage | None = None


SHARES = {"numbers": ("of_allowed",), "latency": ("worse",), "coverage": ("share",)}
"""Values that may be written like 5%."""


def read_gate(path: Path) -> Gate:
    """Raises ManifestError for a file that cannot be read or is not a gate."""
    try:
        with path.open("rb") as stream:
            data = stream.read(SIZE_LIMIT + 1)
        if len(data) > SIZE_LIMIT:
            raise ManifestError(f"{path} is larger than {SIZE_LIMIT} bytes")
        found: Any = yaml.safe_load(data)
        for part, names in SHARES.items():
            for name in names:
                if isinstance(found, dict) and isinstance(found.get(part), dict) and name in found[part]:
                    found[part][name] = _share(found[part][name])
        gate = msgspec.convert(found, Gate)
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        if isinstance(error, ManifestError):
            raise
        first, *_ = str(error).splitlines()
        issue = Issue(first[:500], where=str(path))
        raise ManifestError(f"{path} is not a gate", issues=(issue,), hint=_HINT) from error
    if flaws := _flaws(gate):
        raise ManifestError(f"{path} is not a gate", issues=tuple(Issue(flaw, where=str(path)) for flaw in flaws))
    return gate


_HINT = (
    "it has `version: 1` and any of `numbers: {error, of_allowed}`, `latency: {worse, baseline}`, "
    "`startup: {load, first_output}` and `coverage: {trace, share}`"
)


def _share(value: Any) -> Any:
    if isinstance(value, str) and value.strip().endswith("%"):
        return float(value.strip().removesuffix("%")) / 100
    return value


def _flaws(gate: Gate) -> list[str]:
    numbers, latency, startup, coverage = gate.numbers, gate.latency, gate.startup, gate.coverage
    limits = {
        "numbers.error": numbers and numbers.error,
        "numbers.of_allowed": numbers and numbers.of_allowed,
        "latency.worse": latency and latency.worse,
        "startup.load": startup and startup.load,
        "startup.first_output": startup and startup.first_output,
        "coverage.share": coverage and coverage.share,
    }
    wrong = [f"{name} is {value}, and not a number from 0 on" for name, value in limits.items() if not _is_limit(value)]
    if coverage and coverage.share > 1:
        wrong.append(f"coverage.share is {coverage.share}, and not a share from 0 to 1")
    return wrong


def _is_limit(value: Any) -> bool:
    return value is None or 0 <= value < float("inf")
