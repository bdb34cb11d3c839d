"""Example inputs: what a model is captured, tuned, tried and verified with. The same seed gives the same values on
every device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from aotc.errors import ManifestError
from aotc.expressions import Expression
from aotc.manifest.inputs import ConstantInput, TensorInput, parse_inputs
from aotc.manifest.types import ModelSpec
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
    values: list[LeafValue] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, ConstantInput):
            values.append(leaf.value)
            continue
        generator = torch.Generator().manual_seed((seed << 16) + index)
        tensor = _example_tensor(leaf, leaf_dtype(leaf, spec), dims, generator, folder or Path.cwd())
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
            # torch draws integers of few dtypes; int64 can hold what all others can.
            return torch.randint(low, high, shape, dtype=torch.int64, generator=generator).to(dtype)
        case {"constant": value}:
            return torch.full(shape, value, dtype=dtype)
        case str() as reference:
            return _from_function(reference, leaf.path, shape, dtype, generator, folder)
    raise ManifestError(
        f"the init {init!r} of `{leaf.path}` is not known",
        hint="write randn, ones, zeros, padding, {randint: [low, high]}, {constant: value} or package.module:function",
    )


def _default_init(dtype: torch.dtype) -> Any:
    return "randn" if dtype.is_floating_point or dtype.is_complex else {"randint": [0, 2]}


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
