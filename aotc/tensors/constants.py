"""The values of a module's non-persistent buffers, which no checkpoint holds: one safetensors file of an artifact.

A buffer that has one value throughout (a mask of ones, an empty cache) is stored as that value alone, of shape [].
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from aotc.errors import CorruptError
from aotc.reads.tensors import dtype_of
from aotc.tensors.formats import DTYPES, torch_name

CONSTANTS_LIMIT = 256 << 20
"""Bytes that the file may have. The buffers of a module that has more are not kept; without the module there is then no
loading it, and `load` says so."""


def encode_constants(buffers: Mapping[str, Tensor]) -> bytes:
    """The file; nothing where there are no buffers, or where they are too large or of a dtype that the format lacks."""
    if not buffers:
        return b""
    kept = {name: _shortened(tensor.detach().cpu().resolve_conj().resolve_neg()) for name, tensor in buffers.items()}
    known = {dtype_of(name) for name in DTYPES.values() if hasattr(torch, name)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    if size > CONSTANTS_LIMIT or any(tensor.dtype not in known for tensor in kept.values()):
        return b""
    return _safetensors(kept)


def _safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The format of https://github.com/huggingface/safetensors; its own writer needs NumPy. The widest come first, so
    that all are aligned."""
    codes = {dtype_of(name): code for code, name in DTYPES.items() if hasattr(torch, name)}
    header: dict[str, object] = {}
    parts: list[bytes] = []
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        begin, size = end, tensor.numel() * tensor.element_size()
        end += size
        parts.append(ctypes.string_at(tensor.data_ptr(), size) if size else b"")
        header[name] = {"dtype": codes[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _shortened(tensor: Tensor) -> Tensor:
    """The bytes are compared, not the values: -0.0 is not 0.0, and NaN is one value like any other."""
    flat = tensor.contiguous().flatten()
    if not flat.numel():
        return flat.reshape(tensor.shape)
    rows = flat.view(torch.uint8).reshape(flat.numel(), -1)
    return flat[0].clone() if torch.equal(rows, rows[:1].expand_as(rows)) else flat.reshape(tensor.shape).clone()


def decode_constants(data: bytes) -> dict[str, Tensor]:
    """The stored values by name, those of shape [] for buffers of any shape. Raises CorruptError."""
    import safetensors

    try:
        return {name: _tensor(entry) for name, entry in safetensors.deserialize(data)}  # type: ignore[no-untyped-call]
    except (
        Exception
    ) as error:  # safetensors has errors of its own, torch raises what it likes for odd dtypes and shapes
        raise CorruptError(
            f"the artifact's file of constants cannot be read: {error}", hint="build the artifact again"
        ) from error


def _tensor(entry: Mapping[str, object]) -> Tensor:
    shape, dtype = entry["shape"], dtype_of(torch_name(str(entry["dtype"])))
    data = entry["data"]
    assert isinstance(data, bytes | bytearray) and isinstance(shape, list)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
