"""The first stage of a load: the bundle that a reference names, in a local store, and signed as asked."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from aotc.errors import CorruptError
from aotc.runtime.libraries.files import FilesInMemory, read_all
from aotc.store.layout.bundle import Bundle, read_artifact, read_bundle
from aotc.store.layout.reader import StoreReader
from aotc.store.reference import Reference, is_remote

if TYPE_CHECKING:
    from aotc.records import Artifact, File, Variant
    from aotc.runtime.options import LoadOptions
    from aotc.store.layout.bundle import BundleEntry
    from aotc.store.remote.fetching import Choose

T = TypeVar("T")
Entries = Sequence["BundleEntry"]
ReadArtifact = Callable[["BundleEntry"], "Artifact"]

_TRUST = {"AOTC_TRUSTED_KEYS", "AOTC_SIGNED_AFTER", "AOTC_REQUIRE"}

READ_LIMIT = (256 << 20) + (1 << 20)
"""Bytes that a file may have that is read into memory: a module's attributes, its constants with their names."""


class FoundBundle:
    """A bundle in a local store, and what was read of it: each part once.

    `fetch_again` gives it anew where a blob that was fetched is damaged, and raises other errors.
    """

    def __init__(
        self, store: StoreReader, bundle: Bundle, fetch_again: Callable[[CorruptError], FoundBundle] | None = None
    ) -> None:
        self.store, self.bundle, self._fetch_again = store, bundle, fetch_again
        self.read_artifact: ReadArtifact = functools.cache(lambda entry: read_artifact(store, entry))
        self.read_file = functools.cache(lambda file: store.blobs.load(file, READ_LIMIT))
        self.has = functools.cache(lambda entry: store.blobs.has(entry.digest, entry.size))
        self.files: dict[tuple[File, ...], FilesInMemory] = {}
        self.attested: dict[str, Artifact] = {}

    def files_of(self, artifact: Artifact, variant: Variant) -> FilesInMemory:
        """The files of a variant. When the first is asked for, those of all are read, several at a time."""
        if variant.files not in self.files:
            self.files |= read_all(artifact.variants, self.store.blobs)
        return self.files[variant.files]

    def use(self, function: Callable[[FoundBundle], T]) -> T:
        """`function` of it; where a blob that was fetched is damaged, once more, after that is fetched again."""
        try:
            return function(self)
        except CorruptError as error:
            if self._fetch_again is None:
                raise
            again = self._fetch_again(error)
        return function(again)


def find(options: LoadOptions, choose: Choose) -> FoundBundle:
    """The bundle. Of a remote one, what `choose` chooses is fetched. Raises as `aotc.load` does."""
    reference, where = options.place()
    if is_remote(where):
        from aotc.runtime.fetch import fetch_for_load, remove_damaged

        source = Reference(where, reference.model, tag=reference.tag, digest=reference.digest)

        def fetch() -> FoundBundle:
            store, bundle = fetch_for_load(source, choose, options)

            def fetch_again(error: CorruptError) -> FoundBundle:
                remove_damaged(store, error)
                return fetch()

            return FoundBundle(store, bundle, fetch_again)

        return fetch()
    opened = StoreReader.open(Path(where))
    bundle = read_bundle(opened, reference)
    if options.trust is not None or _TRUST & os.environ.keys():
        from aotc.store.signing.trust import check_bundle

        check_bundle(opened, bundle, reference, *options.signers)
    return FoundBundle(opened, bundle)
