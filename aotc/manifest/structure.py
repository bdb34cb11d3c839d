"""The first pass: has a manifest the form that `aotc.manifest.schema` states? msgspec compares the values, one by one;
this collects all mistakes, each at its key, in plain words. The file of a gate is checked by its types, too."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from aotc.manifest.findings import Findings, describe, did_you_mean, nearest
from aotc.manifest.inputs import leaf_path
from aotc.manifest.schema import DefaultsKeys, ManifestForm, ModelKeys, RecipeKeys
from aotc.manifest.types import KeyPath

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
class _Form:
    """A type taken apart: what stands in `Annotated[base, *metas]`."""

    base: Any
    metas: tuple[msgspec.Meta, ...]

    @property
    def title(self) -> str:
        return next((meta.title for meta in reversed(self.metas) if meta.title), None) or _plain_title(self.base)

    def of(self, base: Any) -> Any:
        """Another type with the same constraints."""
        return Annotated[(base, *self.metas)] if self.metas else base

    def said(self, kind: str) -> dict[str, Any]:
        """What the metas say by `extra` or `extra_json_schema`."""
        return {key: value for meta in self.metas for key, value in (getattr(meta, kind) or {}).items()}


def check_structure(data: Any, findings: Findings) -> None:
    """Report every place where a manifest's data has not the form of a manifest."""
    hint = "write `version: 1` and `models:`; `aotc init` writes a first manifest"
    check_file(data, ManifestForm, findings, name="manifest", hint=hint)


def check_file(data: Any, kind: Any, findings: Findings, *, name: str, hint: str) -> None:
    """Report every place where a file's data is not of a type, a Struct with a title. `hint` is for a file of that
    `name` that is not a mapping."""
    if isinstance(data, Mapping):
        _check(data, kind, (), findings)
        return
    expected, actual = _form_for(data, kind).title, describe(data)
    message = f"the {name} is empty" if data is None else f"the {name} is {actual}; expected {expected}"
    findings.add((), message, hint=hint, expected=expected, actual=actual)


def _check(value: Any, kind: Any, path: KeyPath, findings: Findings) -> None:
    form = _form_for(value, kind)
    if isinstance(value, Mapping) and _is_mapping(form.base):
        _check_size(value, dict, form, path, findings)
        check = _check_entries if get_origin(form.base) is dict else _check_keys
        check(value, form.base, path, findings)
    elif isinstance(value, list) and get_origin(form.base) in (list, tuple):
        _check_size(value, list, form, path, findings)
        for index, item in enumerate(value):
            _check(item, get_args(form.base)[0], (*path, index), findings)
        if form.said("extra_json_schema").get("uniqueItems"):
            _check_distinct(value, path, findings)
    elif not _fits(value, form.of(form.base)):
        _report(value, form, path, findings)


def _form_for(value: Any, kind: Any) -> _Form:
    """The type, or of a union the member that takes a value of this kind, with the words of the union where it has none
    of its own."""
    base, *metas = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    form = _Form(base, tuple(metas))
    if choose := form.said("extra").get("kind"):
        return _form_for(value, choose(value))
    members = _members(base)
    for member in members:
        inner = _form_for(value, member)
        if len(members) == 1 or _takes(inner, value):
            return _Form(inner.base, (*metas, *inner.metas))
    return form


def _takes(member: _Form, value: Any) -> bool:
    if isinstance(value, Mapping):
        return _is_mapping(member.base)
    if isinstance(value, list):
        return get_origin(member.base) in (list, tuple)
    return isinstance(value, str) and bool(member.metas) and (member.base is str or get_origin(member.base) is Literal)


def _is_mapping(base: Any) -> bool:
    return get_origin(base) is dict or (isinstance(base, type) and issubclass(base, msgspec.Struct))


