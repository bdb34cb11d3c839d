"""What is reached from an entry of `index.json`: the arrows of an OCI image layout, whichever tool drew them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec

from aotc.errors import StoreError
from aotc.records import decode
from aotc.store import oci
from aotc.store.blobs import Blobs
from aotc.store.names import is_digest
from aotc.store.oci import Descriptor

DOCUMENTS = {
    oci.INDEX,
    oci.MANIFEST,
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
}

_ATTACHED = re.compile(r"(?:.*[:/])?sha256-([0-9a-f]{64})(?:\.[A-Za-z0-9]+)?")

OnFlaw = Callable[[Descriptor, StoreError], None]


class _Arrows(msgspec.Struct, frozen=True, rename="camel"):
    """The descriptors of an index or a manifest. Not `subject`: a signature does not keep what it signs."""

    schema_version: int
    manifests: tuple[Descriptor, ...] = ()
    config: Descriptor | None = None
    layers: tuple[Descriptor, ...] = ()
    blobs: tuple[Descriptor, ...] = ()

    def all(self) -> tuple[Descriptor, ...]:
        config = (self.config,) if self.config else ()
        return (*self.manifests, *config, *self.layers, *self.blobs)


def subject_of(entry: Descriptor) -> str:
    """The digest to which an entry of `index.json` is attached, as cosign's `sha256-<hex>.sig` is; "" for others.

    A bundle's tag may look like that, and is attached to nothing.
    """
    if entry.annotation(oci.MODEL):
        return ""
    match = _ATTACHED.fullmatch(entry.annotation(oci.REF_NAME))
    return f"sha256:{match[1]}" if match else ""


class Reach:
    """Follows arrows; every document is read once."""

    def __init__(self, blobs: Blobs, entries: Iterable[Descriptor] = ()) -> None:
        """`entries`: those of `index.json`, of which the attached ones are reached from what they are attached to."""
        self._blobs = blobs
        self._arrows: dict[str, tuple[Descriptor, ...]] = {}
        self._attached: dict[str, list[Descriptor]] = {}
        for entry in entries:
            if subject := subject_of(entry):
                self._attached.setdefault(subject, []).append(entry)

    def reached(self, roots: Sequence[Descriptor], on_flaw: OnFlaw) -> dict[str, Descriptor]:
        """Every blob reached from the roots, themselves included, by digest.

        `on_flaw` is told of each document that is missing, corrupt or of an unknown version; it may raise.
        """
        found: dict[str, Descriptor] = {}
        pending = list(roots)
        while pending:
            descriptor = pending.pop()
            if descriptor.digest in found or not is_digest(descriptor.digest):
                continue
            found[descriptor.digest] = descriptor
            pending += self._attached.get(descriptor.digest, ())
            if descriptor.media_type in DOCUMENTS:
                try:
                    pending += self._arrows_of(descriptor)
                except StoreError as error:
                    on_flaw(descriptor, error)
        return found

    def _arrows_of(self, descriptor: Descriptor) -> tuple[Descriptor, ...]:
        if descriptor.digest not in self._arrows:
            data = self._blobs.read(descriptor.digest, oci.MANIFEST_LIMIT)
            self._arrows[descriptor.digest] = arrows(data, descriptor.digest)
        return self._arrows[descriptor.digest]


def arrows(data: bytes, where: str) -> tuple[Descriptor, ...]:
    """The descriptors in the bytes of an index or a manifest. Raises CorruptError, SchemaVersionError."""
    document = decode(data, _Arrows)
    oci.check_schema(document.schema_version, where)
    return document.all()


def ignore_flaw(descriptor: Descriptor, error: StoreError) -> None:
    """For what is kept only for a while: as much as can be read."""
