"""Which of a model's regions are equal, and what each kind is called with: found by running the model eagerly.

Equal are submodules of one class whose state has the same form, which are called alike at every size of the manifest,
and do the same then (`operator_trace`). The sizes of a region's inputs are explained by the model's dims, from what
they are at these sizes; the model is run at no size that its manifest does not promise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.operator_trace import Trace
from aotc.digest import canonical_json
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.manifest import ModelSpec
from aotc.models.calls import state_put_back, writable_buffers
from aotc.models.regions import Call, never_called, region_paths, run_observed
from aotc.models.signature import make_signature
from aotc.records import (
    Bucket,
    ConstantLeaf,
    Dims,
    Leaf,
    Parameter,
    Region,
    Signature,
    SizeRange,
    TensorLeaf,
    tuned_dims,
)
from aotc.snapshot import dtype_name, named_state, state_specs
from aotc.tensors.layouts import MEMORY_FORMATS

Layout = Literal["contiguous", "channels_last", "channels_last_3d"]


class RegionPart(NamedTuple):
    """A region at one of the buckets that its inputs tell apart; `sizes` are those of the model's dims to run it at."""

    region: Region
    bucket: Bucket
    sizes: Dims


class _Seen(NamedTuple):
    """One call of one instance, as far as the code depends on it. Hashable."""

    parameters: bytes
    paths: tuple[str, ...]
    leaves: tuple[_SeenLeaf, ...]
    trace: str


class _SeenLeaf(NamedTuple):
    """`kind` is a tensor's dtype, or a constant's type; `layouts` are those that the tensor lies in, as they are."""

    kind: str
    value: Any = None
    shape: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = ()


def find_regions(spec: ModelSpec, module: nn.Module, folder: Path) -> list[RegionPart]:
    """The kinds of regions of a model, in its order, each at every bucket. `module` runs eagerly, on the device that it
    is on; its state, and what it keeps, are as before afterwards.

    Raises ManifestError for patterns that do not fit the module, BuildError for regions that are not called, or whose
    inputs a record cannot describe.
    """
    signature = make_signature(spec, module)
    paths = region_paths(spec, module)
    samples = _samples(spec.buckets)
    seen = [_calls_at(spec, module, signature, dims, paths, folder) for dims in samples]
    kinds: dict[Any, list[str]] = defaultdict(list)
    for path in paths:
        kinds[_kind(module.get_submodule(path), [calls[path] for calls in seen])].append(path)
    parts = []
    for instances in kinds.values():
        calls = [found[instances[0]] for found in seen]
        region = Region(instances[0], tuple(instances), _signature(spec, instances[0], calls, samples))
        parts += [RegionPart(region, *found) for found in _buckets(spec, region)]
    return parts


def _kind(instance: nn.Module, calls: Sequence[_Seen]) -> Any:
    state = named_state(instance)
    return type(instance), state_specs(state, state, digests=False), tuple(calls)


def _samples(buckets: Sequence[Bucket]) -> list[Dims]:
    """Sizes that the manifest promises: each bucket's own, and of each range both ends and the middle."""
    samples: list[Dims] = []
    for bucket in buckets:
        tuned = tuned_dims(bucket)
        samples.append(tuned)
        for dim, size in bucket.items():
            if isinstance(size, SizeRange):
                samples += [{**tuned, dim: other} for other in _in_range(size)]
    return [dims for index, dims in enumerate(samples) if dims not in samples[:index]]


