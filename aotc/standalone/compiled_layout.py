"""A call's tensors as the compiled code takes them, in its layout and at the sizes of its bucket; and back again."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from aotc.call_table.dispatch import Crop, Pad, Plan
from aotc.errors import CorruptError
from aotc.records import Scalar, Signature, TensorLeaf
from aotc.standalone.cpu_environment import open_cpu
from aotc.tensors.strides import strides_in


def lies_as(tensor: Any, strides: Sequence[int]) -> bool:
    """Whether the elements lie so: the stride of an axis of one element is any."""
    axes = zip(tensor.shape, tensor.strides, strides, strict=True)
    return 0 in tensor.shape or all(size == 1 or here == built for size, here, built in axes)


def placed(leaves: Sequence[Any], signature: Signature, plan: Plan) -> tuple[list[Any], int]:
    """The leaves in the compiled layout, padded, and how many were copied into that layout. Raises CorruptError for a
    record whose pads cannot be made."""
    ran, copies = list(leaves), 0
    for index, leaf in enumerate(signature.leaves):
        if not isinstance(leaf, TensorLeaf):
            continue
        tensor, strides = leaves[index], strides_in(leaf.layout, leaves[index].shape)
        if tensor.strides == strides:
            continue
        if lies_as(tensor, strides):
            ran[index] = open_cpu().strided(tensor, tensor.shape, strides)
        else:
            ran[index], copies = open_cpu().copied(tensor, tensor.shape, strides), copies + 1
    for pad in plan.pads:
        try:
            ran[pad.leaf] = _padded(ran[pad.leaf], pad)
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise CorruptError(f"the record's {pad} cannot be made: {error}", hint="build it again") from error
    return ran, copies


def _padded(tensor: Any, pad: Pad) -> Any:
    """A copy with the axis grown at its end. An empty axis has no edge to repeat and is filled with 0."""
    core, axis, shape = open_cpu(), pad.axis, list(tensor.shape)
    if pad.rule.edge and shape[axis]:
        shape[axis] = 1
        filling = core.strided(tensor, tuple(shape), tensor.strides, (tensor.shape[axis] - 1) * tensor.strides[axis])
    else:
        filling = scalar_tensor(tensor.dtype, 0 if pad.rule.edge else pad.rule.value)
    shape[axis] = pad.size
    grown = core.copied(filling, tuple(shape), strides_in(pad.layout, shape))
    core.assign(core.strided(grown, tensor.shape, grown.strides), tensor)
    return grown


def cropped(outputs: list[Any], crops: Sequence[Crop]) -> list[Any]:
    """Outputs without what was padded: copies without gaps, as eager gives them. Raises CorruptError where an axis is
    not there."""
    shapes = {crop.output: list(outputs[crop.output].shape) for crop in crops}
    for crop in crops:
        shape = shapes[crop.output]
        if crop.axis >= len(shape) or not 0 <= crop.size <= shape[crop.axis]:
            raise CorruptError(f"the record's {crop} does not fit the library's output of shape {shape}")
        shape[crop.axis] = crop.size
    core, cut = open_cpu(), list(outputs)
    for output, shape in shapes.items():
        cut[output] = core.dense(core.strided(outputs[output], tuple(shape), outputs[output].strides))
    return cut


def write_back(ran: Sequence[Any], leaves: Sequence[Any], written: Iterable[int]) -> None:
    """From those of `ran` that are copies, perhaps padded, into the caller's memory."""
    core = open_cpu()
    for index in written:
        if ran[index].address != leaves[index].address:
            core.assign(leaves[index], core.strided(ran[index], leaves[index].shape, ran[index].strides))


def default_tensor(leaf: TensorLeaf, signature: Signature, leaves: Sequence[Any]) -> Any:
    """The tensor for a call that has None there, in the sizes of its other tensors. None where these are of other
    ranks."""
    sizes = {
        entry: leaves[index].shape[axis]
        for index, other in enumerate(signature.leaves)
        if isinstance(other, TensorLeaf) and other.default is None and leaves[index] is not None
        for axis, entry in enumerate(other.shape[: len(leaves[index].shape)])
    }
    shape = tuple(entry if isinstance(entry, int) else sizes.get(entry, -1) for entry in leaf.shape)
    if min(shape, default=0) < 0:
        return None
    return open_cpu().copied(scalar_tensor(leaf.dtype, leaf.default), shape, strides_in(leaf.layout, shape))


_FORMATS = {"bool": "?", "float16": "e", "float32": "f", "float64": "d", "complex64": "f4x", "complex128": "d8x"}
_FORMATS |= {
    f"{sign}int{8 << at}": code for sign, codes in (("", "bhiq"), ("u", "BHIQ")) for at, code in enumerate(codes)
}


def scalar_tensor(dtype: str, value: Scalar) -> Any:
    """A tensor of no axes. Raises TypeError, OverflowError and struct.error for what the dtype does not hold."""
    number: Any = value
    if dtype == "bfloat16":
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        data = struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    elif dtype in _FORMATS:
        data = struct.pack(f"<{_FORMATS[dtype]}", int(number) if "int" in dtype else number)
    else:
        raise TypeError(f"no pad of {dtype} can be made")
    return open_cpu().placed(data, 0, dtype, (), ())
