"""What a capture read, compared with this module and process: by a build that finds the unit, and by a load."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn

from aotc.records import Artifact, File, Reads, decode
from aotc.snapshot.attributes import read_attributes
from aotc.snapshot.outside import Outside

ReadFile = Callable[[File], bytes]


def recorded_reads(artifact: Artifact, read_file: ReadFile) -> Iterator[tuple[tuple[str, ...], Reads]]:
    """What the captures of the variants read: the names of attributes, and all values. Raises CorruptError."""
    for names, file in {(variant.reads, variant.read_values): None for variant in artifact.variants}:
        if file is not None:
            yield names, decode(read_file(file), Reads)


def read_here(module: nn.Module, names: Collection[str], recorded: Reads) -> Reads:
    """The same of this module and process. What cannot be found here is as it was recorded."""
    outside = Outside(module).values(recorded.outside)
    return Reads(read_attributes(module, names), {**recorded.outside, **outside})
