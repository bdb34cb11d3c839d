"""The tensors of a module: their names, specs and digests."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from aotc.digest import sha256_json


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """torch.float32 for `float32`. Raises ValueError for anything else than a dtype's name.

    Not by `getattr`: torch imports some of its modules, the compiler among them, when their names are asked for.
    """
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"`{name}` is not a dtype of torch {torch.__version__}")
    return dtype


NO_SUBCLASSES: Mapping[str, Any] = MappingProxyType({})


def named_state(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its fully qualified name, tied names and non-persistent buffers included."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def plain_state(module: nn.Module) -> dict[str, Tensor]:
    """`named_state`, with the plain tensors of each tensor subclass in its place: what compiled code is given."""
    from aotc.tensors.subclasses import unwrapped

    return unwrapped(named_state(module))


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """sha256 of each tensor's bytes in logical order, hashed side by side (hashlib releases the GIL)."""
    with ThreadPoolExecutor() as pool:
        return dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))


def tensor_digest(tensor: Tensor) -> str:
    if hasattr(tensor, "__tensor_flatten__"):
        from aotc.tensors.subclasses import inner_tensors

        inner = inner_tensors(tensor)
        digests = {
            path: [dtype_name(each.dtype), list(each.shape), tensor_digest(each)] for path, each in inner.items()
        }
        return sha256_json([type(tensor).__qualname__, digests])
    flat = tensor.detach().to("cpu", copy=False).resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.element_size()
    view = (ctypes.c_char * size).from_address(flat.data_ptr()) if size else b""
    return "sha256:" + sha256(view).hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype on one device hold the same bytes: -0.0 is not 0.0, and NaN is one value like
    any other."""
    one, other = (tensor.detach().resolve_conj().resolve_neg() for tensor in (one, other))
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    dense = (tensor.contiguous() for tensor in (one, other))
    # Not by `reshape`, which keeps the stride of a single element, perhaps 0.
    flat = [tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8) for tensor in dense]
    return torch.equal(*flat)
