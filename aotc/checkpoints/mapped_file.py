"""A safetensors file, mapped once; `safetensors.safe_open` maps it twice while it opens it, which a limit on the
address space has to leave room for. The form: github.com/huggingface/safetensors, "Format"."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from aotc.store.files.disk import map_privately, open_regular
from aotc.tensors.formats import torch_name

HEADER_LIMIT = 100_000_000
"""Bytes, the format's own limit."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor's entry in the header; `dtype` is torch's name."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class MappedFile:
    """`memory` is the whole file; the bytes of tensors are counted from `begin`.

    Raises OSError, and ValueError for a file of another form, before a tensor of it is made.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError(f"its header has {length} bytes, the file {size}")
            self.begin = 8 + length
            self.metadata, self.tensors = tensors_in(stream.read(length), size - self.begin)
            self.memory = map_privately(stream)


def tensors_in(header: bytes, size: int) -> tuple[Mapping[str, str], Mapping[str, TensorEntry]]:
    """The metadata and the tensors that a header names, behind which `size` bytes follow. Raises ValueError."""
    entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    metadata = msgspec.json.decode(entries.pop("__metadata__", msgspec.Raw(b"{}")), type=dict[str, str] | None) or {}
    tensors = {name: _entry(text) for name, text in entries.items()}
    _check_offsets(tensors, size)
    return metadata, tensors


def _entry(text: msgspec.Raw) -> TensorEntry:
    entry = msgspec.json.decode(text, type=TensorEntry)
    if min(entry.shape, default=0) < 0:
        raise ValueError(f"a tensor has the shape {list(entry.shape)}")
    return msgspec.structs.replace(entry, dtype=torch_name(entry.dtype))


def _check_offsets(tensors: Mapping[str, TensorEntry], size: int) -> None:
    """Each byte behind the header is of one tensor."""
    at = 0
    for begin, end in sorted(entry.data_offsets for entry in tensors.values()):
        if begin != at or end < begin:
            raise ValueError(f"a tensor lies at bytes {begin} to {end}, and the one before it ends at {at}")
        at = end
    if at != size:
        raise ValueError(f"its tensors have {at} bytes, and {size} follow the header: it is not whole")
