"""Reachability from the entries of `index.json`: by the descriptors of an OCI layout of any tool."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from aotc.errors import StoreError
from aotc.records import decode
from aotc.store.layout import oci
from aotc.store.layout.blobs import Blobs
from aotc.store.layout.names import is_digest
from aotc.store.layout.oci import Descriptor, other_schema

_DOCUMENTS = {
    oci.INDEX,
    oci.MANIFEST,
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
}

_ATTACHED = re.compile(r"(?:.*[:/])?sha256-([0-9a-f]{64})(?:\.[A-Za-z0-9]+)?")

OnFlaw = Callable[[StoreError], None]


class _Document(msgspec.Struct, frozen=True, rename="camel"):
    """The descriptors of an index or a manifest. Not `subject`: a signature does not keep what it signs."""

    schema_version: int
    manifests: tuple[Descriptor, ...] = ()
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    blobs: tuple[Descriptor, ...] = ()


def subject_of(entry: Descriptor) -> str:
    """The digest to which an entry of `index.json` is attached, as cosign's `sha256-<hex>.sig` is; "" for others.

    A bundle's tag may look like that, and is attached to nothing.
    """
    match = None if entry.annotation(oci.MODEL) else _ATTACHED.fullmatch(entry.annotation(oci.REF_NAME))
    return f"sha256:{match[1]}" if match else ""


class Reach:
    """Follows descriptors; every document is read once."""

    def __init__(self, blobs: Blobs, entries: Iterable[Descriptor] = ()) -> None:
        """`entries`: those of `index.json`, of which the attached ones are reached from what they are attached to."""
        self._blobs = blobs
        self._read: dict[str, tuple[Descriptor, ...]] = {}
        self._attached: dict[str, list[Descriptor]] = {}
        for entry in entries:
            if subject := subject_of(entry):
                self._attached.setdefault(subject, []).append(entry)

    def reached(self, roots: Sequence[Descriptor], on_flaw: OnFlaw) -> dict[str, Descriptor]:
        """Every blob reached from the roots, themselves included, by digest; of a sparse root, those that are there.

        `on_flaw` is told of each document that is missing, corrupt or of an unknown version; it may raise.
        """
        sparse = {root.digest for root in roots if root.annotation(oci.SPARSE) == "true"}
        found: dict[str, Descriptor] = {}
        pending = list(roots)
        while pending:
            descriptor = pending.pop()
            if descriptor.digest in found or not is_digest(descriptor.digest):
                continue
            found[descriptor.digest] = descriptor
            pending += self._attached.get(descriptor.digest, ())
            if descriptor.media_type in _DOCUMENTS:
                try:
                    named = self.named_by(descriptor.digest)
                except StoreError as error:
                    on_flaw(error)
                    continue
                may_lack = descriptor.digest in sparse
                pending += [one for one in named if not may_lack or self._blobs.size(one.digest) is not None]
        return found

    def named_by(self, digest: str) -> tuple[Descriptor, ...]:
        """The descriptors in an index or a manifest. Raises CorruptError, NotFoundError, SchemaVersionError."""
        if digest not in self._read:
            document = decode(self._blobs.read(digest, oci.MANIFEST_LIMIT), _Document)
            if document.schema_version != oci.OCI_SCHEMA_VERSION:
                raise other_schema(document.schema_version, oci.OCI_SCHEMA_VERSION, digest)
            config = (document.config,) if document.config else ()
            self._read[digest] = (*document.manifests, *config, *document.layers, *document.blobs)
        return self._read[digest]
