"""Documents of an image layout that other tools wrote, and errors of those that aotc cannot read."""

from __future__ import annotations

import msgspec

from aotc.errors import CorruptError, SchemaVersionError, StoreError
from aotc.records import decode

LAYOUT_VERSION = "1.0.0"


class _Layout(msgspec.Struct, frozen=True, rename="camel"):
    """The file `oci-layout`."""

    image_layout_version: str


def check_layout(data: bytes, where: str) -> None:
    """Raises CorruptError and SchemaVersionError for the bytes of an `oci-layout` that no aotc reads."""
    try:
        found = decode(data, _Layout).image_layout_version
    except CorruptError as error:
        raise unreadable(where, error) from error
    if found != LAYOUT_VERSION:
        hint = "use a newer aotc, or copy the store with `skopeo copy` into a layout of that version"
        raise _other(f"{where} says image layout version", found, LAYOUT_VERSION, hint)


def unreadable(where: str, error: CorruptError) -> CorruptError:
    return CorruptError(f"{where} cannot be read: {error.__cause__}", path=where)


def other_document(found: tuple[int, str], supported: tuple[int, str], where: str) -> StoreError:
    """Of an index or a manifest with an unknown `schemaVersion`, or else another media type."""
    if found[0] != supported[0]:
        return other_schema(found[0], supported[0], where)
    message = f"{where} has the media type {found[1]!r}, not {supported[1]!r}"
    return CorruptError(message, expected=supported[1], actual=found[1])


def other_schema(found: int, supported: int, where: str) -> SchemaVersionError:
    return _other(f"{where} has schemaVersion", found, supported, "it was not written by aotc, or by a newer one")


def _other(says: str, found: str | int, supported: str | int, hint: str) -> SchemaVersionError:
    message = f"{says} {found!r}; this aotc reads {supported!r}"
    return SchemaVersionError(message, hint=hint, found=found, supported=supported)
