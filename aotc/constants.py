"""The values of a module's non-persistent buffers, which no checkpoint holds: one safetensors file of an artifact.

A buffer that has one value throughout (a mask of ones, an empty cache) is stored as that value alone, of shape [].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from aotc.errors import CorruptError
from aotc.snapshot import dtype_of

CONSTANTS_LIMIT = 256 << 20
"""Bytes that the file may have. The buffers of a module that has more are not kept; without the module there is then no
loading it, and `load` says so."""

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}


def torch_name(dtype: str) -> str:
    """A dtype of safetensors in torch's words, or as it is where torch has none."""
    return _DTYPES.get(dtype, dtype)


def encode_constants(buffers: Mapping[str, Tensor]) -> bytes:
    """The file; nothing where there are no buffers, or where they are too large or of a dtype that the format lacks."""
    from safetensors.torch import save

    if not buffers:
        return b""
    kept = {name: _shortened(tensor.detach().cpu().resolve_conj().resolve_neg()) for name, tensor in buffers.items()}
    known = {dtype_of(name) for name in _DTYPES.values() if hasattr(torch, name)}
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept.values())
    if size > CONSTANTS_LIMIT or any(tensor.dtype not in known for tensor in kept.values()):
        return b""
    return save(kept)


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
