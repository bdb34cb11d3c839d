"""The call table of an exported folder, as text: a line for each row, which `aotc/core/cpu/call_table.cpp` reads.

Words are separated by spaces; within a name, spaces, `%` and all but printable ASCII are percent-encoded, as in URLs. A
shape, a size and a condition are expressions (`prefix_notation`). `TENSOR` is a name, a dtype, the offset in
`weights.bin` in bytes, the number of axes, and sizes and strides in elements.

    aotc-call-table 1
    model NAME TARGET
    feature NAME                            of the CPU, in Linux's names; for each
    threads COUNT                           that the code was built for, where it runs with no other
    copies-layout                           inputs of other strides are copied, and do not miss
    weights BYTES                           of weights.bin
    dim NAME INPUT AXIS SCALE OFFSET        the axis's size is SCALE * dim + OFFSET
    input NAME FORM DTYPE LAYOUT RANK SIZE…
    output NAME
    state TENSOR
    bucket NAME LIBRARY BYTES RANK          of the buckets with ranges that take a call, the least RANK first
    size NUMBER | range MIN MAX MULTIPLE TUNED   what the bucket takes, for each dim
    condition EXPRESSION                    for each, of a bucket with ranges
    constant TENSOR                         a frozen weight
    argument PLACE                          for each that the library takes: `input INDEX` or `state INDEX`
    result PLACE                            for each output: also `index INDEX`, of what the library gives
    end
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from urllib.parse import quote

from aotc.call_table.dispatch import Dispatcher
from aotc.expressions import tightness
from aotc.records import (
    Artifact,
    Output,
    ResultContainer,
    Size,
    SizeRange,
    TensorLeaf,
    Variant,
    bucket_name,
    has_range,
)
from aotc.standalone.exporting.prefix_notation import in_prefix_notation
from aotc.standalone.unsupported import member_names

HEADING = "aotc-call-table 1"
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


def call_rows(
    artifact: Artifact, files: Sequence[BucketFiles], state: Sequence[TensorRow], weights_size: int
) -> Iterator[str]:
    """The lines of the table. Raises CorruptError for a record that cannot be dispatched on."""
    dispatcher = Dispatcher(artifact.signature, artifact.variants, artifact.model)
    inputs = {index: place for place, (index, _) in enumerate(_tensor_leaves(artifact))}
    yield HEADING
    yield f"model {_word(artifact.model)} {_word(artifact.target)}"
    yield from (f"feature {name}" for name in sorted(artifact.environment.cpu_features))
    if artifact.ambient.num_threads is not None:
        yield f"threads {artifact.ambient.num_threads}"
    if artifact.signature.make_contiguous:
        yield "copies-layout"
    yield f"weights {weights_size}"
    for name in dispatcher.dims.names:
        leaf, axis, scale, offset = dispatcher.dims.sources[name]
        yield f"dim {name} {inputs[leaf]} {axis} {scale} {offset}"
    for _, each in _tensor_leaves(artifact):
        form = f"{each.dtype} [{', '.join(map(str, each.shape))}]"
        sizes = " ".join([str(len(each.shape)), *map(in_prefix_notation, each.shape)])
        yield f"input {_word(each.path)} {_word(form)} {each.dtype} {each.layout} {sizes}"
    yield from (f"output {_word(name)}" for name in result_names(artifact.variants[0]))
    yield from (f"state {_tensor(row)}" for row in state)
    places = {spec.name: place for place, spec in enumerate(artifact.state)}
    ranks = _ranks(artifact.variants, dispatcher.dims.names)
    for variant, own, rank in zip(artifact.variants, files, ranks, strict=True):
        yield f"bucket {_word(bucket_name(variant.bucket))} {own.library} {own.size} {rank}"
        yield from (_taken(variant.bucket[name]) for name in dispatcher.dims.names)
        yield from (f"condition {in_prefix_notation(text)}" for text in variant.conditions)
        yield from (f"constant {_tensor(row)}" for row in own.constants)
        for argument in variant.arguments:
            yield f"argument {_place(None, argument.leaf, argument.state, inputs, places)}"
        for output in result_names(variant).values():
            yield f"result {_place(output.index, output.leaf, output.state, inputs, places)}"
    yield "end"


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


_PLAIN = string.punctuation.replace("%", "")


def _word(text: str) -> str:
    return quote(text, safe=_PLAIN) or "%20"
