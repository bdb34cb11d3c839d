"""The bytes of `index.json`: of a new store, and after each change of an entry."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import Any

from aotc.digest import canonical_json
from aotc.errors import CorruptError
from aotc.store.layout import oci
from aotc.store.layout.oci import Descriptor, ImageIndex
from aotc.store.reference import Reference

EMPTY_INDEX = canonical_json(ImageIndex(schema_version=oci.OCI_SCHEMA_VERSION, media_type=oci.INDEX, manifests=()))


def created_annotation(at: str) -> dict[str, str]:
    """The annotation that says when a bundle was created; empty where `at` is ""."""
    return {oci.CREATED: at} if at else {}


def with_tag(data: bytes, model: str, tag: str, descriptor: Descriptor) -> bytes:
    """The bytes of an `index.json` in which `model:tag` names a bundle; other entries stay as they are.

    Raises ReferenceFormatError, CorruptError, SchemaVersionError.
    """
    name = Reference(None, model, tag=tag).name
    return with_entry(data, name, tag_entry(name, model, descriptor))


def with_attachment(data: bytes, name: str, manifest: Descriptor) -> bytes:
    """The bytes of an `index.json` in which `name` names an image manifest, like a signature; others stay as they are.

    Raises CorruptError, SchemaVersionError.
    """
    fields = {"mediaType": manifest.media_type, "digest": manifest.digest, "size": manifest.size}
    return with_entry(data, name, {**fields, "annotations": {oci.REF_NAME: name}})


def tag_entry(name: str, model: str, descriptor: Descriptor) -> dict[str, Any]:
    """The entry of a tag that is set now."""
    published = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return _named_entry(name, descriptor, {oci.MODEL: model, oci.PUBLISHED: published})


def _named_entry(name: str, descriptor: Descriptor, more: dict[str, str]) -> dict[str, Any]:
    annotations = {**(descriptor.annotations or {}), oci.REF_NAME: name, **more}
    return {
        "mediaType": descriptor.media_type,
        "digest": descriptor.digest,
        "size": descriptor.size,
        "annotations": annotations,
    }


def with_entry(data: bytes, name: str, entry: dict[str, Any]) -> bytes:
    """The index with the entry called `name` replaced or added."""
    return _rewritten(data, lambda entries: [*(other for other in entries if _ref_name(other) != name), entry])


def without_entries(data: bytes, gone: Collection[tuple[str, str]]) -> bytes:
    """The index without the entries of these names and digests."""
    return _rewritten(data, lambda entries: [one for one in entries if (_ref_name(one), one["digest"]) not in gone])


def _rewritten(data: bytes, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> bytes:
    """Through plain JSON, not through `ImageIndex`: fields and entries that aotc does not know must stay."""
    where = "index.json"
    oci.decode(data, ImageIndex, where)
    try:
        index = json.loads(data)
        index["manifests"] = change(index["manifests"])
        return json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{where} cannot be rewritten: {error}", path=where) from error


def _ref_name(entry: dict[str, Any]) -> str:
    return str((entry.get("annotations") or {}).get(oci.REF_NAME, ""))


def find_attachment(index: ImageIndex, name: str, where: str) -> Descriptor | None:
    """The manifest that the `index.json` at `where` calls `name`. Raises CorruptError for two of them."""
    found = {
        entry.digest: Descriptor(media_type=entry.media_type, digest=entry.digest, size=entry.size)
        for entry in index.manifests
        if entry.media_type == oci.MANIFEST and entry.annotation(oci.REF_NAME) == name
    }
    if len(found) > 1:
        raise CorruptError(
            f"{where} calls {len(found)} manifests {name}: {', '.join(sorted(found))}",
            hint="remove all but one of these entries",
            path=where,
            expected="one manifest",
            actual=f"{len(found)} manifests",
        )
    return next(iter(found.values()), None)
