"""What is measured: a model, its artifact and its buckets."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from aotc.errors import NotFoundError
from aotc.machine.targets import parse_target
from aotc.manifest import ModelSpec, read_manifest
from aotc.models.input_forms import input_forms
from aotc.records import Dims, Signature, bucket_name, tuned_dims
from aotc.runtime.select import select_artifact
from aotc.store.reference import Reference, parse_reference
from aotc.verify.runnable import open_runnable, spec_of


class CalledSizes(NamedTuple):
    """A bucket, and the sizes within it that are called: those at which a range is tuned."""

    bucket: str
    dims: Dims


class BenchSubject(NamedTuple):
    """ref: the artifact's bundle by digest, with its store. folder: where factories are found."""

    spec: ModelSpec
    folder: Path
    ref: str
    digest: str
    target: str
    signature: Signature

    @property
    def device(self) -> str:
        return parse_target(self.target).device

    @property
    def buckets(self) -> list[CalledSizes]:
        return [CalledSizes(bucket_name(bucket), tuned_dims(bucket)) for bucket in self.spec.buckets]

    def chosen(self, names: Collection[str]) -> list[CalledSizes]:
        """The buckets of these names, in the manifest's order. Raises NotFoundError for a name that none has."""
        known = {sizes.bucket: sizes for sizes in self.buckets}
        for name in names:
            if name not in known:
                raise NotFoundError(f"{self.spec.name} has no bucket {name!r}", hint=f"it has {'; '.join(known)}")
        return [sizes for name, sizes in known.items() if name in names]


def subjects_of_manifest(path: Path, only: Collection[str], store: str, tag: str) -> Iterator[BenchSubject]:
    """Each model of a manifest. Raises ManifestError, and the errors of `subject_of`."""
    manifest = read_manifest(path, only)
    for name in manifest.models:
        try:
            yield _subject(store, Reference(None, name, tag=tag), manifest.folder)
        except NotFoundError as error:
            error.hint = f"build it first: aotc build {path} --model {name} --store {store}"
            raise


def subject_of(text: str, store: str) -> BenchSubject:
    """The model of a reference, whose factory is found in the working folder.

    Raises ReferenceFormatError, NotFoundError, StoreError, RemoteError, CorruptError; VerifyError where no artifact
    is for this machine, EnvironmentMismatchError where none of those runs; where `$AOTC_TRUSTED_KEYS` is set,
    SignatureError.
    """
    reference = parse_reference(text)
    return _subject(reference.store or store, reference, Path.cwd())


def _subject(where: str, reference: Reference, folder: Path) -> BenchSubject:
    """The artifact for a GPU of this machine, if there is one; else the most capable for its CPU."""
    opened = open_runnable(where, reference, folder)
    on_gpu = any(parse_target(one.target).device == "cuda" for one in opened.artifacts)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    target = select_artifact(opened.artifacts, device, lambda artifact: artifact).target
    artifact = next(one for one in opened.artifacts if one.target == target)
    spec = input_forms(spec_of(artifact))[0]
    ref = f"{Path(opened.where).absolute()}#{opened.pinned}"
    return BenchSubject(spec, folder.absolute(), ref, opened.digest, artifact.target, artifact.signature)
