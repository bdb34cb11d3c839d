"""Values that a program's calls had: `init: {recorded: FILE.safetensors#NAME}`.

The file lies beside the manifest. It holds tensors `NAME/CALL/PATH`, where CALL counts from 0 and PATH is the input's,
as `ids` or `batch.ids[0]`; and under NAME in its metadata, in JSON, a list with an object for each call: the shape of
every tensor of that call, by its path. What a manifest uses of it becomes part of its `ModelSpec`, and so of the keys.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from aotc.manifest.findings import Findings
from aotc.manifest.inputs import TensorInput, parse_inputs, tensors_in
from aotc.manifest.types import ModelSpec, RecordedCall

MAX_FILE = 16 << 20
"""Bytes: an artifact's provenance, which holds the values too, may have as many."""
MAX_CALLS = 1000

DTYPES: Mapping[str, str] = {
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BOOL": "bool",
}
"""The manifest's dtypes by safetensors' names."""


class Unreadable(ValueError):
    """Why recorded values cannot be used; `hint` says what could be."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def with_recorded_values(models: Mapping[str, ModelSpec], folder: Path, findings: Findings) -> dict[str, ModelSpec]:
    """The models with the values that their inputs refer to. What cannot be read is reported, without its model."""
    return {name: full for name, spec in models.items() if (full := _with_values(spec, folder, findings)) is not None}


def recorded_references(spec: ModelSpec) -> Iterator[tuple[TensorInput, str]]:
    """The inputs with recorded values, and where these are."""
    for leaf in parse_inputs(spec.inputs)[1]:
        if not isinstance(leaf, TensorInput):
            continue
        for init in leaf.inits:
            if isinstance(init, Mapping) and "recorded" in init:
                yield leaf, init["recorded"]


def _with_values(spec: ModelSpec, folder: Path, findings: Findings) -> ModelSpec | None:
    used: dict[str, set[str]] = {}
    for leaf, reference in recorded_references(spec):
        used.setdefault(reference, set()).add(leaf.path)
    recorded, is_whole = {}, True
    for reference, paths in used.items():
        try:
            calls = read_recorded(folder, reference)
            _check_leaves(spec, reference, paths, calls)
        except Unreadable as error:
            is_whole = False
            where = _key_of(spec, reference)
            findings.add(("models", spec.name, "inputs", *where), str(error), hint=error.hint)
            continue
        recorded[reference] = tuple(
            msgspec.structs.replace(
                call, values={path: call.values[path] for path in sorted(paths & call.values.keys())}
            )
            for call in calls
            if paths & call.values.keys()
        )
    return msgspec.structs.replace(spec, recorded=recorded) if is_whole else None


def _check_leaves(spec: ModelSpec, reference: str, paths: set[str], calls: tuple[RecordedCall, ...]) -> None:
    """Raises Unreadable where a call does not hold values of an input, of the input's dtype."""
    for leaf, own in recorded_references(spec):
        if own != reference:
            continue
        dtypes = {call.dtypes[leaf.path] for call in calls if leaf.path in call.dtypes}
        dtype = leaf.dtype or spec.dtype or "float32"
        if not dtypes:
            known = sorted({path for call in calls for path in call.values})
            raise Unreadable(f"`{reference}` holds no values of `{leaf.path}`", f"it holds those of {', '.join(known)}")
        if dtypes != {dtype}:
            message = f"`{leaf.path}` is {dtype}, and its recorded values are {', '.join(sorted(dtypes))}"
            raise Unreadable(message, "record again, or write another init")


def _key_of(spec: ModelSpec, reference: str) -> tuple[str | int, ...]:
    """The keys of the first input with this reference."""
    for keys, form in tensors_in(spec.inputs):
        inits = form.get("init")
        for init in inits if isinstance(inits, list) else [inits]:
            if isinstance(init, Mapping) and init.get("recorded") == reference:
                return (*keys, "init")
    return ()


def read_recorded(folder: Path, reference: str) -> tuple[RecordedCall, ...]:
    """The calls that a reference names. Raises Unreadable."""
    from safetensors import SafetensorError, deserialize

    file_name, _, name = reference.partition("#")
    data = _bytes_of(folder / file_name)
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata: Mapping[str, str] = header.get("__metadata__") or {}
        if name not in metadata:
            known = ", ".join(sorted(metadata)[:10])
            raise Unreadable(f"{file_name} holds no calls of `{name}`", f"it holds those of {known}" if known else "")
        shapes = msgspec.json.decode(metadata[name], type=list[dict[str, list[int]]])
        return tuple(_call(number, each, name, tensors) for number, each in enumerate(shapes[:MAX_CALLS]))
    except (SafetensorError, msgspec.DecodeError, ValueError, RecursionError) as error:
        if isinstance(error, Unreadable):
            raise
        raise Unreadable(f"{file_name} cannot be read: {error}", "record again") from error


def _call(number: int, shapes: dict[str, list[int]], name: str, tensors: Mapping[str, Any]) -> RecordedCall:
    values, dtypes = {}, {}
    for path, shape in shapes.items():
        tensor = tensors.get(f"{name}/{number}/{path}")
        if tensor is None:
            continue
        if list(tensor["shape"]) != shape or tensor["dtype"] not in DTYPES:
            raise ValueError(f"`{name}/{number}/{path}` is {tensor['dtype']} {tensor['shape']}, not integers {shape}")
        dtypes[path] = DTYPES[tensor["dtype"]]
        values[path] = base64.b64encode(zlib.compress(bytes(tensor["data"]))).decode()
    return RecordedCall(shapes, values, dtypes)


def _bytes_of(file: Path) -> bytes:
    if file.is_symlink():
        raise Unreadable(f"{file.name} is a link", "recorded values are a file beside the manifest")
    if not file.is_file():
        hint = "keep the file that was written with the manifest beside it, or write another init"
        raise Unreadable(f"there is no file {file.name} beside the manifest", hint)
    try:
        if (size := file.stat().st_size) > MAX_FILE:
            raise Unreadable(f"{file.name} has {size} bytes; recorded values may have {MAX_FILE}")
        return file.read_bytes()
    except OSError as error:
        raise Unreadable(f"{file.name} cannot be read: {error.strerror or error}") from error


def values_in(text: str, size: int) -> bytearray:
    """The bytes of recorded values. Raises ValueError where they are not `size` bytes."""
    try:
        inflated = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), size + 1)
    except (zlib.error, ValueError) as error:
        raise ValueError(f"recorded values cannot be read: {error}") from error
    if len(inflated) != size:
        raise ValueError(f"recorded values have {len(inflated)} bytes, and {size} are needed")
    return bytearray(inflated)
