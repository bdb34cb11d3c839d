"""The files of a compiled library, in memory: the bytes that were checked are the bytes that run.

Each file is decompressed from the store into an anonymous file (a sealed memfd), checked on the way, and opened by its
descriptor. No cache of decompressed files exists that could be full, read-only or changed by another process. Weights
are mapped where they lie in the store, after they were checked.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from aotc.errors import LibraryError
from aotc.records import CONSTANTS, File, Variant
from aotc.store.files.anonymous import anonymous_file, path_of, seal, typed_errors_of

if TYPE_CHECKING:
    import torch

    from aotc.runtime.libraries.frozen_weights import LibraryConstants, MappedWeights
    from aotc.runtime.libraries.library_folder import LibraryFiles
    from aotc.store.layout.blob_reader import BlobReader

T = TypeVar("T")
R = TypeVar("R")


class FilesInMemory:
    """A library of a store, and the files that it reads beside itself: open descriptors of anonymous files, closed when
    this object goes. `aotc.runtime.libraries.library_folder` has the same of a build's folder."""

    def __init__(
        self, variant: Variant, source: BlobReader, weights: Mapping[str, MappedWeights] | None = None
    ) -> None:
        """`weights` are the variant's mapped files, by their blobs.

        Raises what `source.unpack` raises, and LibraryError where no anonymous file can be made or filled.
        """
        self.library = variant.library
        self.streams: dict[str, BinaryIO] = {}
        self._digests = {file.name: file.digest for file in variant.files}
        self._constants = b""
        self._weights = {file.name: weights[file.blob] for file in variant.files if weights and file.mapped}
        for file in variant.files:
            if file.mapped:
                continue
            if file.name == CONSTANTS:
                source.unpack(file, index := io.BytesIO())
                self._constants = index.getvalue()
                continue
            with typed_errors_of(file):
                self.streams[file.name] = stream = anonymous_file(file.name)
                source.unpack(file, stream)
                stream.flush()
            seal(stream)

    @property
    def names(self) -> frozenset[str]:
        """Of the library and the files."""
        return frozenset(self.streams)

    def of(self, library: str) -> FilesInMemory:
        """The same files, with another one of them as the library."""
        other = copy.copy(self)
        other.library = library
        return other

    @contextmanager
    def opened(self, device: str = "cpu") -> Iterator[str]:
        """The library's path, with the other files beside it, within the context. One path is never that of two."""
        key, own = (self._digests[self.library], device), self.streams[self.library]
        known, file, _ = _mapped.get(key) or ("", None, None)
        if all(name.endswith(".so") for name in self.streams):  # which read no files beside them
            yield known or _keep(key, path_of(own))
            return
        from aotc.runtime.libraries.on_disk import side_by_side

        with side_by_side({**self.streams, self.library: file or own}) as folder:
            yield _keep(key, str(folder / self.library), own)

    def constants(self, device: torch.device) -> LibraryConstants | None:
        """The library's constants; None for a library that holds them itself."""
        if not self._constants:
            return None
        from aotc.runtime.libraries.frozen_weights import LibraryConstants

        return LibraryConstants(self._constants, self._weights, device)


@contextmanager
def opened(files: LibraryFiles, device: str = "cpu") -> Iterator[str]:
    """The library's path, within the context. Raises LibraryError where it cannot be opened there."""
    try:
        with files.opened(device) as path:
            yield path
    except (OSError, RuntimeError, AttributeError) as error:
        raise LibraryError(
            f"the library {files.library} cannot be opened: {error}",
            hint="`GLIBC` or `GLIBCXX` in the reason: it was built on a newer distribution than this one; "
            "`undefined symbol`: with another torch; `executable stack`: by an older aotc, build it again; "
            "`No such file`: /proc is not mounted; `failed to map segment`: its folder is noexec: set TMPDIR",
        ) from error


def read_all(variants: Sequence[Variant], source: BlobReader) -> Mapping[tuple[File, ...], FilesInMemory]:
    """The files of each variant, several at a time, and what several of them map once. Raises as `FilesInMemory` does,
    the first error."""
    distinct = list({variant.files: variant for variant in variants}.values())
    mapped = list({file.blob: file for variant in distinct for file in variant.files if file.mapped}.values())
    weights = {}
    if mapped:
        from aotc.runtime.libraries.frozen_weights import MappedWeights

        streams = _side_by_side(source.open_mapped, mapped, mapped)
        weights = {file.blob: MappedWeights(stream) for file, stream in zip(mapped, streams, strict=True)}
    files = [file for variant in distinct for file in variant.files]
    found = _side_by_side(functools.partial(FilesInMemory, source=source, weights=weights), distinct, files)
    return {variant.files: files for variant, files in zip(distinct, found, strict=True)}


def _side_by_side(read: Callable[[T], R], each: Sequence[T], files: Sequence[File]) -> list[R]:
    """`read` of each one, in order; by threads, of which there are no more than MiB in `files`."""
    workers = min(len(each), len(os.sched_getaffinity(0)), sum(file.size for file in files) >> 20)
    if workers < 2:
        return list(map(read, each))
    with ThreadPoolExecutor(workers) as pool:
        try:
            return list(pool.map(read, each))
        finally:
            pool.shutdown(cancel_futures=True)


_mapped: dict[tuple[str, str], tuple[str, BinaryIO | None, ctypes.CDLL]] = {}
"""By digest and device, a library's first path, and its file if others lay beside it. By one of them, glibc knows what
is loaded again. It stays mapped to the end: it is linked with `nodelete`, since OpenMP's threads outlive it."""


def _keep(key: tuple[str, str], path: str, stream: BinaryIO | None = None) -> str:
    """The path. A file that is not a library is not kept: who opens it gets the reason."""
    with contextlib.suppress(OSError):
        _mapped.setdefault(key, (path, stream, ctypes.CDLL(path)))
    return path
