"""The call table as text: a line for each row, which `aotc/core/cpu/call_table.cpp` reads.

An exported folder has it in a file; a load makes it in memory, without the rows that name files and results.

Words are separated by spaces; within a name, spaces, `%` and all but printable ASCII are percent-encoded, as in URLs. A
shape, a size and a condition are expressions (`prefix_notation`). `ELEMENT` has bytes, in hexadecimal. `TENSOR` is a
name, a dtype, the offset in `weights.bin` in bytes, the number of axes, and sizes and strides in elements.

    aotc-call-table 2
    model NAME TARGET
    feature NAME                            of the CPU, in Linux's names; for each
    threads COUNT                           that the code was built for, where it runs with no other
    copies-layout                           inputs of other strides are copied, and do not miss
    weights BYTES                           of weights.bin
    dim NAME INPUT AXIS SCALE OFFSET        the axis's size is SCALE * dim + OFFSET
    input NAME DTYPE LAYOUT RANK (TEXT SIZE)…   a size as the manifest has it, and as an expression
    pad INPUT DIM 0|1 ELEMENT               how an input is padded along a dim: 1 repeats its last slice
    default INPUT ELEMENT                   of the tensor for a call that leaves the input out
    output NAME
    state TENSOR
    bucket NAME LIBRARY BYTES RANK          of the buckets with ranges that take a call, the least RANK first
    size NUMBER | range MIN MAX MULTIPLE TUNED   what the bucket takes, for each dim
    grown DIM                               for each along which calls are padded
    crop OUTPUT AXIS EXPRESSION             of what the library gives, where the call is padded
    written PLACE                           for each input and each tensor of the module that the code writes to
    condition TEXT EXPRESSION               for each, of a bucket with ranges
    graph SIZE…                             for a GPU: the dims at which the code is launched as a CUDA graph, for each
    constant TENSOR                         a frozen weight
    argument PLACE                          for each that the library takes: `input INDEX` or `state INDEX`
    result PLACE                            for each output: also `index INDEX`, of what the library gives
    end
"""

from __future__ import annotations

import string
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from aotc.call_table.dispatch import Dispatcher, named_axes
from aotc.errors import CorruptError
from aotc.records import (
    Artifact,
    Dims,
    Output,
    ResultContainer,
    Scalar,
    Size,
    SizeRange,
    StateSpec,
    TensorLeaf,
    Variant,
    bucket_name,
    has_range,
    names_of,
    tuned_dims,
)
from aotc.standalone.prefix_notation import in_prefix_notation
from aotc.standalone.unsupported import member_names

HEADING = "aotc-call-table 2"
SINGLE = "output"
"""The name of a result that is one tensor."""


class TensorRow(NamedTuple):
    """A tensor in the file of weights: `offset` in bytes, `shape` and `stride` in elements."""

    name: str
    dtype: str
    offset: int
    shape: Sequence[int]
    stride: Sequence[int]


class BucketFiles(NamedTuple):
    """What a variant has in the folder: its library's name and bytes, and its frozen weights."""

    library: str
    size: int
    constants: Sequence[TensorRow]


class FolderRows(NamedTuple):
    """Of an exported folder: the files of each bucket, the module's tensors, and the bytes of the file of weights."""

    buckets: Sequence[BucketFiles]
    state: Sequence[TensorRow]
    weights_size: int


def call_rows(artifact: Artifact, dispatcher: Dispatcher, folder: FolderRows | None = None) -> Iterator[str]:
    """The lines of the table. Raises CorruptError for a record whose calls cannot be decided."""
    leaves = _tensor_leaves(artifact)
    inputs = {index: place for place, (index, _) in enumerate(leaves)}
    names = dispatcher.dims.names
    yield HEADING
    yield f"model {_word(artifact.model)} {_word(artifact.target)}"
    if folder:
        yield from (f"feature {name}" for name in sorted(artifact.environment.cpu_features))
        yield f"weights {folder.weights_size}"
    if artifact.ambient.num_threads is not None:
        yield f"threads {artifact.ambient.num_threads}"
    if artifact.signature.make_contiguous:
        yield "copies-layout"
    for name in names:
        leaf, axis, scale, offset = dispatcher.dims.sources[name]
        yield f"dim {name} {inputs[leaf]} {axis} {scale} {offset}"
    for _, each in leaves:
        sizes = [f" {_word(str(entry))} {in_prefix_notation(entry)}" for entry in each.shape]
        yield f"input {_word(each.path)} {each.dtype} {each.layout} {len(sizes)}{''.join(sizes)}"
    for place, (_, each) in enumerate(leaves):
        yield from _fillings(place, each, names)
    state = artifact.state if artifact.weights == "live" else ()
    rows = folder.state if folder else [TensorRow(spec.name, spec.dtype, 0, spec.shape, spec.stride) for spec in state]
    yield from (f"state {_tensor(row)}" for row in rows)
    if folder:
        yield from (f"output {_word(name)}" for name in result_names(artifact.variants[0]))
    places = {spec.name: place for place, spec in enumerate(artifact.state)}
    ranks = _ranks(artifact.variants, names)
    for at, (variant, rank) in enumerate(zip(artifact.variants, ranks, strict=True)):
        own = folder.buckets[at] if folder else BucketFiles("-", 0, ())
        yield f"bucket {_word(bucket_name(variant.bucket))} {own.library} {own.size} {rank}"
        yield from (_taken(variant.bucket[name]) for name in names)
        yield from (f"condition {_word(text)} {in_prefix_notation(text)}" for text in variant.conditions)
        yield from (f"graph {' '.join(str(dims[name]) for name in names)}" for dims in _graphs(variant))
        yield from _changes(variant, dispatcher, inputs, state)
        yield from (f"constant {_tensor(row)}" for row in own.constants)
        for argument in variant.arguments:
            yield f"argument {_place(None, argument.leaf, argument.state, inputs, places)}"
        for output in result_names(variant).values():
            yield f"result {_place(output.index, output.leaf, output.state, inputs, places)}"
    yield "end"


