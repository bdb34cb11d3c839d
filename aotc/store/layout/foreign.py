"""Documents of an image layout that other tools wrote, and errors of those that aotc cannot read."""

from __future__ import annotations

import msgspec

from aotc.errors import CorruptError, SchemaVersionError


class Layout(msgspec.Struct, frozen=True, rename="camel"):
    """The file `oci-layout`."""

    image_layout_version: str


def other_layout(found: str, supported: str, where: str) -> SchemaVersionError:
    hint = "use a newer aotc, or copy the store with `skopeo copy` into a layout of that version"
    return _other(f"{where} says image layout version", found, supported, hint)


def check_schema(found: int, supported: int, where: str) -> None:
    """Raises SchemaVersionError for an unknown `schemaVersion` of an index or a manifest."""
    if found != supported:
        raise _other(f"{where} has schemaVersion", found, supported, "it was not written by aotc, or by a newer one")


def _other(says: str, found: str | int, supported: str | int, hint: str) -> SchemaVersionError:
    message = f"{says} {found!r}; this aotc reads {supported!r}"
    return SchemaVersionError(message, hint=hint, found=found, supported=supported)


def other_type(found: str, expected: str, where: str) -> CorruptError:
    return CorruptError(f"{where} has the media type {found!r}, not {expected!r}", expected=expected, actual=found)
