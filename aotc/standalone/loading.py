"""`aotc.standalone.load`: from a reference to a callable, without torch."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from aotc.errors import BindError, Issue, UnverifiedError
from aotc.machine.compatibility import rules_of_host
from aotc.machine.this_host import numbers, refuse_free_threading
from aotc.records import Artifact, Environment
from aotc.selection import ForTarget, most_capable, of_target
from aotc.standalone.cpu_environment import cpu_environment, open_cpu
from aotc.standalone.gpu_environment import gpu_environment, gpu_mismatches, gpu_number
from aotc.standalone.shim_library import opened_library
from aotc.standalone.standalone_model import StandaloneModel, StandaloneOnMiss
from aotc.standalone.state_tensors import StandaloneWeights, state_tensors
from aotc.standalone.unsupported import refuse_unsupported
from aotc.store.layout.bundle import read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import is_remote, parse_reference, store_named, store_of
from aotc.store.signing.policy import Trust

OLDEST, NEWEST = (2, 11), (2, 15)
"""The versions of torch whose code the shim was made for: what such code calls is what it has."""

_LIMIT = (256 << 20) + (1 << 20)
"""Bytes that an artifact's file of constants may have."""
_TRUST = {"AOTC_TRUSTED_KEYS", "AOTC_SIGNED_AFTER", "AOTC_REQUIRE"}

C = TypeVar("C", bound=ForTarget)

_log = logging.getLogger("aotc")


def load(
    ref: str,
    *,
    weights: StandaloneWeights | None = None,
    store: str | os.PathLike[str] | None = None,
    target: str | None = None,
    device: str | None = None,
    on_miss: StandaloneOnMiss = "error",
    concurrency: int = 1,
    cache: str | os.PathLike[str] | None = None,
    trust: Trust | None = None,
) -> StandaloneModel:
    """Compiled code with weights, ready to be called, in a process that needs no torch.

    Args:
        ref: `[STORE#]model[:tag]` or `[STORE#]model@sha256:…`, in a local store: fetch a remote one first.
        weights: a safetensors file, a shard index, a folder that holds either, or a mapping of names to arrays. None
            for frozen weights. A file is mapped; arrays are used where they lie.
        store: the store's folder, where `ref` names none; else `$AOTC_STORE`, else `aotc-store`.
        target: take the artifact of this target; else the most capable that this machine runs.
        device: "cuda", "cuda:1" and so on: run on that GPU, with the driver alone; "cpu" or None: on the CPU.
        on_miss: for a call that no bucket takes: "error" raises MissError; a callable is called as
            `on_miss(error, *args, **kwargs)` and its result is returned.
        concurrency: how many calls may be inside one bucket's library at a time; further ones wait. On a GPU calls
            follow one another.
        cache: the folder of what `trust` remembers; else `$AOTC_CACHE_DIR`, else the user's cache folder.
        trust: `aotc.Trust(keys=…, signed_after=…, allow_untested=…)`; keys and a time may be `$AOTC_TRUSTED_KEYS` and
            `$AOTC_SIGNED_AFTER`.

    Raises:
        ReferenceFormatError, NotFoundError, StoreError, CorruptError, SchemaVersionError, SignatureError: as of
            `aotc.load`.
        EnvironmentMismatchError: no artifact of the bundle runs on this machine; every mismatch is listed.
        UnverifiedError: the code has never run where it was built.
        MemoryLimitError: the GPU has too little memory.
        BindError: the weights are not those that the artifact was built for, with every mismatch; or an option.
        LibraryError: the artifact has what needs torch: all of it is listed. Or a library cannot be opened.

    Example:
        >>> import numpy, aotc.standalone  # doctest: +SKIP
        >>> model = aotc.standalone.load("aotc-store#quickstart", weights="model.safetensors")  # doctest: +SKIP
        >>> model(numpy.zeros((1, 128, 256), numpy.float32)).shape  # doctest: +SKIP
        (1, 128, 256)
    """
    _check_options(ref, on_miss, concurrency, trust)
    refuse_free_threading()
    reference = parse_reference(ref)
    where = store_of(store_named(reference, os.fspath(store) if store else None, "store="))
    if is_remote(where):
        hint = f"fetch it first, where the network is: `aotc fetch {ref} --store STORE`, and load STORE#MODEL"
        raise BindError(f"{where} is a remote store, and a load without torch reads local ones", hint=hint)
    opened = StoreReader.open(Path(where))
    bundle = read_bundle(opened, reference)
    signed = (trust.keys, trust.signed_after) if trust else (None, None)
    if signed != (None, None) or _TRUST & os.environ.keys():
        from aotc.store.signing.trust import check_bundle

        check_bundle(opened, bundle, reference, *signed, cache)
    here = [entry for entry in bundle.artifacts if opened.blobs.has(entry.digest, entry.size)]
    among = of_target(here if here and target is None else bundle.artifacts, target)
    read = functools.cache(functools.partial(read_artifact, opened))
    gpu = gpu_number(device)
    this_machine = cpu_environment if gpu is None else functools.partial(gpu_environment, gpu)
    artifact = select_standalone(among, read, "cpu" if gpu is None else "cuda", this_machine)
    _check_trust(artifact, trust)
    refuse_unsupported(artifact)
    state = state_tensors(artifact, weights, functools.partial(opened.blobs.load, limit=_LIMIT))
    libraries = [opened_library(variant, opened.blobs, gpu) for variant in artifact.variants]
    if gpu is None:
        open_cpu().spin_briefly()  # why: `aotc.runtime.libraries.openmp`
    _log.info("loaded %s from %s, %s for %s, without torch", reference.name, where, bundle.digest, artifact.target)
    return StandaloneModel(artifact, bundle.digest, libraries, state, on_miss, concurrency, gpu)


