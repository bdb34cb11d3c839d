"""Example inputs: what a model is captured, tuned, tried and verified with. The same seed gives the same values on
every device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aotc.errors import ManifestError
from aotc.expressions import Expression
from aotc.manifest.inputs import ConstantInput, TensorInput, parse_inputs
from aotc.manifest.recorded_values import values_in
from aotc.manifest.types import ModelSpec, RecordedCall
from aotc.models.factory import import_object
from aotc.records import Dims, Scalar
from aotc.tensors.layouts import laid_out

LeafValue = torch.Tensor | Scalar


def example_leaves(
    spec: ModelSpec, dims: Dims, device: torch.device | str, seed: int, *, folder: Path | None = None
) -> list[LeafValue]:
    """One value for each leaf of `parse_inputs(spec.inputs)`: a tensor on `device`, or the constant.

    `dims` gives every dim of the shapes a size. Each leaf draws from a generator of its own on the CPU, so the values
    depend on the seed and the leaf's index only. `folder` is the manifest's, for inits that name a function (default:
    the working folder). Raises ManifestError where such a function cannot be imported, raises, or gives another
    tensor than it was asked for.
    """
    _, leaves = parse_inputs(spec.inputs)
    shapes = {leaf.path: leaf_shape(leaf, dims) for leaf in leaves if isinstance(leaf, TensorInput)}
    values: list[LeafValue] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, ConstantInput):
            values.append(leaf.value)
            continue
        generator = torch.Generator().manual_seed((seed << 16) + index)
        init, dtype = leaf.inits[0], leaf_dtype(leaf, spec)
        if isinstance(init, Mapping) and "recorded" in init:
            tensor = recorded_tensor(spec.recorded.get(init["recorded"], ()), leaf.path, dtype, shapes)
        else:
            tensor = _example_tensor(leaf, dtype, dims, generator, folder or Path.cwd())
        values.append(laid_out(tensor.to(device), leaf.layout))
    return values


def leaf_dtype(leaf: TensorInput, spec: ModelSpec) -> torch.dtype:
    """A tensor input's dtype: its own, else the model's, else float32."""
    dtype = getattr(torch, leaf.dtype or spec.dtype or "float32")
    assert isinstance(dtype, torch.dtype)
    return dtype


def leaf_shape(leaf: TensorInput, dims: Dims) -> tuple[int, ...]:
    """A tensor input's sizes at these dims."""
    return tuple(entry if isinstance(entry, int) else Expression(entry).evaluate(dims) for entry in leaf.shape)


def _example_tensor(
    leaf: TensorInput, dtype: torch.dtype, dims: Dims, generator: torch.Generator, folder: Path
) -> torch.Tensor:
    shape = leaf_shape(leaf, dims)
    init = leaf.inits[0]
    match init if init is not None else _default_init(dtype):
        case "randn":
            return _randn(shape, dtype, generator)
        case "ones":
            return torch.ones(shape, dtype=dtype)
        case "zeros":
            return torch.zeros(shape, dtype=dtype)
        case "padding":
            return _padding(shape, dtype)
        case {"randint": [low, high]}:
            return _randint(leaf.path, (low, high), shape, dims, generator).to(dtype)
        case {"constant": value}:
            return torch.full(shape, value, dtype=dtype)
        case str() as reference:
            return _from_function(reference, leaf.path, shape, dtype, generator, folder)
    raise ManifestError(
        f"the init {init!r} of `{leaf.path}` is not known",
        hint="write randn, ones, zeros, padding, {randint: [low, high]}, {constant: value}, {recorded: …} or "
        "package.module:function",
    )


def _default_init(dtype: torch.dtype) -> Any:
    return "randn" if dtype.is_floating_point or dtype.is_complex else {"randint": [0, 2]}


def randint_limits(limits: Sequence[int | str], dims: Dims) -> tuple[int, int]:
    """The least integer of `randint`, and the first that is too large, at these dims."""
    low, high = (end if isinstance(end, int) else Expression(end).evaluate(dims) for end in limits)
    return low, high


