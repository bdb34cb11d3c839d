"""The first pass: does the manifest have the form that the JSON Schema states? Mistakes come out in plain words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import extend

from aotc.manifest.findings import Findings, describe, did_you_mean, nearest
from aotc.manifest.inputs import leaf_path
from aotc.manifest.schema import SCHEMA
from aotc.manifest.types import KeyPath

_OF_A_MODEL = SCHEMA["properties"]["models"]["additionalProperties"]["properties"]
_OTHER_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "double": "float64",
    "int": "int64",
    "long": "int64",
    "byte": "uint8",
    "boolean": "bool",
    "gpu": "cuda",
    "normal": "randn",
    "rand": "randn",
}
"""What people write for a known value that is spelled too differently to be recognized."""


@dataclass(frozen=True)
class _Departure:
    """One place where the data is not what the schema says: the schema's `keyword` there that does not hold."""

    path: KeyPath
    instance: Any
    keyword: str
    schema: Mapping[str, Any]
    is_name: bool


def _is_integer(checker: object, value: object) -> bool:
    # JSON Schema takes 1.0 for an integer; a size must be written as one.
    return isinstance(value, int) and not isinstance(value, bool)


_Validator = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator, type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer)
)


def check_structure(data: Any, findings: Findings) -> None:
    """Report every place where `data` departs from the schema."""
    departures = [_departure(error) for error in _Validator(SCHEMA).iter_errors(data)]
    # Unknown keys first: a missing key that was only mistyped is not reported a second time.
    for departure in sorted(departures, key=lambda departure: departure.keyword != "additionalProperties"):
        report = _report_name if departure.is_name else _REPORTS.get(departure.keyword, _report_value)
        report(departure, findings)


def _departure(error: Any) -> _Departure:
    return _Departure(
        path=tuple(error.absolute_path),
        instance=error.instance,
        keyword=str(error.validator),
        schema=error.schema,
        is_name=list(error.absolute_schema_path)[-2:-1] == ["propertyNames"],
    )


def _report_unknown_keys(departure: _Departure, findings: Findings) -> None:
    known = departure.schema["properties"]
    for key in departure.instance:
        if key not in known:
            hint = did_you_mean(key, known)
            if departure.path == ("defaults",) and key in _OF_A_MODEL:
                hint = f"`{key}` is not a default: write it under each model that has it"
            findings.add((*departure.path, key), f"unknown key `{key}`{_inside(departure.path)}", hint=hint)
            if (meant := nearest(key, known)) and meant not in departure.instance:
                findings.mark((*departure.path, meant))


def _report_missing_keys(departure: _Departure, findings: Findings) -> None:
    for key in departure.schema[departure.keyword]:
        # The schema reports each missing key by itself, with the same list.
        if key not in departure.instance and not findings.is_broken((*departure.path, key)):
            expected = _title(departure.schema["properties"][key])
            findings.add(
                (*departure.path, key),
                f"`{key}` is missing{_inside(departure.path)}",
                hint=f"add {expected}",
                expected=expected,
            )


def _report_name(departure: _Departure, findings: Findings) -> None:
    name = departure.instance
    message = f"{describe(name)} cannot be a name{_inside(departure.path)}; expected {_title(departure.schema)}"
    findings.add((*departure.path, name), message, expected=_title(departure.schema), actual=describe(name))


def _report_duplicates(departure: _Departure, findings: Findings) -> None:
    for index, item in enumerate(departure.instance):
        if item in departure.instance[:index]:
            findings.add(
                (*departure.path, index),
                f"{describe(item)} is there twice{_inside(departure.path)}",
                hint="remove one of the two",
            )


def _report_value(departure: _Departure, findings: Findings) -> None:
    expected, actual = _title(departure.schema), _found(departure.instance)
    if not departure.path and departure.instance is None:
        hint = "write `version: 1` and `models:`; `aotc init` writes a first manifest"
        findings.add((), "the manifest is empty", hint=hint, expected=expected, actual="nothing")
        return
    subject = f"`{leaf_path(departure.path)}`" if departure.path else "the manifest"
    findings.add(
        departure.path,
        f"{subject} is {actual}; expected {expected}",
        hint=_value_hint(departure),
        expected=expected,
        actual=actual,
    )


_REPORTS: dict[str, Callable[[_Departure, Findings], None]] = {
    "additionalProperties": _report_unknown_keys,
    "required": _report_missing_keys,
    "uniqueItems": _report_duplicates,
}


def _value_hint(departure: _Departure) -> str:
    if departure.keyword == "const":
        return f"this aotc reads version {departure.schema[departure.keyword]}"
    known = [
        str(value) for value in departure.schema.get("enum", departure.schema.get("examples", ())) if value is not None
    ]
    if not known or not isinstance(departure.instance, str):
        return _size_hint(departure.instance)
    name = departure.instance.removeprefix("torch.")
    if name in known or _OTHER_NAMES.get(name) in known:
        return f"did you mean `{name if name in known else _OTHER_NAMES[name]}`?"
    if nearest(name, known) is None and all(value in _title(departure.schema) for value in known):
        return ""  # the message lists them
    return did_you_mean(name, known)


def _size_hint(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    return ""


def _inside(path: KeyPath) -> str:
    return f" in `{leaf_path(path)}`" if path else ""


def _title(schema: Any) -> str:
    return str(schema.get("title") or schema.get("description") or "something else")


def _found(value: Any) -> str:
    return "empty" if value in ({}, []) else describe(value)