def _check_options(ref: str, on_miss: StandaloneOnMiss, concurrency: int, trust: Trust | None) -> None:
    checks = [
        ("ref", ref, isinstance(ref, str), "a text: [STORE#]model[:tag]"),
        ("on_miss", on_miss, on_miss == "error" or callable(on_miss), '"error" or a callable'),
        ("concurrency", concurrency, isinstance(concurrency, int) and concurrency > 0, "1 or more"),
        ("trust", trust, trust is None or isinstance(trust, Trust), "an aotc.Trust"),
    ]
    issues = [
        Issue(f"{name} is {value!r:.100}, and may be {expected}", expected=expected, actual=f"{value!r:.100}")
        for name, value, fits, expected in checks
        if not fits
    ]
    if issues:
        raise BindError("aotc.standalone.load was called with what it does not take", issues=tuple(issues))
    if trust is not None and (trust.require_verified or trust.advisories):
        raise BindError(
            "aotc.Trust(require_verified=…, advisories=…) is not looked at without torch",
            hint="check it where the bundle is fetched: `aotc verify --attest`, `aotc audit`; here give keys, and sign "
            "what has passed",
        )


def _check_trust(artifact: Artifact, trust: Trust | None) -> None:
    kind = "CPU" if artifact.target.startswith("cpu:") else "GPU"
    if artifact.untested and not (trust and trust.allow_untested):
        raise UnverifiedError(
            f"`{artifact.model}` for {artifact.target} was built on a machine without such a {kind}, where it has not "
            "run",
            hint="run `aotc verify` on such a machine, and load it with trust=aotc.Trust(allow_untested=True)",
            target=artifact.target,
            reason="unverified",
        )


def select_standalone(
    entries: Sequence[C], read: Callable[[C], Artifact], device: str, this_machine: Callable[[], Environment]
) -> Artifact:
    """The most capable artifact for "cpu" or "cuda" that `this_machine` runs without torch. Raises
    EnvironmentMismatchError."""
    return most_capable(entries, device, read, _mismatches, this_machine)


def _mismatches(artifact: Artifact, here: Environment) -> list[Issue]:
    issues = [rule.issue for rule in rules_of_host(artifact, here) if rule.issue is not None]
    return [*issues, *(gpu_mismatches(artifact, here) if here.gpu else ()), *other_torch(artifact)]


def other_torch(artifact: Artifact) -> Iterator[Issue]:
    """Why the shim is not for code of the artifact's torch, if it is not."""
    built = numbers(artifact.environment.torch, 2)
    if not OLDEST <= built <= NEWEST:
        supported = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        said = f"built with torch {artifact.environment.torch}, the standalone runtime runs code of {supported}"
        hint = "build it with one of these, or load it with aotc.load"
        yield Issue(said, expected=supported, actual=artifact.environment.torch, hint=hint)