def _randint(
    path: str, limits: Sequence[int | str], shape: tuple[int, ...], dims: Dims, generator: torch.Generator
) -> torch.Tensor:
    """int64, which can hold what all other integers can: torch draws few of these."""
    low, high = randint_limits(limits, dims)
    if low >= high and 0 not in shape:
        at = ", ".join(f"{dim}={size}" for dim, size in dims.items())
        message = f"`{path}` cannot be filled at {at}: randint [{limits[0]}, {limits[1]}] holds no integer there"
        raise ManifestError(message, hint="leave these sizes out of the buckets, or write other limits")
    return torch.randint(low, max(high, low + 1), shape, dtype=torch.int64, generator=generator)


def recorded_tensor(
    calls: Sequence[RecordedCall], path: str, dtype: torch.dtype, shapes: Mapping[str, Sequence[int]]
) -> torch.Tensor:
    """The values of the recorded call whose tensors have the nearest shapes: cut at the end of each axis that is longer
    there, and with the last slice repeated along one that is shorter. Raises ManifestError where there is none."""
    having = [call for call in calls if path in call.values and len(call.shapes[path]) == len(shapes[path])]
    if not having:
        message = f"no values of `{path}` were recorded that have {len(shapes[path])} dimensions"
        raise ManifestError(message, hint="record again, or write another init")
    tensor = values_of(min(having, key=lambda call: _distance(call.shapes, shapes)), path).to(dtype)
    for axis, size in enumerate(shapes[path]):
        if tensor.shape[axis] == 0 < size:
            tensor = torch.zeros((*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]), dtype=dtype)
        tensor = tensor.index_select(axis, torch.arange(size).clamp(max=max(tensor.shape[axis] - 1, 0)))
    return tensor


def values_of(call: RecordedCall, path: str) -> torch.Tensor:
    """The values that an input had in a recorded call. Raises ManifestError."""
    shape, dtype = call.shapes[path], getattr(torch, call.dtypes[path])
    try:
        data = values_in(call.values[path], math.prod(shape) * dtype.itemsize)
    except ValueError as error:
        raise ManifestError(f"`{path}`: {error}", hint="record again, or write another init") from error
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.zeros(shape, dtype=dtype)


def _distance(recorded: Mapping[str, Sequence[int]], shapes: Mapping[str, Sequence[int]]) -> float:
    """How far a recorded call is from these shapes: an axis that has to be repeated is farther than any that is cut."""
    pairs = [
        (there, size)
        for path, shape in shapes.items()
        for there, size in zip(recorded.get(path, ()), shape, strict=False)
    ]
    costs = (
        (there - size) / there if there > size else (len(pairs) + 1) * (2 - there / size)
        for there, size in pairs
        if there != size
    )
    return sum(costs)


def _padding(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A mask over a batch whose last row is shorter: ones, and zeros in the last quarter of that row. A row of one
    element is not masked: nothing would be left of it."""
    mask = torch.ones(shape, dtype=dtype)
    if mask.numel() and mask.dim() and shape[-1] > 1:
        last = mask[-1] if mask.dim() > 1 else mask
        last[..., shape[-1] - (shape[-1] + 3) // 4 :] = 0
    return mask


def _randn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal values. The small dtypes are rounded from float32, because torch draws them differently or not at all."""
    wide = {torch.float64: torch.float64, torch.complex128: torch.complex128}
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, dtype=wide.get(dtype, drawn), generator=generator).to(dtype)


def _from_function(
    reference: str,
    path: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
    folder: Path,
) -> torch.Tensor:
    """Call the user's `f(shape, dtype, generator)` and check what it gives."""
    function = import_object(reference, folder)
    try:
        tensor = function(shape, dtype, generator)
    except Exception as error:
        message = f"the init `{reference}` of `{path}` raised {type(error).__name__}: {error}"
        raise ManifestError(message, hint="it is called as f(shape, dtype, generator)") from error
    if not isinstance(tensor, torch.Tensor):
        message = f"the init `{reference}` of `{path}` gave {type(tensor).__name__}; expected a Tensor"
        raise ManifestError(message, hint="return a tensor of the shape and the dtype that the function is given")
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        message = (
            f"the init `{reference}` of `{path}` gave {list(tensor.shape)} {tensor.dtype}; "
            f"expected {list(shape)} {dtype}"
        )
        raise ManifestError(message, hint="use the shape and the dtype that the function is given")
    return tensor.detach()