def _in_range(sizes: SizeRange) -> Iterator[int]:
    """0 and 1 are special sizes, tried later (`aotc.compiler.capture.zero_one_check`)."""
    step = sizes.multiple_of
    low = -(-max(sizes.min, 2) // step) * step
    high = sizes.max // step * step
    yield from (size for size in (low, (low + high) // 2 // step * step, high) if size in sizes)


def _calls_at(
    spec: ModelSpec, module: nn.Module, signature: Signature, dims: Dims, paths: Sequence[str], folder: Path
) -> dict[str, _Seen]:
    found: dict[str, list[_Seen]] = {path: [] for path in paths}

    def observe(path: str, call: Call, forward: Callable[[], Any]) -> Any:
        described = tuple(map(_describe, call.leaves))
        instance = module.get_submodule(path)
        with Trace(call.leaves, named_state(instance)) as trace:
            result = forward()
        _refuse_other_results(path, result)
        found[path].append(_Seen(canonical_json(call.parameters), call.paths, described, trace.digest(result)))
        return result

    with _left_as_it_was(module):
        run_observed(spec, module, signature, dims, folder, paths, observe)
    for path, calls in found.items():
        if not calls:
            raise never_called(path, dims)
        if len(set(calls)) > 1:
            raise BuildError(
                f"the region `{path}` is called {len(calls)} times in one call of the model, and not alike",
                hint="take the module around it as the region, or its parts",
                stage="regions",
            )
    return {path: calls[0] for path, calls in found.items()}


@contextmanager
def _left_as_it_was(module: nn.Module) -> Iterator[None]:
    """A context in which the module is called; its buffers, and what it keeps in Python, are as before afterwards."""
    kept = KeptObjects(module)
    try:
        with state_put_back(module, writable_buffers(module)):
            yield
    finally:
        kept.put_back()


def _refuse_other_results(path: str, result: Any) -> None:
    for leaf in pytree.tree_leaves(result):
        if leaf is not None and not isinstance(leaf, Tensor | bool | int | float | str):
            raise BuildError(
                f"the region `{path}` returns a {type(leaf).__module__}.{type(leaf).__qualname__}",
                hint="take a region whose forward returns tensors and plain values, in lists, tuples and dicts",
                stage="regions",
            )


def _describe(leaf: Any) -> _SeenLeaf:
    if not isinstance(leaf, Tensor):
        return _SeenLeaf(type(leaf).__name__, value=repr(leaf) if isinstance(leaf, float) else leaf)
    return _SeenLeaf(dtype_name(leaf.dtype), shape=tuple(leaf.shape), layouts=tuple(_layouts(leaf)))


def _layouts(tensor: Tensor) -> Iterator[Layout]:
    layouts: tuple[Layout, ...] = ("contiguous", "channels_last", "channels_last_3d")
    for layout, rank in zip(layouts, (tensor.dim(), 4, 5), strict=True):
        if tensor.dim() == rank and tensor.is_contiguous(memory_format=MEMORY_FORMATS[layout]):
            yield layout


# -- the calling convention of a region -------------------------------------------------------------------------------


def _signature(spec: ModelSpec, path: str, calls: Sequence[_Seen], samples: Sequence[Dims]) -> Signature:
    """One that holds for all calls; sizes that differ between them as expressions over the model's dims."""
    first = calls[0]
    for call, dims in zip(calls, samples, strict=True):
        if (call.parameters, _kinds(call)) != (first.parameters, _kinds(first)):
            before, now = ({f"{name} a {kind}" for name, kind in _kinds(one).items()} for one in (first, call))
            raise BuildError(
                f"the region `{path}` is called with other arguments at other sizes: "
                f"{_listed(before - now)} at {_text(samples[0])}, {_listed(now - before)} at {_text(dims)}",
                hint="split the buckets over two models, or take another region",
                stage="regions",
            )
    columns = list(zip(*(call.leaves for call in calls), strict=True))
    leaves = [
        _leaf(path, name, column, samples, spec.buckets) for name, column in zip(first.paths, columns, strict=True)
    ]
    copies = any(leaf.shape is not None and not _common_layouts(column) for column in columns for leaf in column[:1])
    _check_readable(path, leaves)
    parameters = msgspec.json.decode(first.parameters, type=tuple[Parameter, ...])
    return Signature(parameters, tuple(leaves), make_contiguous=spec.make_contiguous or copies)


def _kinds(call: _Seen) -> dict[str, str]:
    return {name: leaf.kind for name, leaf in zip(call.paths, call.leaves, strict=True)}


def _listed(texts: Collection[str]) -> str:
    return ", ".join(sorted(texts)[:3]) or "nothing else"


def _common_layouts(column: Sequence[_SeenLeaf]) -> list[Layout]:
    return [layout for layout in column[0].layouts if all(layout in leaf.layouts for leaf in column)]


def _leaf(
    region: str, name: str, column: Sequence[_SeenLeaf], samples: Sequence[Dims], buckets: Sequence[Bucket]
) -> Leaf:
    first = column[0]
    if first.shape is None:
        values = dict.fromkeys(leaf.value for leaf in column)
        if len(values) > 1:
            raise BuildError(
                f"`{name}` of the region `{region}` is {', '.join(map(str, list(values)[:3]))} at different sizes",
                hint="a Python value is part of the compiled code: let the region take it from a tensor's shape",
                stage="regions",
            )
        return ConstantLeaf(name, float(first.value) if first.kind == "float" else first.value)
    shapes = [leaf.shape for leaf in column if leaf.shape is not None]
    if len({len(shape) for shape in shapes}) > 1:
        raise BuildError(
            f"the region `{region}` is given `{name}` with different numbers of axes at different sizes",
            hint="split the buckets over two models, or take another region",
            stage="regions",
        )
    axes = []
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        entry = size_over_dims(sizes, samples)
        if entry is None or (isinstance(entry, str) and entry.count("*") > 1 and _any_range(buckets)):
            shown = ", ".join(f"{size} at {_text(dims)}" for size, dims in list(zip(sizes, samples, strict=True))[:3])
            raise BuildError(
                f"axis {axis} of `{name}` of the region `{region}` cannot be said in the model's dims: {shown}",
                hint="give each bucket a model of its own, or take the module around it as the region",
                stage="regions",
            )
        axes.append(entry)
    layouts = _common_layouts(column)
    return TensorLeaf(name, first.kind, tuple(axes), layout=layouts[0] if layouts else "contiguous")


def _any_range(buckets: Sequence[Bucket]) -> bool:
    return any(isinstance(size, SizeRange) for bucket in buckets for size in bucket.values())


def _text(dims: Dims) -> str:
    return ",".join(f"{name}={size}" for name, size in dims.items()) or "every call"


def size_over_dims(sizes: Sequence[int], samples: Sequence[Dims]) -> int | str | None:
    """What gives these sizes at these samples: a number, a dim, a line over one dim, or a product of two; else None."""
    if len(set(sizes)) == 1:
        return sizes[0]
    names = sorted(samples[0])
    for name in names:
        if all(size == dims[name] for size, dims in zip(sizes, samples, strict=True)):
            return name
    for name in names:
        if (line := _line(name, sizes, samples)) is not None:
            return line
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            products = [dims[one] * dims[other] for dims in samples]
            scale = sizes[0] // products[0] if products[0] else 0
            if scale and all(size == scale * product for size, product in zip(sizes, products, strict=True)):
                return f"{scale}*{one}*{other}"
    return None


def _line(name: str, sizes: Sequence[int], samples: Sequence[Dims]) -> str | None:
    points = {dims[name]: size for size, dims in zip(sizes, samples, strict=True)}
    if len(points) < 2:
        return None
    (x0, y0), (x1, y1), *_ = points.items()
    scale, rest = divmod(y1 - y0, x1 - x0)
    offset = y0 - scale * x0
    on_line = all(size == scale * dims[name] + offset for size, dims in zip(sizes, samples, strict=True))
    if rest or scale <= 0 or not on_line:
        return None
    return f"{scale}*{name}" + (f" + {offset}" if offset > 0 else f" - {-offset}" if offset else "")


def _check_readable(region: str, leaves: Sequence[Leaf]) -> None:
    """Every dim must stand alone in some axis: at a call, sizes are read from there."""
    entries = [entry for leaf in leaves if isinstance(leaf, TensorLeaf) for entry in leaf.shape]
    texts = [entry for entry in entries if isinstance(entry, str)]
    alone = {name for text in texts if len(names := dims_in(text)) == 1 for name in names}
    for text in texts:
        if unread := dims_in(text) - alone:
            raise BuildError(
                f"the region `{region}` is given an axis of `{text}`, and none that tells "
                f"{' and '.join(f'`{name}`' for name in sorted(unread))}",
                hint="take the module around it as the region",
                stage="regions",
            )


def dims_in(text: str) -> frozenset[str]:
    return Expression(text).names


def _buckets(spec: ModelSpec, region: Region) -> Iterator[tuple[Bucket, Dims]]:
    """The buckets of the dims that the region's inputs tell, each once, with the model's sizes to run it at."""
    shapes = [leaf.shape for leaf in region.signature.leaves if isinstance(leaf, TensorLeaf)]
    told = {name for shape in shapes for entry in shape if isinstance(entry, str) for name in dims_in(entry)}
    seen: list[Bucket] = []
    for bucket in spec.buckets:
        own = {name: size for name, size in bucket.items() if name in told}
        if own not in seen:
            seen.append(own)
            yield own, tuned_dims(bucket)


def regions_of(parts: Sequence[RegionPart]) -> tuple[Region, ...]:
    """Each region once, in order."""
    return tuple({part.region.name: part.region for part in parts}.values())
