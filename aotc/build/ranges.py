"""Buckets with ranges: what torch.export is told about them, and what it found out that the manifest did not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from aotc.build.capture import Capture
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.manifest.calls import fill
from aotc.records import Bucket, Signature, SizeRange, TensorLeaf


def dynamic_shapes(signature: Signature, bucket: Bucket) -> dict[str, Any] | None:
    """torch.export's `dynamic_shapes` by parameter name, or None for a bucket of fixed sizes."""
    if not any(isinstance(size, SizeRange) for size in bucket.values()):
        return None
    dims = {name: _dim(name, size) for name, size in bucket.items()}
    shapes = [
        {axis: _axis(entry, dims) for axis, entry in enumerate(leaf.shape)} if isinstance(leaf, TensorLeaf) else None
        for leaf in signature.leaves
    ]
    return {parameter.name: fill(parameter.tree, shapes) for parameter in signature.parameters}


def _dim(name: str, size: int | SizeRange) -> Any:
    """A fixed size as it is, a range as torch.export's Dim; a multiple is a derived Dim, so export knows it."""
    if isinstance(size, int):
        return size
    step = size.multiple_of
    low, high = -(-size.min // step), size.max // step
    if low == high:
        return low * step
    if step == 1:
        return torch.export.Dim(name, min=low, max=high)
    return step * torch.export.Dim(f"{name}_over_{step}", min=low, max=high)


def _axis(entry: int | str, dims: Mapping[str, Any]) -> Any:
    if isinstance(entry, int):
        return None
    size = Expression(entry).evaluate(dims)
    return None if isinstance(size, int) else size


_SIZE = re.compile(r"L(?P<path>(?:\['\w+'\]|\[\d+\])+)\.size\(\)\[(?P<axis>\d+)\]")


def conditions(captured: Capture, signature: Signature, bucket: Bucket) -> tuple[str, ...]:
    """The conditions on sizes that export found, over the manifest's dims.

    They come from the exported program's own guards (plain Python over `L['x'].size()[0]`); what does not depend on a
    range is left out, since a fixed size is compared anyway. Raises BuildError for a guard that cannot be said so.
    """
    if not any(isinstance(size, SizeRange) for size in bucket.values()):
        return ()
    shapes = {_local_path(leaf.path): leaf.shape for leaf in signature.leaves if isinstance(leaf, TensorLeaf)}
    found = []
    for guard in captured.guards:
        if ".size()" not in guard:
            continue
        try:
            text = _SIZE.sub(lambda match: _entry(match, shapes), guard)
            condition = Expression(text.replace("//", " // "))
        except (KeyError, ValueError) as error:
            raise BuildError(
                f"export found a condition that aotc cannot keep as a guard: {guard}",
                hint="list fixed buckets instead of the range",
                stage="export",
            ) from error
        fixed = {name: size for name, size in bucket.items() if isinstance(size, int)}
        if condition.names - fixed.keys():
            found.append(condition.text)
    return tuple(dict.fromkeys(found))


def _local_path(path: str) -> str:
    """`batch.ids` and `xs[0]` as export writes them: `['batch']['ids']`, `['xs'][0]`."""
    parts = re.findall(r"\[\d+\]|[^.\[\]]+", path)
    return "".join(part if part.startswith("[") else f"['{part}']" for part in parts)


def _entry(match: re.Match[str], shapes: Mapping[str, tuple[int | str, ...]]) -> str:
    entry = shapes[match["path"]][int(match["axis"])]
    return str(entry) if isinstance(entry, int) or entry.isidentifier() else f"({entry})"
