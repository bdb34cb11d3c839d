"""Find the dims of the outputs' axes, so that padding can be cropped.

A graph of fixed sizes does not tell them: 128 may be `seq` or a width. So the model is run on fake tensors (shapes
without data) at the bucket's sizes, and again with one dim changed; the axes that change have this dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.lifting.lift import Capture
from aotc.errors import BuildError
from aotc.expressions import paddable_dims
from aotc.machine.targets import Target
from aotc.manifest import ModelSpec
from aotc.models.calls import arguments_of, signature_leaves
from aotc.records import Bucket, Output, Signature, StridedView, has_range, tuned_dims

Shapes = list[tuple[int, ...]]


def output_dims(
    spec: ModelSpec,
    module: nn.Module,
    signature: Signature,
    bucket: Bucket,
    captured: Capture,
    target: Target,
    folder: Path,
) -> tuple[Output, ...]:
    """The capture's outputs, with `dims` filled in for the dims that the manifest crops.

    Raises BuildError where an axis depends on a dim in a way that cannot be cropped (several dims in one axis).
    """
    padded = padded_dims(signature, bucket) if has_range(bucket) else tuple(bucket)
    if not spec.crop or not padded:
        return captured.outputs
    if isinstance(spec.crop, Mapping):
        outputs = list(captured.outputs)
        for index, names in named_axes_of(spec.crop, captured.output_paths).items():
            outputs[index] = msgspec.structs.replace(outputs[index], dims=names)
        return tuple(outputs)
    sizes = tuned_dims(bucket)
    probe = _Probe(spec, module, signature, target, folder)
    base = probe.shapes(sizes)
    texts = [[""] * len(shape) for shape in base]
    for dim in spec.crop:
        if dim in padded:
            mark_axes(dim, sizes, base, probe.shapes, texts)
    return tuple(
        msgspec.structs.replace(output, dims=tuple(text)) if any(text) and _is_cropped(output) else output
        for output, text in zip(captured.outputs, texts, strict=True)
    )


def _is_cropped(output: Output) -> bool:
    """Whether an output is computed from padded inputs. An input that is returned unchanged is the caller's own
    tensor."""
    return output.index is not None or isinstance(output.view, StridedView)


def padded_dims(signature: Signature, bucket: Bucket) -> tuple[str, ...]:
    """The dims of a bucket that has a range along which requests are padded: fixed ones, and ranges with gaps."""
    paddable = paddable_dims(signature) if has_range(bucket) else ()
    return tuple(
        name
        for name in sorted(paddable)
        if isinstance(size := bucket[name], int) or size.multiple_of > 1 or size.min > 1
    )


def named_axes_of(crop: Mapping[str, list[str | None]], paths: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """The dims that the manifest gives the axes of outputs, by the index of the output's path. Raises BuildError."""
    indices = {path: index for index, path in enumerate(paths)}
    if unknown := [path for path in crop if path not in indices]:
        raise BuildError(
            f"the manifest crops the output `{unknown[0]}`; the model's outputs are {', '.join(map(repr, indices))}",
            hint="name one of these under `outputs: {crop: …}`",
            stage="export",
        )
    return {indices[path]: tuple(name or "" for name in names) for path, names in crop.items()}


class _Probe:
    """Runs the model on fake tensors."""

    def __init__(self, spec: ModelSpec, module: nn.Module, signature: Signature, target: Target, folder: Path) -> None:
        self.spec, self.module, self.signature = spec, module, signature
        self.target, self.folder = target, folder

    def shapes(self, sizes: Mapping[str, int]) -> Shapes:
        """The shape of every flat output at these sizes; () for an output that is not a tensor."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        values = signature_leaves(self.spec, self.signature, sizes, self.target.device, 0, self.folder)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
            leaves = [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in values]
            args, kwargs = arguments_of(self.signature, leaves)
            result = self.module(*args, **kwargs)
        return [tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in pytree.tree_leaves(result)]


def _other_sizes(size: int) -> Iterator[int]:
    """Other sizes to try; several, since a model may accept only multiples of a number."""
    yield from (other for other in (size + 1, size - 1, 2 * size, size // 2, size + 8) if other > 0 and other != size)


def mark_axes(
    dim: str,
    sizes: Mapping[str, int],
    base: Shapes,
    shapes_at: Callable[[Mapping[str, int]], Shapes],
    texts: list[list[str]],
    others: Callable[[int], Iterator[int]] = _other_sizes,
) -> None:
    """Set the text of each axis that changes with `dim`: `dim`, or `scale*dim+offset`.

    `base` are the shapes at `sizes`; `shapes_at` gives those at other ones, with `dim` changed to `others` in turn.

    Raises BuildError for an axis that cannot be said so.
    """
    slopes: list[Any] = []
    for other in others(sizes[dim]):
        try:
            changed = shapes_at({**sizes, dim: other})
        except Exception:
            continue
        slopes.append((other - sizes[dim], changed))
        if len(slopes) == 2:
            break
    if not slopes:
        raise BuildError(
            f"the model runs at no size of `{dim}` but {sizes[dim]}, so the axes of its outputs that depend on it are "
            "unknown",
            hint='name the axes: outputs: {crop: {"[0]": [batch, null]}}, one name or null for each axis',
            stage="export",
        )
    if any(len(changed) != len(base) for _, changed in slopes):
        raise _uncuttable("the number of outputs", dim, f"{len(base)} at {dim}={sizes[dim]}")
    for output, shape in enumerate(base):
        if any(len(changed[output]) != len(shape) for _, changed in slopes):
            raise _uncuttable(f"the rank of output {output}", dim, f"{len(shape)} at {dim}={sizes[dim]}")
        for axis, size in enumerate(shape):
            rates = {(changed[output][axis] - size) / step for step, changed in slopes}
            if rates == {0.0}:
                continue
            scale = rates.pop()
            if rates or scale != int(scale) or texts[output][axis]:
                raise _uncuttable(f"axis {axis} of output {output}", dim, f"size {size} at {dim}={sizes[dim]}")
            offset = size - int(scale) * sizes[dim]
            texts[output][axis] = dim if (scale, offset) == (1, 0) else f"{int(scale)}*{dim}+{offset}"


def _uncuttable(what: str, dim: str, found: str) -> BuildError:
    return BuildError(
        f"{what} depends on `{dim}` in a way that cannot be cropped ({found})",
        hint="return the dims in axes of their own, or leave this model unpadded",
        stage="export",
    )
