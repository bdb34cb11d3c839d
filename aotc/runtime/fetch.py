"""`aotc.fetch`: a bundle of a remote into a local store, and what `aotc.load` of a remote reference does first."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, cast

from aotc.errors import CorruptError, EnvironmentMismatchError, Issue, StoreError
from aotc.runtime.options import options_error, refuse_unknown
from aotc.store.cache_folder import cache_folder
from aotc.store.files.temporary_folders import TemporaryFolder
from aotc.store.layout.bundle import Bundle, BundleEntry, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, is_remote, parse_reference
from aotc.store.remote.fetching import Choose, of_targets
from aotc.store.remote.fetching import fetch as fetch_into
from aotc.store.signing.policy import Trust
from aotc.store.signing.trust import read_trust

if TYPE_CHECKING:
    from aotc.machine.this_host import Compat
    from aotc.records import Artifact
    from aotc.runtime.options import LoadOptions

_log = logging.getLogger("aotc")


def fetch(
    ref: str,
    *,
    store: str | os.PathLike[str] | None = None,
    target: str | None = None,
    trust: Trust | None = None,
    compat: Compat = "minor",
    **moved: Never,
) -> str:
    """Bring a bundle from a registry or object storage into a local store, so that `aotc.load` needs no network.

    An image build or an init container calls this, and the service `aotc.load`. The bundle's tag names it in the local
    store, too. What is there already is not fetched again.

    Args:
        ref: `oci://HOST[:PORT]/REPOSITORY[:tag]` or `…@sha256:…`, or `URL#model[:tag]` of object storage.
        store: the folder of the local store, made if there is none; else `$AOTC_STORE`, else `$AOTC_CACHE_DIR/store`.
        target: fetch the artifact for this target, as `cuda:sm_90`; else for each kind of device of this machine the
            most capable one that it runs; where torch is not installed, that which `aotc.standalone.load` runs.
        trust: the keys and the time, as for `aotc.load`. Whether an artifact has run or passed is for the load to ask.
        compat: without a target, what this machine runs by `aotc.load(…, compat=compat)`.

    Returns:
        The reference to load: `STORE#model@sha256:…`.

    Raises:
        ReferenceFormatError: `ref` is not a reference to a remote. NotFoundError: it names nothing there.
        RemoteError: the remote was not reached in time, or refuses. StoreError: the folder cannot be used.
        CorruptError: bytes are not what their digest says. SignatureError: the bundle is not signed as asked.
        EnvironmentMismatchError: no artifact of the bundle runs on this machine.

    Example:
        >>> url = Path("aotc-store").resolve().as_uri()  # or oci://ghcr.io/team/quickstart:latest
        >>> ref = aotc.fetch(f"{url}#quickstart", store="fetched")
        >>> ref.partition(":")[0]
        'fetched#quickstart@sha256'
        >>> compiled = aotc.load(ref, module)
    """
    refuse_unknown(fetch, moved)
    if not isinstance(cast("Any", trust), Trust | None):
        raise options_error([("trust", trust, "an aotc.Trust")], "fetch")
    reference = parse_reference(ref)
    path = local_store(store)
    choose = of_targets(target) if target else functools.partial(runnable, compat=compat)
    copied = fetch_into(
        reference, path, choose, trust=read_trust(trust.keys, trust.signed_after) if trust else read_trust()
    )
    return str(Reference(str(path), parse_reference(copied.reference).model, digest=copied.digest))


def local_store(store: str | os.PathLike[str] | None = None) -> Path:
    """Where bundles are fetched to: `store`, else `$AOTC_STORE` where it is a folder, else `store` in the cache folder.

    Raises StoreError without a home.
    """
    set_here = os.environ.get("AOTC_STORE")
    if store is None and (not set_here or is_remote(set_here)):
        return cache_folder() / "store"
    return Path(store or set_here or "")


ReadEntry = Callable[[BundleEntry], "Artifact"]
Select = Callable[[Sequence[BundleEntry], ReadEntry], "Artifact"]
"""The most capable artifact that this machine runs. Raises EnvironmentMismatchError."""


def runnable(entries: Sequence[BundleEntry], read: ReadEntry, compat: Compat = "minor") -> list[BundleEntry]:
    """For each kind of device of this machine the most capable artifact. Raises EnvironmentMismatchError."""
    devices = _without_torch() if find_spec("torch") is None else _with_torch(compat)
    chosen = [entry for entry in entries if entry.is_cache]  # compared when it is restored
    rejected: list[Issue] = []
    for device, select in devices.items():
        ours = [entry for entry in entries if entry.target.partition(":")[0] == device]
        try:
            target = select(ours, read).target if ours else ""
        except EnvironmentMismatchError as error:
            rejected += error.issues or (Issue(error.message, hint=error.hint),)
        else:
            chosen += [entry for entry in ours if entry.target == target]
    if not chosen:
        there = ", ".join(entry.target for entry in entries)
        raise EnvironmentMismatchError(
            f"the bundle holds {there}; none of it runs on this machine",
            issues=tuple(rejected) or (Issue(f"this machine has {' and '.join(devices)}"),),
            hint="say which to fetch for another machine: target=…, or `aotc fetch --target`",
        )
    return chosen


def _with_torch(compat: Compat) -> dict[str, Select]:
    """By device: what `aotc.load` would take."""
    import torch

    from aotc.runtime.select import select_artifact

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {
        device.type: lambda entries, read, device=device: select_artifact(entries, device, read, compat)  # type: ignore[misc]
        for device in devices
    }


def _without_torch() -> dict[str, Select]:
    """By device: what `aotc.standalone.load` would take."""
    import subprocess

    import msgspec

    from aotc.machine.processes import child_command, child_environment
    from aotc.records import Environment
    from aotc.standalone.cpu_environment import cpu_environment
    from aotc.standalone.loading import select_standalone

    def first_gpu() -> Environment:
        """Another process opens it: one that is forked from this one can still do so."""
        command = child_command("aotc.standalone.gpu_environment")
        ran = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
        try:
            return msgspec.json.decode(ran.stdout, type=Environment)
        except ValueError:
            said = [line for line in ran.stderr.splitlines() if line][-1:] or [f"status {ran.returncode}"]
            raise EnvironmentMismatchError(f"the GPU cannot be looked at: {said[0]}") from None

    return {
        "cpu": functools.partial(select_standalone, device="cpu", this_machine=cpu_environment),
        "cuda": functools.partial(select_standalone, device="cuda", this_machine=first_gpu),
    }


def remove_damaged(store: Store, error: CorruptError) -> None:
    """Take a damaged blob out of a store, so that it is fetched again. Raises `error` where it is about another one."""
    damaged = error.fields.get("digest")
    if damaged is None or error.fields.get("path") != str(store.blobs.path(damaged)):
        raise error
    _log.warning("%s; it is fetched again", error.message)
    store.blobs.remove_damaged(damaged)


def fetch_for_load(source: Reference, choose: Choose, options: LoadOptions) -> tuple[Store, Bundle]:
    """The local store into which the bundle was fetched, and the bundle: of it, what `choose` chooses.

    Where the cache folder cannot be written, a temporary folder takes its place, with a warning.
    """
    cache, trusted = options.cache, read_trust(*options.signers)
    refused: list[Issue] = []

    def fetch_to(folder: Path) -> tuple[Store, Bundle] | None:
        """Fetch into `folder`; None if the folder cannot be written."""
        path = folder / "store"
        try:
            copied = fetch_into(source, path, choose, trust=trusted)
        except StoreError as error:
            if not _is_about(error, path):
                raise
            refused.append(Issue(error.message, where=str(folder), hint=error.hint))
            return None
        store, model = Store.open(path), parse_reference(copied.reference).model
        return store, read_bundle(store, Reference(None, model, digest=copied.digest))

    try:
        folder = Path(cache) if cache else cache_folder()
    except StoreError as error:
        refused.append(Issue(error.message, hint=error.hint))
    else:
        if fetched := fetch_to(folder):
            return fetched
    for parent in (None, "/dev/shm"):
        try:
            temporary = TemporaryFolder("aotc-fetch-", parent)
        except OSError as error:
            refused.append(Issue(str(error)))
            continue
        try:
            fetched = fetch_to(temporary.path)
        except BaseException:
            temporary.remove()
            raise
        if fetched is None:
            temporary.remove()
        else:
            weakref.finalize(fetched[0], _remove, temporary, os.getpid())
            _log.warning(
                "%s is fetched to %s, for this process alone: %s; set AOTC_CACHE_DIR to a folder that can be written",
                source,
                temporary.path,
                refused[0].message,
            )
            return fetched
    raise StoreError(
        "no folder can hold what is fetched",
        hint="set AOTC_CACHE_DIR to a folder with free space that can be written",
        issues=tuple(refused),
    )


def _is_about(error: StoreError, folder: Path) -> bool:
    """Whether the system refused something in `folder`, so that another may do."""
    path = Path(error.fields.get("path") or "/")
    return error.fields.get("errno") is not None and path.is_relative_to(folder)


def _remove(folder: TemporaryFolder, process: int) -> None:
    if os.getpid() == process:  # a forked child leaves its parent's
        folder.remove()
