"""Frozen weights in files beside the library, which all buckets share.

By default AOTInductor puts the constants of a graph into each library, and a library copies them into its own memory
when it is opened. Without them, the library expects the process that opens it to supply them, as
`aotc.runtime.libraries.frozen_weights` does.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import torch
from torch import Tensor

from aotc.compiler.scoped import replaced
from aotc.digest import canonical_json
from aotc.reads.tensors import dtype_name
from aotc.records import CONSTANTS, Constant, PackCall

SMALL = 256 << 10
"""Bytes. A larger constant gets a file of its own, shared by every bucket that folds to the same bytes. Smaller ones
share one file, since a model may have hundreds."""

ALIGNMENT = 64
"""Bytes, as AOTInductor aligns constants (AOTI_CONST_ALIGNMENT in its model_base.h)."""


@contextmanager
def constants_left_out(folder: Path, names: list[str]) -> Iterator[None]:
    """While active, write the constants of a compiled graph to files in `folder`, whose names are added to `names`; the
    place of each constant goes into the file CONSTANTS."""
    from torch._inductor.codecache import AotCodeCompiler
    from torch._inductor.constant_folding import ConstantFolder

    compile: Any = AotCodeCompiler.compile
    deduce: Any = ConstantFolder._deduce_value
    packed: dict[int, PackCall] = {}

    def noting(self: ConstantFolder, node: Any) -> Any:
        value = deduce(self, node)
        if isinstance(value, Tensor) and value.is_mkldnn and (call := pack_call(node.target, node.args[1:])):
            packed[torch.ops.mkldnn.data_ptr(value)] = call
        return value

    def writing(cls: type[AotCodeCompiler], graph: Any, *args: Any, **kwargs: Any) -> Any:
        values = {name: graph.get_original_value_of_constant(name) for name in graph.constants}
        names.extend(write_constants(values, folder, packed))
        return compile(graph, *args, **kwargs)

    with (
        replaced(AotCodeCompiler, "compile", classmethod(writing)),
        replaced(ConstantFolder, "_deduce_value", noting),
    ):
        yield


_PACKING_OPERATORS = get_args(msgspec.structs.fields(PackCall)[0].type)


def pack_call(target: Any, arguments: Any) -> PackCall | None:
    """The call of a graph's node as a load repeats it; None where a load cannot. `arguments` follow the weight."""
    namespace, _, name = str(target).removesuffix(".default").partition(".")
    values = tuple(tuple(each) if isinstance(each, list | tuple) else each for each in arguments)
    if namespace != "mkldnn" or name not in _PACKING_OPERATORS:
        return None
    return PackCall(cast(Any, name), values, torch.get_num_threads(), torch.backends.cpu.get_cpu_capability())


def write_constants(values: dict[str, Tensor], folder: Path, packed: Mapping[int, PackCall] = {}) -> list[str]:
    """Write the bytes of each tensor once. Returns the names of the files, which contain digits of their digests.

    `packed`: by the address of a packed tensor's memory, the call that packed it."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, tuple[str, int]] = {}
    digests: dict[str, str] = {}
    small: dict[str, bytes] = {}
    for name, value in values.items():
        data = _Bytes(value)
        digest = digests[name] = hashlib.sha256(data.view).hexdigest()
        if len(data.view) <= SMALL:
            small[digest] = bytes(data.view)
        elif digest not in places:
            places[digest] = _write(folder, digest, [data.view]), 0
    together, offset = [], 0
    for _, piece in sorted(small.items()):
        together.append(piece + bytes(-len(piece) % ALIGNMENT))
    file = _write(folder, hashlib.sha256(b"".join(together)).hexdigest(), together) if any(together) else ""
    for (digest, _), piece in zip(sorted(small.items()), together, strict=True):
        places[digest] = file, offset
        offset += len(piece)
    constants = [_constant(name, value, *places[digests[name]], packed) for name, value in values.items()]
    (folder / CONSTANTS).write_bytes(canonical_json(constants))
    return sorted({constant.file for constant in constants} - {""})


class _Bytes:
    """The bytes that AOTInductor writes for a constant: its whole storage, or oneDNN's packed form; none if empty."""

    def __init__(self, value: Tensor) -> None:
        size = 0
        if value.is_mkldnn:
            self._owner: Any = value
            address, size = torch.ops.mkldnn.data_ptr(value), torch.ops.mkldnn._nbytes(value)
        else:
            self._owner = cast("torch.UntypedStorage", cast(Any, value.untyped_storage()).cpu())
            address = self._owner.data_ptr()
            size = self._owner.nbytes() if value.numel() else 0
        self.view = memoryview((ctypes.c_char * size).from_address(address) if size else b"").cast("B")


def _write(folder: Path, digest: str, pieces: list[Any]) -> str:
    name = f"weights-{digest[:16]}.bin"
    with (folder / name).open("wb") as stream:
        for piece in pieces:
            stream.write(piece)
    return name


def _constant(name: str, value: Tensor, file: str, offset: int, calls: Mapping[int, PackCall]) -> Constant:
    packed = value.is_mkldnn
    return Constant(
        name=name,
        file=file if value.numel() else "",
        offset=offset if value.numel() else 0,
        dtype=dtype_name(value.dtype),
        device="cuda" if value.is_cuda else "cpu",
        shape=tuple(value.shape),
        stride=() if packed else value.stride(),
        storage_offset=0 if packed else int(value.storage_offset()),
        packing=bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(value).tolist()) if packed else b"",
        packed_by=calls.get(torch.ops.mkldnn.data_ptr(value)) if packed else None,
    )
