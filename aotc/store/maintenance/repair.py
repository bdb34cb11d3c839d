"""`aotc fsck --repair`: removes damaged files, restores `index.json` and `oci-layout`, and reports each change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import AotcError
from aotc.store.files.disk import read_limited, typed_errors
from aotc.store.files.writing import remove_file, write_atomically
from aotc.store.layout import oci
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.check_record import check_entry
from aotc.store.layout.index import created_annotation
from aotc.store.layout.oci import Descriptor, ImageIndex
from aotc.store.layout.reader import INDEX_LIMIT
from aotc.store.layout.store import Store
from aotc.store.maintenance.reports import Finding, Repair
from aotc.store.maintenance.survey import survey
from aotc.store.reference import Reference


def repair_all(store: Store, findings: Iterable[Finding]) -> Iterator[Repair]:
    """Repair blobs before the documents that name them, under the lock of gc. Raises StoreError."""
    errors = [finding for finding in findings if finding.severity == "error"]
    for finding in errors:
        if finding.kind in ("blob corrupt", "unit"):
            remove_file(store.path, store.path / finding.path)
            yield Repair(finding.path, f"removed: {finding.message}")
    for finding in errors:
        if finding.kind == "layout" and not (store.path / "oci-layout").exists():
            with store.lock():
                store.finish_layout()
            yield Repair(finding.path, "wrote it again")
        elif finding.kind == "index":
            yield Repair(finding.path, _restore_index(store))
        elif finding.kind == "tag" and finding.digest and store.blobs.size(finding.digest) is None:
            store.remove_entries([entry for entry in store.entries() if entry.digest == finding.digest])
            yield Repair(finding.path, f"removed the tag: {finding.digest}, which it named, is missing or was corrupt")


def _restore_index(store: Store) -> str:
    """Bundles are found by their bytes. Their tags are lost with the index, so they get new names."""
    path = store.path / "index.json"
    with store.lock():
        kept = ""
        if path.exists():
            with typed_errors("read", path):
                data = read_limited(path, INDEX_LIMIT)
            aside = f".aotc/index.json.damaged-{sha256_bytes(data)[7:19]}"
            write_atomically(store.path / aside, data)
            kept = f"; the damaged one is kept as {aside}"
        bundles = tuple(sorted(_sound_bundles(store), key=lambda bundle: bundle.annotation(oci.REF_NAME)))
        index = ImageIndex(schema_version=oci.OCI_SCHEMA_VERSION, media_type=oci.INDEX, manifests=bundles)
        write_atomically(path, canonical_json(index))
    names = ", ".join(bundle.annotation(oci.REF_NAME) for bundle in bundles) or "no bundle"
    again = f"; to tag them again: `aotc tag {bundles[0].annotation(oci.REF_NAME)} latest`" if bundles else ""
    return f"made it anew from the sound bundles, whose tags are lost: {names}{again}{kept}"


def _sound_bundles(store: Store) -> Iterator[Descriptor]:
    """Every bundle that can be loaded, as a whole or in part, under the tag `recovered-<its first 12 digits>`."""
    for blob in survey(store.path):
        if blob.kind == "blob" and blob.size <= oci.MANIFEST_LIMIT:
            try:
                index = oci.read_document(store.blobs, blob.digest, ImageIndex)
                model = index.annotation(oci.MODEL)
                name = Reference(None, model, tag=f"recovered-{blob.digest[7:19]}").name
                artifacts = read_bundle(store, Reference(None, model, digest=blob.digest)).artifacts
                there = [artifact for artifact in artifacts if store.blobs.size(artifact.digest) is not None]
                for artifact in there:
                    check_entry(store, artifact)
            except AotcError:
                continue
            annotations = {oci.REF_NAME: name, oci.MODEL: model, **created_annotation(index.annotation(oci.CREATED))}
            sparse = {oci.SPARSE: "true"} if len(there) < len(artifacts) else {}
            if there:
                yield Descriptor(oci.INDEX, blob.digest, blob.size, annotations={**annotations, **sparse})
