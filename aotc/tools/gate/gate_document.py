"""The file of a gate: `gate.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from aotc.errors import ManifestError
from aotc.manifest.document import MAX_BYTES, read_document
from aotc.manifest.findings import Findings, describe, did_you_mean, nearest
from aotc.manifest.types import KeyPath
from aotc.records import Record

LAST = "last"


class ErrorLimit(Record, frozen=True):
    """error: the largest error of any output, relative to its size (rms). of_allowed: the largest share of what
    `aotc verify` allows."""

    error: float | None = None
    of_allowed: float | None = None


class LatencyLimit(Record, frozen=True):
    """worse: how much longer a call may take than with the baseline, in any bucket. baseline: a tag of the model, a
    reference, or `last`: the tag of the model that was set last and names another bundle."""

    worse: float
    baseline: str = LAST


class StartupLimit(Record, frozen=True):
    """Seconds. load: from the module to a callable. first_output: from the start of a process, all of its imports and
    the module's construction included."""

    load: float | None = None
    first_output: float | None = None


class CoverageLimit(Record, frozen=True):
    """The share of the calls of a trace that must find a bucket; `trace` is a file beside the gate's."""

    trace: str
    share: float = 1.0


class Gate(Record, frozen=True):
    """What a build must keep. A part that is left out has no limit."""

    version: Literal[1]
    numbers: ErrorLimit | None = None
    latency: LatencyLimit | None = None
    startup: StartupLimit | None = None
    coverage: CoverageLimit | None = None


SHARES = {("numbers", "of_allowed"), ("latency", "worse"), ("coverage", "share")}
"""Values that may be written like 5%."""
PARTS: dict[str, type[Record]] = {
    "numbers": ErrorLimit,
    "latency": LatencyLimit,
    "startup": StartupLimit,
    "coverage": CoverageLimit,
}


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
    data = _checked(document.data, findings)
    if findings.found:
        raise ManifestError(f"{path} is not a gate", issues=findings.issues)
    return msgspec.convert(data, Gate)


def _checked(data: Any, findings: Findings) -> dict[str, Any]:
    """The data with shares as numbers. Reports every mistake."""
    if not isinstance(data, dict):
        message = "the gate is empty" if data is None else f"the gate is {describe(data)}; expected keys with limits"
        findings.add((), message, hint=_HINT)
        return {}
    _check_keys((), data, Gate, findings)
    if "version" in data and data["version"] != 1:
        found = describe(data["version"])
        hint = "this aotc reads version 1"
        findings.add(("version",), f"`version` is {found}; expected 1", hint=hint, expected="1", actual=found)
    checked = dict(data)
    for name, kind in PARTS.items():
        part = data.get(name)
        if isinstance(part, dict):
            _check_keys((name,), part, kind, findings)
            checked[name] = {key: _value((name, key), value, findings) for key, value in part.items()}
        elif part is not None and findings.sound((name,)):
            fields = ", ".join(kind.__struct_fields__)
            findings.add((name,), f"`{name}` is {describe(part)}; expected a mapping", hint=f"its keys are {fields}")
    return checked


def _check_keys(path: KeyPath, data: dict[str, Any], kind: type[Record], findings: Findings) -> None:
    inside = f" in `{path[0]}`" if path else ""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    meant = set()
    for key in data:
        if key not in known:
            findings.add((*path, key), f"unknown key `{key}`{inside}", hint=did_you_mean(key, known))
            meant.add(nearest(key, known))
    for name, field in known.items():
        if field.required and name not in data and name not in meant:
            hint = "write `version: 1`" if name == "version" else f"write `{path[0]}: {{{name}: …}}`"
            findings.add((*path, name), f"`{name}` is missing{inside}", hint=hint)


def _value(path: tuple[str, str], value: Any, findings: Findings) -> Any:
    """A limit as a number, the name of a file or of a baseline as it is."""
    if not findings.sound(path):
        return value
    part, key = path
    if key in ("trace", "baseline"):
        if not isinstance(value, str):
            findings.add(path, f"`{part}.{key}` is {describe(value)}; expected text")
        return value
    if value is None and part in ("numbers", "startup"):
        return None
    number = value
    if path in SHARES and isinstance(value, str) and value.strip().endswith("%"):
        try:
            number = float(value.strip().removesuffix("%")) / 100
        except ValueError:
            number = value
    most = 1.0 if key == "share" else float("inf")
    expected = "a share from 0 to 1" if key == "share" else "a number from 0 on"
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= most or number == _ENDLESS:
        hint = f"write it like {'5%' if path in SHARES else '0.5'}"
        found = describe(value)
        findings.add(
            path, f"`{part}.{key}` is {found}; expected {expected}", hint=hint, expected=expected, actual=found
        )
    return number


_ENDLESS = float("inf")
_HINT = (
    "it has `version: 1` and any of `numbers: {error, of_allowed}`, `latency: {worse, baseline}`, "
    "`startup: {load, first_output}` and `coverage: {trace, share}`"
)
