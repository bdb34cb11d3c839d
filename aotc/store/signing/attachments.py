"""Documents that are attached to a bundle: an image manifest under a name of its own, with one document a layer.

cosign's convention for signatures and attestations: the name `sha256-<hex of the bundle>.<kind>` names an image
manifest, in a layout in `index.json`, in a registry as a tag of the same repository.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import CorruptError, Issue, NotFoundError
from aotc.records import decode
from aotc.store.layout import oci
from aotc.store.layout.names import hex_of
from aotc.store.layout.oci import Descriptor
from aotc.store.layout.store import Store
from aotc.store.readable import ReadableStore

IMAGE_CONFIG = "application/vnd.oci.image.config.v1+json"
SIGNATURE = "dev.cosignproject.cosign/signature"

COUNT_LIMIT = 100
"""Layers that a manifest is written with."""
READ_LIMIT = 2 * COUNT_LIMIT
"""Layers of a manifest that are looked at, each of which is a request: other tools append as many as they like."""

_log = logging.getLogger("aotc")

_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"  # as older versions of cosign wrote it

ReadBlob = Callable[[str, str, int], bytes]
"""The bytes of a blob or manifest by its media type and digest, of at most so many bytes. They are checked here."""

Resolve = Callable[[str], Descriptor | None]
"""The manifest that a tag names, None without one. `Store.attachment` is one."""


class DocumentKind(NamedTuple):
    """A kind of documents: how the name of their manifest ends, the media type of their layers, the bytes that one may
    have, and how messages call them."""

    suffix: str
    media_type: str
    limit: int
    called: str


class Layer(NamedTuple):
    """One document, and the annotations of its layer."""

    data: bytes
    annotations: tuple[tuple[str, str], ...] = ()


class ReadLayers(NamedTuple):
    """The layers of one media type, what was wrong with those that could not be read, the layers of other types, and
    how many layers there are in all."""

    layers: list[Layer]
    issues: list[Issue]
    others: list[Descriptor]
    total: int = 0


class Encoded(NamedTuple):
    """A manifest, and the blobs that it names: its config and the layers."""

    manifest: bytes
    blobs: tuple[bytes, ...]

    @property
    def descriptor(self) -> Descriptor:
        return described(oci.MANIFEST, self.manifest)


def reader_of(store: ReadableStore) -> ReadBlob:
    """How attached documents are read from a folder or a remote."""
    return lambda media_type, digest, limit: store.blobs.read(digest, limit)


def attached_name(digest: str, kind: DocumentKind) -> str:
    """The name of the documents of a kind of the bundle with that digest. Raises CorruptError for no digest."""
    return f"sha256-{hex_of(digest)}.{kind.suffix}"


class _Manifest(msgspec.Struct, frozen=True, rename="camel"):
    schema_version: int
    layers: tuple[Descriptor, ...]
    media_type: str = oci.MANIFEST


def read_layers(read: ReadBlob, descriptor: Descriptor, kind: DocumentKind) -> ReadLayers:
    """The documents of a kind in a manifest. Layers of other types are passed over: cosign allows them. So are those
    behind the first READ_LIMIT, with an issue.

    Raises CorruptError where it is not a manifest, NotFoundError where it is missing, StoreError.
    """
    manifest = decode(_checked(read, descriptor, oci.MANIFEST_LIMIT), _Manifest)
    if manifest.schema_version != oci.OCI_SCHEMA_VERSION or manifest.media_type not in (oci.MANIFEST, _DOCKER_MANIFEST):
        found = f"{manifest.media_type[:100]!r}, schema version {manifest.schema_version}"
        raise CorruptError(
            f"{descriptor.digest} holds no {kind.called}: it is {found}", expected=oci.MANIFEST, actual=found
        )
    layers: list[Layer] = []
    issues: list[Issue] = []
    others: list[Descriptor] = []
    if (count := len(manifest.layers)) > READ_LIMIT:
        issues.append(
            Issue(
                f"there are {count} {kind.called}; the first {READ_LIMIT} are looked at",
                expected=f"at most {READ_LIMIT}",
                actual=str(count),
                hint="`aotc prune REF` removes those of keys that are not trusted",
            )
        )
    for layer in manifest.layers[:READ_LIMIT]:
        where = f"layer {layer.digest[:19]}"
        try:
            hex_of(layer.digest)
            if layer.media_type != kind.media_type:
                others.append(layer)
                issues.append(Issue(f"it is not one of the {kind.called} but {layer.media_type[:100]!r}", where=where))
                continue
            annotations = tuple(sorted((layer.annotations or {}).items()))
            layers.append(Layer(_checked(read, layer, kind.limit), annotations))
        except (CorruptError, NotFoundError) as error:
            issues.append(Issue(error.message, where=where))
    return ReadLayers(layers, issues, others, count)


def _checked(read: ReadBlob, descriptor: Descriptor, limit: int) -> bytes:
    data = read(descriptor.media_type, descriptor.digest, limit)
    actual = sha256_bytes(data)
    if actual != descriptor.digest or len(data) > limit:
        raise CorruptError(
            f"{descriptor.digest} has other bytes: {len(data)} with the digest {actual}",
            hint="whatever keeps or sends it is broken, or is changing it",
            expected=descriptor.digest,
            actual=actual,
        )
    return data


def encode_layers(
    kind: DocumentKind,
    layers: Sequence[Layer],
    others: Sequence[Descriptor] = (),
    *,
    artifact_type: str = "",
    subject: Descriptor | None = None,
) -> Encoded:
    """The manifest of the first COUNT_LIMIT of these layers, and of layers of other types that are there already.

    With `subject`, a registry lists the manifest as a referrer of it.
    """
    if (more := len(layers) + len(others) - COUNT_LIMIT) > 0:
        _log.warning("%d %s of a bundle are left out: it keeps %d", more, kind.called, COUNT_LIMIT)
    layers = layers[:COUNT_LIMIT]
    named = (*(_layer(kind.media_type, layer) for layer in layers), *others[: COUNT_LIMIT - len(layers)])
    config = _config([layer.digest for layer in named])
    manifest = oci.ImageManifest(
        schema_version=oci.OCI_SCHEMA_VERSION,
        media_type=oci.MANIFEST,
        config=described(IMAGE_CONFIG, config),
        layers=named,
        artifact_type=artifact_type,
        subject=subject,
    )
    return Encoded(canonical_json(manifest), (config, *(layer.data for layer in layers)))


def most_wanted_first(
    layers: Sequence[Layer], new: Collection[Layer], trusted: Callable[[Layer], bool], others: int = 0
) -> list[Layer]:
    """As they are, if a manifest takes them all beside `others`; else the trusted ones first, then those of `new`."""
    if len(layers) + others <= COUNT_LIMIT:
        return list(layers)
    return sorted(layers, key=lambda layer: (not trusted(layer), layer not in new))


def write_attached(store: Store, encoded: Encoded) -> Descriptor:
    """Put the blobs into the store, the manifest last. Raises StoreError."""
    for data in (*encoded.blobs, encoded.manifest):
        store.blobs.put_bytes(data)
    return encoded.descriptor


def described(media_type: str, data: bytes) -> Descriptor:
    return Descriptor(media_type=media_type, digest=sha256_bytes(data), size=len(data))


def _layer(media_type: str, layer: Layer) -> Descriptor:
    return msgspec.structs.replace(described(media_type, layer.data), annotations=dict(layer.annotations) or None)


def _config(layers: Sequence[str]) -> bytes:
    """An image's config that says nothing, as cosign's is: registries and tools want one."""
    return canonical_json(
        {"architecture": "", "config": {}, "os": "", "rootfs": {"diff_ids": list(layers), "type": "layers"}}
    )
