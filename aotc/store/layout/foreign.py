"""Documents of an image layout that other tools wrote, and errors of those that aotc cannot read."""

from __future__ import annotations

import msgspec

from aotc.errors import CorruptError, SchemaVersionError


class Layout(msgspec.Struct, frozen=True, rename="camel"):
    """The file `oci-layout`."""

    image_layout_version: str


def other_layout(found: str, supported: str, where: str) -> SchemaVersionError:
    return SchemaVersionError(
        f"{where} says image layout version {found!r}; this aotc reads {supported!r}",
        hint="use a newer aotc, or copy the store with `skopeo copy` into a layout of that version",
        found=found,
        supported=supported,
    )


def check_schema(found: int, supported: int, where: str) -> None:
    """Raises SchemaVersionError for an unknown `schemaVersion` of an index or a manifest."""
    if found != supported:
        raise SchemaVersionError(
            f"{where} has schemaVersion {found}; this aotc reads {supported}",
            hint="it was not written by aotc, or by a newer one",
            found=found,
            supported=supported,
        )


def other_type(found: str, expected: str, where: str) -> CorruptError:
    return CorruptError(f"{where} has the media type {found!r}, not {expected!r}", expected=expected, actual=found)