def _fits(value: Any, kind: Any) -> bool:
    base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if members := _members(base):
        # One by one: msgspec 0.22 corrupts memory when it frees a union of a text with a pattern and a list.
        return any(_fits(value, member) for member in members)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _members(base: Any) -> tuple[Any, ...]:
    """The types of a union, without that of a key which is left out; () for another type."""
    types_of = get_args(base) if get_origin(base) in (Union, types.UnionType) else ()
    return tuple(member for member in types_of if member is not msgspec.UnsetType)


def _check_keys(value: Mapping[str, Any], keys: type[msgspec.Struct], path: KeyPath, findings: Findings) -> None:
    known = _fields(keys)
    for key in value:
        if key not in known:
            hint = did_you_mean(key, known)
            if keys is DefaultsKeys and key in _fields(ModelKeys):
                hint = f"`{key}` is not a default: write it under each model that has it"
            findings.add((*path, key), f"unknown key `{key}`{_inside(path)}", hint=hint)
            # A missing key that was only mistyped is not reported a second time.
            if (meant := nearest(key, known)) and meant not in value:
                findings.mark((*path, meant))
    for key, field in known.items():
        if key in value:
            _check(value[key], field.type, (*path, key), findings)
        elif field.required and not findings.is_broken((*path, key)):
            expected = _form_for(None, field.type).title
            message = f"`{key}` is missing{_inside(path)}"
            findings.add((*path, key), message, hint=f"add {expected}", expected=expected)


@functools.cache
def _fields(keys: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(keys)}


def _check_entries(value: Mapping[str, Any], kind: Any, path: KeyPath, findings: Findings) -> None:
    name_kind, value_kind = get_args(kind)
    for name, item in value.items():
        if not _fits(name, name_kind):
            expected, actual = _form_for(name, name_kind).title, describe(name)
            message = f"{actual} cannot be a name{_inside(path)}; expected {expected}"
            findings.add((*path, name), message, expected=expected, actual=actual)
        _check(item, value_kind, (*path, name), findings)


def _check_size(value: Any, container: type, form: _Form, path: KeyPath, findings: Findings) -> None:
    if (form.base is RecipeKeys and len(value) != 1) or not _fits(value, form.of(container)):
        _report(value, form, path, findings)


def _check_distinct(value: list[Any], path: KeyPath, findings: Findings) -> None:
    texts = [msgspec.json.encode(item, order="sorted") for item in value]
    for index, item in enumerate(value):
        if texts[index] in texts[:index]:
            message = f"{describe(item)} is there twice{_inside(path)}"
            findings.add((*path, index), message, hint="remove one of the two")


def _report(value: Any, form: _Form, path: KeyPath, findings: Findings) -> None:
    expected, actual = form.title, "empty" if value in ({}, []) else describe(value)
    hint = "this aotc reads version 1" if path == ("version",) else _hint(value, form)
    message = f"`{leaf_path(path)}` is {actual}; expected {expected}"
    findings.add(path, message, hint=hint, expected=expected, actual=actual)


def _hint(value: Any, form: _Form) -> str:
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    known = [*_values(form.base), *(text for meta in form.metas for text in meta.examples or ())]
    known = [text for text in known if text is not None]
    if not known or not isinstance(value, str):
        return ""
    name = value.removeprefix("torch.")
    if name in known or _OTHER_NAMES.get(name) in known:
        return f"did you mean `{name if name in known else _OTHER_NAMES[name]}`?"
    if nearest(name, known) is None and all(text in form.title for text in known):
        return ""  # the message lists them
    return did_you_mean(name, known)


def _values(base: Any) -> list[Any]:
    """The values that a Literal lists, or those of a union; None for null."""
    if get_origin(base) is Literal:
        return list(get_args(base))
    return [None] if base is type(None) else [value for member in _members(base) for value in _values(member)]


def _plain_title(base: Any) -> str:
    if base in (bool, str):
        return "text" if base is str else "true or false"
    *first, last = ["null" if value is None else str(value) for value in _values(base)] or ["a mapping"]
    return f"{', '.join(first)} or {last}" if first else last


def _inside(path: KeyPath) -> str:
    return f" in `{leaf_path(path)}`" if path else ""