def _graphs(variant: Variant) -> Sequence[Dims]:
    if variant.launch is None or not variant.launch.graph:
        return ()
    return variant.launch.sizes if has_range(variant.bucket) else (tuned_dims(variant.bucket),)


def _fillings(place: int, leaf: TensorLeaf, names: Sequence[str]) -> Iterator[str]:
    for dim, rule in leaf.pad.items():
        if dim in names:
            element = _element(leaf.dtype, 0 if rule.edge else rule.value, f"{leaf.path}'s pad")
            yield f"pad {place} {names.index(dim)} {int(rule.edge)} {element}"
    if leaf.default is not None:
        yield f"default {place} {_element(leaf.dtype, leaf.default, f'the default of {leaf.path}')}"


def _changes(
    variant: Variant, dispatcher: Dispatcher, inputs: dict[int, int], state: Sequence[StateSpec]
) -> Iterator[str]:
    """The rows of pads, crops and tensors that are written to."""
    names = dispatcher.dims.names
    if any(leaf.pad for _, leaf, _, _ in named_axes(dispatcher.signature.leaves)):
        paddable = dispatcher.rules.paddable
        grown = paddable.intersection(variant.padded) if has_range(variant.bucket) else paddable
        yield from (f"grown {at}" for at, name in enumerate(names) if name in grown)
        for output in variant.outputs:
            dims = enumerate(output.dims) if output.index is not None else ()
            yield from (f"crop {output.index} {axis} {in_prefix_notation(text)}" for axis, text in dims if text)
    yield from (f"written input {inputs[leaf]}" for leaf in variant.mutated_leaves)
    written = frozenset(variant.mutated_state)
    yield from (f"written state {at}" for at, spec in enumerate(state) if not written.isdisjoint(names_of(spec)))


_FORMATS = {"bool": "?", "float16": "e", "float32": "f", "float64": "d", "complex64": "f4x", "complex128": "d8x"}
_FORMATS |= {
    f"{sign}int{8 << at}": code for sign, codes in (("", "bhiq"), ("u", "BHIQ")) for at, code in enumerate(codes)
}


def _element(dtype: str, value: Scalar, what: str) -> str:
    number: Any = value
    try:
        if dtype == "bfloat16":
            (bits,) = struct.unpack("<I", struct.pack("<f", number))
            return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16).hex()
        return struct.pack(f"<{_FORMATS[dtype]}", int(number) if "int" in dtype else number).hex()
    except (KeyError, ValueError, TypeError, OverflowError, struct.error) as error:
        raise CorruptError(
            f"the record's {what} cannot be made: {value!r} is not a {dtype}", hint="build it again"
        ) from error


def result_names(variant: Variant) -> dict[str, Output]:
    """The tensors of the model's result by their paths in it, as `pooler_output` or `past.0.1`; SINGLE is one alone.
    Constants are left out: the caller knows them, and no call changes them."""
    named = {".".join(path) or SINGLE: variant.outputs[at] for path, at in _paths(variant.output_tree, ())}
    return {name: each for name, each in named.items() if (each.index, each.leaf, each.state) != (None, None, None)}


def _paths(tree: int | ResultContainer, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(tree, int):
        yield path, tree
        return
    keys: Sequence[object] = range(len(tree.items))
    if tree.type not in ("tuple", "list"):
        keys = tree.keys or member_names(tree) or keys
    for key, item in zip(keys, tree.items, strict=True):
        yield from _paths(item, (*path, str(key)))


def _tensor_leaves(artifact: Artifact) -> list[tuple[int, TensorLeaf]]:
    return [(index, leaf) for index, leaf in enumerate(artifact.signature.leaves) if isinstance(leaf, TensorLeaf)]


def _ranks(variants: Sequence[Variant], names: Sequence[str]) -> list[int]:
    """The order of the buckets with ranges by how many sizes they hold, from 0; equal ones have equal ranks."""
    if not any(has_range(variant.bucket) for variant in variants):
        return [0] * len(variants)
    from aotc.expressions import tightness

    widths = [tightness([variant.bucket[name] for name in names], [0] * len(names))[0] for variant in variants]
    order = sorted(set(widths))
    return [
        order.index(width) if has_range(variant.bucket) else 0 for variant, width in zip(variants, widths, strict=True)
    ]


def _taken(size: Size) -> str:
    if isinstance(size, SizeRange):
        return f"range {size.min} {size.max} {size.multiple_of} {size.tune_at}"
    return f"size {size}"


def _place(
    index: int | None, leaf: int | None, state: str | None, inputs: dict[int, int], places: dict[str, int]
) -> str:
    if index is not None:
        return f"index {index}"
    return f"input {inputs[leaf]}" if leaf is not None else f"state {places[str(state)]}"


def _tensor(row: TensorRow) -> str:
    numbers = " ".join(map(str, (row.offset, len(row.shape), *row.shape, *row.stride)))
    return f"{_word(row.name)} {row.dtype} {numbers}"


_PLAIN = frozenset((string.ascii_letters + string.digits + string.punctuation).replace("%", "").encode())


def _word(text: str) -> str:
    return "".join(chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in text.encode()) or "%20"
