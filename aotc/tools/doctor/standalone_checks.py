"""Would a bundle load here without torch, by `aotc.standalone.load`."""

from __future__ import annotations

from aotc.standalone.cpu_environment import cpu_environment
from aotc.standalone.loading import select_standalone
from aotc.standalone.misfits import misfits
from aotc.store.layout.bundle import BundleEntry, each_file, read_artifact, read_bundle
from aotc.store.layout.store import Store
from aotc.store.readable import ReadableStore
from aotc.store.reference import Reference, is_remote
from aotc.store.remote.remote_store import RemoteStore
from aotc.tools.doctor.checks import Check, failing
from aotc.tools.doctor.machine import check_code_memory, check_runtime
from aotc.tools.doctor.remotes import open_once
from aotc.tools.doctor.signature_check import check_signature


def check_standalone_bundle(reference: Reference, where: str) -> list[Check]:
    """Whether a load in this process would succeed, as far as the bundle tells without weights.

    Of a remote store, records are read, and no code is fetched.
    """
    checks = check_runtime("bundle", "fail")
    if any(check.status == "fail" for check in checks):
        return checks
    with failing(checks, "bundle", "reference"):
        store: ReadableStore = RemoteStore(open_once(where)) if is_remote(where) else Store.open(where)
        bundle = read_bundle(store, reference)
        targets = ", ".join(entry.target for entry in bundle.artifacts)
        checks.append(Check("bundle", "reference", "ok", f"{reference.name} is {bundle.digest}, for {targets}"))
        checks += [*check_signature(store, bundle, reference), *check_code_memory("bundle")]
        entries = [entry for entry in bundle.artifacts if not entry.is_cache]
        with failing(checks, "bundle", "loads"):
            checks.append(_loads(store, entries))
    return checks


def _loads(store: ReadableStore, entries: list[BundleEntry]) -> Check:
    """Raises EnvironmentMismatchError, CorruptError and StoreError."""
    artifact = select_standalone(entries, lambda entry: read_artifact(store, entry), "cpu", cpu_environment)
    if reasons := misfits(artifact):
        hint = "load it with aotc.load, where torch is installed; or build it with `runtime: standalone`"
        return Check("bundle", "loads", "fail", f"{artifact.target} needs torch: {'; '.join(reasons)}", hint=hint)
    if isinstance(store, Store):
        for file in {file.blob: file for file in each_file(artifact)}.values():
            store.blobs.verify(file)
    return Check("bundle", "loads", "ok", f"aotc.standalone.load takes {artifact.target}")
