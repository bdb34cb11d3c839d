"""One model's buckets in the manifest as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from aotc.errors import TraceError
from aotc.expressions import Expression, padded_by_all
from aotc.records import Bucket
from aotc.tools.advise.trace import DimSizes


class Today(NamedTuple):
    """A model: its dims, its buckets, the dims that every input using them pads, the input elements of a call, how many
    targets each bucket is compiled for, and whether regions of it are compiled instead of the whole."""

    model: str
    dims: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    padded: frozenset[str]
    elements: Callable[[DimSizes], float]
    targets: int
    regions: bool


def read_today(path: Path, model: str | None = None) -> Today:
    """Raises ManifestError for a manifest with mistakes, TraceError where the model is not clear or has no dims."""
    from aotc.manifest import read_manifest

    manifest = read_manifest(path, only=(model,) if model else ())
    if len(manifest.models) != 1:
        raise TraceError(
            f"{path} has {len(manifest.models)} models", hint=f"choose one: --model {min(manifest.models)}"
        )
    (spec,) = manifest.models.values()
    dims = tuple(sorted(spec.buckets[0]))
    if not dims:
        raise TraceError(f"the model `{spec.name}` has no dims", hint="one bucket takes all its calls")
    tensors = () if spec.name in manifest.auto else _tensors(spec.inputs)
    padded = _padded(tensors)
    return Today(spec.name, dims, spec.buckets, padded, _elements(tensors, dims), len(spec.targets), bool(spec.regions))


class _Tensor(NamedTuple):
    shape: tuple[int | Expression, ...]
    pad: frozenset[str]


def _tensors(inputs: dict[str, Any]) -> tuple[_Tensor, ...]:
    from aotc.manifest.inputs import TensorInput, parse_inputs

    _, leaves = parse_inputs(inputs)
    return tuple(
        _Tensor(tuple(Expression(one) if isinstance(one, str) else one for one in leaf.shape), frozenset(leaf.pad))
        for leaf in leaves
        if isinstance(leaf, TensorInput)
    )


def _padded(tensors: tuple[_Tensor, ...]) -> frozenset[str]:
    return padded_by_all(
        (entry.names, tensor.pad) for tensor in tensors for entry in tensor.shape if isinstance(entry, Expression)
    )


def _elements(tensors: tuple[_Tensor, ...], dims: tuple[str, ...]) -> Callable[[DimSizes], float]:
    if not tensors:
        return math.prod

    def elements(shape: DimSizes) -> float:
        sizes = dict(zip(dims, shape, strict=True))
        return sum(
            math.prod(entry.evaluate(sizes) if isinstance(entry, Expression) else entry for entry in tensor.shape)
            for tensor in tensors
        )

    return elements
