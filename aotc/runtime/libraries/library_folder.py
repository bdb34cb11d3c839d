"""The files of a compiled library in a folder, as a build leaves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from aotc.records import CONSTANTS
from aotc.runtime.libraries.files import FilesInMemory

if TYPE_CHECKING:
    import torch

    from aotc.runtime.libraries.frozen_weights import LibraryConstants


class FilesInFolder:
    """A library in a folder, with the methods of `FilesInMemory`."""

    def __init__(self, folder: Path, library: str) -> None:
        self.folder, self.library = folder, library

    @property
    def names(self) -> frozenset[str]:
        return frozenset(path.name for path in self.folder.iterdir())

    def of(self, library: str) -> FilesInFolder:
        return FilesInFolder(self.folder, library)

    @contextmanager
    def opened(self, device: str = "cpu") -> Iterator[str]:
        yield str(self.folder / self.library)

    def constants(self, device: torch.device) -> LibraryConstants | None:
        if CONSTANTS not in self.names:
            return None
        from aotc.runtime.libraries.frozen_weights import LibraryConstants, MappedWeights

        files = {path.name: MappedWeights(path.open("rb")) for path in self.folder.glob("weights-*.bin")}
        return LibraryConstants((self.folder / CONSTANTS).read_bytes(), files, device)


LibraryFiles = FilesInMemory | FilesInFolder
