"""The file of a gate: `gate.yaml`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aotc.errors import ManifestError
from aotc.manifest.document import MAX_BYTES, read_document
from aotc.manifest.findings import Findings
from aotc.manifest.structure import check_file
from aotc.records import Record

LAST = "last"

_LIKE_A_NUMBER, _LIKE_A_SHARE = (Meta(title=f"a number from 0 on, like {each}") for each in ("0.5", "5%"))
_Limit = Annotated[float, Meta(ge=0)]


class ErrorLimit(Record, frozen=True):
    """error: the largest error of any output, relative to its size (rms). of_allowed: the largest share of what
    `aotc verify` allows."""

    error: Annotated[_Limit | None, _LIKE_A_NUMBER] = None
    of_allowed: Annotated[_Limit | None, _LIKE_A_SHARE] = None


class LatencyLimit(Record, frozen=True):
    """worse: how much longer a call may take than with the baseline, in any bucket. baseline: a tag of the model, a
    reference, or `last`: the tag of the model that was set last and names another bundle."""

    worse: Annotated[_Limit, _LIKE_A_SHARE]
    baseline: str = LAST


class StartupLimit(Record, frozen=True):
    """Seconds. load: from the module to a callable. first_output: from the start of a process, all of its imports and
    the module's construction included."""

    load: Annotated[_Limit | None, _LIKE_A_NUMBER] = None
    first_output: Annotated[_Limit | None, _LIKE_A_NUMBER] = None


class CoverageLimit(Record, frozen=True):
    """The share of the calls of a trace that must find a bucket; `trace` is a file beside the gate's."""

    trace: str
    share: Annotated[float, Meta(ge=0, le=1, title="a share from 0 to 1, like 99%")] = 1.0


class Gate(Record, frozen=True):
    """What a build must keep. A part that is left out has no limit."""

    version: Literal[1]
    numbers: Annotated[ErrorLimit | None, Meta(title="a mapping of `error` and `of_allowed`")] = None
    latency: Annotated[LatencyLimit | None, Meta(title="a mapping of `worse` and `baseline`")] = None
    startup: Annotated[StartupLimit | None, Meta(title="a mapping of `load` and `first_output`")] = None
    coverage: Annotated[CoverageLimit | None, Meta(title="a mapping of `trace` and `share`")] = None


SHARES = (("numbers", "of_allowed", math.inf), ("latency", "worse", math.inf), ("coverage", "share", 1.0))
"""Values that may be written like 5%, and the largest ones."""


def read_gate(path: Path) -> Gate:
    """Raises ManifestError for a file that cannot be read or is not a gate, with every mistake and its line."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except OSError as error:
        hint = "`--gate` takes a YAML file with limits, see the compiler guide"
        raise ManifestError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    try:
        document = read_document(content, str(path))
    except ManifestError as error:
        raise ManifestError(f"{path} is not a gate", issues=error.issues) from None
    findings = Findings(str(path), document.lines, document.issues, document.broken)
    data = _with_shares(document.data)
    check_file(data, Annotated[Gate, Meta(title="keys with limits")], findings, name="gate", hint=_HINT)
    if findings.found:
        raise ManifestError(f"{path} is not a gate", issues=findings.issues)
    return msgspec.convert(data, Gate)


def _with_shares(data: Any) -> Any:
    """The data with 0.05 for 5%. Any other value is left as written."""
    if not isinstance(data, dict):
        return data
    data = dict(data)
    for part, key, most in SHARES:
        limits = data.get(part)
        text = limits.get(key) if isinstance(limits, dict) else None
        if isinstance(text, str) and text.strip().endswith("%"):
            try:
                share = float(text.strip().removesuffix("%")) / 100
            except ValueError:
                continue
            if 0 <= share <= most and math.isfinite(share):
                data[part] = {**data[part], key: share}
    return data


_HINT = (
    "it has `version: 1` and any of `numbers: {error, of_allowed}`, `latency: {worse, baseline}`, "
    "`startup: {load, first_output}` and `coverage: {trace, share}`"
)
