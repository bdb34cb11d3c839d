"""What `aotc fsck --repair` does: it removes what cannot be right, and restores what is certain. It says all it did."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from aotc.digest import canonical_json, sha256_bytes
from aotc.errors import AotcError
from aotc.store import oci
from aotc.store.bundle import read_artifact, read_bundle
from aotc.store.disk import files_in, read_limited, typed_errors, write_atomically
from aotc.store.findings import Finding, Kind, Repair
from aotc.store.freed import remove_file
from aotc.store.layout import INDEX_LIMIT, Store
from aotc.store.names import is_digest
from aotc.store.oci import Descriptor, Index
from aotc.store.reference import Reference

Action = Callable[[Store, Finding], str]


def repair_all(store: Store, findings: Iterable[Finding]) -> list[Repair]:
    """Repair what can be; under the lock of gc. Raises StoreError."""
    done = []
    for finding in findings:
        action = _ACTIONS.get(finding.kind)
        if action is not None and (said := action(store, finding)):
            done.append(Repair(finding.path, said))
    return done


def _remove(store: Store, finding: Finding) -> str:
    """A folder stays: aotc did not make it, and what is in it is somebody's."""
    path = store.path / finding.path
    if path.is_dir() and not path.is_symlink():
        return ""
    remove_file(store.path, path)
    return f"removed: {finding.message}"


def _remove_unit(store: Store, finding: Finding) -> str:
    return _remove(store, finding) if finding.severity == "error" else ""


def _mend_permissions(store: Store, finding: Finding) -> str:
    path = store.path / finding.path
    with typed_errors("change the permissions of", path):
        mode = stat.S_IMODE(path.lstat().st_mode)
        better = (mode | stat.S_IRUSR) & ~stat.S_IWOTH
        path.chmod(better)
    return f"changed its permissions from {mode:04o} to {better:04o}"


def _remove_tag(store: Store, finding: Finding) -> str:
    """Only a tag whose own bundle is gone: nobody can ever load it."""
    if store.blobs.size(finding.digest) is not None:
        return ""
    gone = [
        entry
        for entry in store.entries()
        if entry.digest == finding.digest and (entry.annotation(oci.REF_NAME) or entry.digest) == finding.path
    ]
    store.remove_entries(gone)
    return f"removed the tag: {finding.digest}, which it named, is missing or was corrupt"


def _write_layout(store: Store, finding: Finding) -> str:
    """A lost `oci-layout` says nothing that is not known; one of another version is left alone."""
    if (store.path / "oci-layout").exists() or not (store.path / "index.json").exists():
        return ""
    with store.lock():
        store.finish_layout()
    return "wrote it again"


def _restore_index(store: Store, finding: Finding) -> str:
    """What is certain are the bundles; what they were called is lost with the index, so they get names of their own."""
    path = store.path / "index.json"
    with store.lock():
        aside = ""
        if path.exists():
            with typed_errors("read", path):
                data = read_limited(path, INDEX_LIMIT)
            if not _is_garbled(data):
                return ""  # of another version, or mended meanwhile
            aside = f".aotc/index.json.damaged-{sha256_bytes(data)[7:19]}"
            write_atomically(store.path / aside, data)
        bundles = sorted(_sound_bundles(store), key=lambda bundle: bundle.annotation(oci.CREATED))
        index = Index(schema_version=oci.OCI_SCHEMA_VERSION, media_type=oci.INDEX, manifests=tuple(bundles))
        write_atomically(path, canonical_json(index))
    names = ", ".join(bundle.annotation(oci.REF_NAME) for bundle in bundles) or "no bundle"
    kept = f"; the damaged one is kept as {aside}" if aside else ""
    return f"made it anew from the sound bundles, whose tags are lost: {names}{kept}"


def _is_garbled(data: bytes) -> bool:
    try:
        oci.decode_index(data, "index.json")
    except AotcError as error:
        return "found" not in error.fields
    return False


def _sound_bundles(store: Store) -> Iterator[Descriptor]:
    """Every bundle that can be loaded, under the tag `recovered-<its first 12 digits>`."""
    for path in files_in(store.blobs.folder / "sha256"):
        digest = f"sha256:{path.name}"
        if not is_digest(digest) or not _is_small(path):
            continue
        try:
            index = oci.decode_index(store.blobs.read(digest, oci.MANIFEST_LIMIT), digest)
            model = index.annotation(oci.MODEL)
            name = Reference(None, model, tag=f"recovered-{path.name[:12]}").name
            for artifact in read_bundle(store, Reference(None, model, digest=digest)).artifacts:
                read_artifact(store, artifact)
        except AotcError:
            continue
        annotations = {oci.REF_NAME: name, oci.MODEL: model, oci.CREATED: index.annotation(oci.CREATED)}
        yield Descriptor(oci.INDEX, digest, path.stat().st_size, annotations)


def _is_small(path: Path) -> bool:
    return path.is_file() and path.stat().st_size <= oci.MANIFEST_LIMIT


_ACTIONS: dict[Kind, Action] = {
    "layout": _write_layout,
    "index": _restore_index,
    "tag": _remove_tag,
    "blob size": _remove,
    "blob digest": _remove,
    "blob type": _remove,
    "blob permissions": _mend_permissions,
    "unit": _remove_unit,
    "temporary": _remove,
    "stale lock": _remove,
}
