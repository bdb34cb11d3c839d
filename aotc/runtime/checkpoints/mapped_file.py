"""A safetensors file, mapped once; `safetensors.safe_open` maps it twice while it opens it, which a limit on the
address space has to leave room for. The form: github.com/huggingface/safetensors, "Format"."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from aotc.constants import torch_name
from aotc.runtime.memory_errors import map_privately
from aotc.store.files.disk import open_regular

HEADER_LIMIT = 100_000_000
"""Bytes, the format's own limit."""


class TensorEntry(msgspec.Struct, frozen=True):
    """What the header says of a tensor; `dtype` in torch's words."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class MappedFile:
    """Raises OSError, and ValueError for a file of another form, before a tensor of it is made."""

    def __init__(self, path: Path) -> None:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ValueError(f"its header has {length} bytes, the file {size}")
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            metadata = header.pop("__metadata__", msgspec.Raw(b"{}"))
            self.metadata = msgspec.json.decode(metadata, type=dict[str, str] | None) or {}
            self.tensors: Mapping[str, TensorEntry] = {name: _entry(text) for name, text in header.items()}
            self._begin = 8 + length
            _check_offsets(self.tensors, size - self._begin)
            self._memory = map_privately(stream)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file. Raises ValueError where this torch has no such dtype."""
        entry = self.tensors[name]
        if not isinstance(dtype := getattr(torch, entry.dtype, None), torch.dtype):
            raise ValueError(f"torch {torch.__version__} has no dtype {entry.dtype}")
        begin, end = entry.data_offsets
        if (expected := math.prod(entry.shape) * dtype.itemsize) != end - begin:
            raise ValueError(f"`{name}` has {end - begin} bytes; {entry.dtype} {list(entry.shape)} has {expected}")
        if begin == end:
            return torch.empty(entry.shape, dtype=dtype)
        data = torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin, offset=self._begin + begin)
        if data.data_ptr() % dtype.itemsize:  # written by a tool that does not align
            data = data.clone()
        return data.view(dtype).view(entry.shape)


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
