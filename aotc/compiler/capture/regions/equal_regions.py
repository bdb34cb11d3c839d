"""Find the equal regions of a model, and the inputs of each kind, by running the model eagerly.

Submodules are equal if they have one class and the same form of state, are called with inputs of the same form at every
sampled size, and then run the same operators (`operator_trace`). The sizes of a region's inputs are expressed in the
model's dims, from these samples; the model is run only at sizes that its manifest promises.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from aotc.compiler.capture.module_objects import KeptObjects
from aotc.compiler.capture.operator_trace import OperatorTrace
from aotc.digest import canonical_json
from aotc.errors import BuildError
from aotc.expressions import Expression
from aotc.manifest import ModelSpec
from aotc.models.calls import state_put_back, writable_buffers
from aotc.models.input_forms import input_forms
from aotc.models.regions import Call, never_called, observed, region_paths, run_eagerly
from aotc.models.signature import make_signature
from aotc.reads.state_specs import state_specs
from aotc.reads.tensors import dtype_name, named_state, plain_state
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
    has_range,
    tuned_dims,
)
from aotc.tensors.layouts import MEMORY_FORMATS
from aotc.tensors.rounding import uncompiled
from aotc.tensors.subclasses import descriptions, unwrapped

Layout = Literal["contiguous", "channels_last", "channels_last_3d"]


class RegionPart(NamedTuple):
    """A region at one bucket of its inputs' dims; `sizes` are the model's dims at which to run it."""

    region: Region
    bucket: Bucket
    sizes: Dims


class _Seen(NamedTuple):
    """One call of one instance: the facts on which the code depends. Hashable."""

    parameters: bytes
    paths: tuple[str, ...]
    leaves: tuple[_SeenLeaf, ...]
    trace: str

    @property
    def form(self) -> RegionForm:
        """The facts that distinguish variants of a region beside sizes: the structure of the arguments, the dtype and
        number of axes of each tensor, and the constants."""
        return self.parameters, self.paths, tuple(leaf.form for leaf in self.leaves)


class _SeenLeaf(NamedTuple):
    """`kind` is a tensor's dtype, or a constant's type; `layouts` are the memory formats that the tensor satisfies."""

    kind: str
    value: Any = None
    shape: tuple[int, ...] | None = None
    layouts: tuple[Layout, ...] = ()

    @property
    def form(self) -> tuple[str, Any, int | None]:
        return self.kind, self.value, None if self.shape is None else len(self.shape)


RegionForm = tuple[bytes, tuple[str, ...], tuple[tuple[str, Any, int | None], ...]]
_CallsAt = Callable[[Dims], list[dict[str, list[_Seen]]]]
"""Returns the calls of each path at these sizes of the model's dims, for each form of the model's inputs."""


def find_regions(spec: ModelSpec, module: nn.Module, folder: Path) -> list[RegionPart]:
    """The kinds of regions of a model, in its order, each in every form in which it is called and at every bucket.
    `module` runs eagerly, on its current device; its state and its Python objects are restored afterwards.

    The forms of one kind are regions with the same instances; the first is named by the path of its first instance.

    Raises ManifestError for patterns that do not fit the module, BuildError for regions that are not called, or whose
    inputs a record cannot describe.
    """
    signature = make_signature(spec, module)
    paths = region_paths(spec, module)
    forms = input_forms(spec)

    def calls_at(dims: Dims) -> list[dict[str, list[_Seen]]]:
        return [_calls_at(form, module, signature, dims, paths, folder) for form in forms]

    samples = _samples(spec.buckets)
    seen = [calls_at(dims) for dims in samples]
    kinds: dict[Any, list[str]] = defaultdict(list)
    for path in paths:
        calls = tuple(tuple(one[path]) for at_dims in seen for one in at_dims)
        kinds[_kind(module.get_submodule(path), calls)].append(path)
    parts: list[RegionPart] = []
    for instances in kinds.values():
        path = instances[0]
        found = [(dims, _distinct(path, dims, at_dims)) for dims, at_dims in zip(samples, seen, strict=True)]
        parts += _parts(spec, instances, found, calls_at)
    return parts


def _kind(instance: nn.Module, calls: Sequence[Sequence[_Seen]]) -> Any:
    named = named_state(instance)
    state = unwrapped(named)
    specs = state_specs(state, state, digests=False, subclasses=descriptions(named))
    return type(instance), canonical_json(specs), tuple(calls)


def _samples(buckets: Sequence[Bucket]) -> list[Dims]:
    """Sizes to run the model at: those of each bucket, with both ends and the middle of each range."""
    samples: list[Dims] = []
    for bucket in buckets:
        tuned = tuned_dims(bucket)
        samples.append(tuned)
        for dim, size in bucket.items():
            if isinstance(size, SizeRange):
                samples += [{**tuned, dim: other} for other in _in_range(size)]
    return [dims for index, dims in enumerate(samples) if dims not in samples[:index]]


def _in_range(sizes: SizeRange) -> Iterator[int]:
    """Both ends and the middle, without 0 and 1, which are checked later (`capture.checks.specialization`)."""
    step = sizes.multiple_of
    low = -(-max(sizes.min, 2) // step) * step
    high = sizes.max // step * step
    yield from (size for size in (low, (low + high) // 2 // step * step, high) if size in sizes)


def _calls_at(
    spec: ModelSpec, module: nn.Module, signature: Signature, dims: Dims, paths: Sequence[str], folder: Path
) -> dict[str, list[_Seen]]:
    """The distinct calls of each path in one call of the model, one of each form."""
    found: dict[str, list[_Seen]] = {path: [] for path in paths}

    def observe(path: str, call: Call, forward: Callable[[], Any]) -> Any:
        described = tuple(map(_describe, call.leaves))
        instance = module.get_submodule(path)
        trace = OperatorTrace(call.leaves, {**named_state(instance), **plain_state(instance)})
        with uncompiled(), trace, trace.with_gradients() if spec.train else nullcontext():
            result = forward()
        _refuse_other_results(path, result)
        found[path].append(_Seen(canonical_json(call.parameters), call.paths, described, trace.digest(result)))
        return result

    with left_as_it_was(module), observed(module, paths, observe):
        run_eagerly(spec, module, signature, dims, folder, stage="regions")
    for path, calls in found.items():
        if len(set(calls)) > len({call.form for call in calls}):
            raise BuildError(
                f"the region `{path}` is called {len(calls)} times in one call of the model, with different sizes or "
                "operators",
                hint="take the module around it as the region, or its parts",
                stage="regions",
            )
    return {path: list(dict.fromkeys(calls)) for path, calls in found.items()}


def _distinct(path: str, dims: Dims, calls: Sequence[dict[str, list[_Seen]]]) -> dict[RegionForm, _Seen]:
    """One call of each form at these sizes, over all forms of the model's inputs."""
    found: dict[RegionForm, _Seen] = {}
    for call in (call for one in calls for call in one[path]):
        if found.setdefault(call.form, call).leaves != call.leaves:
            raise BuildError(
                f"the input sizes of the region `{path}` at {_text(dims)} depend on values of the model's inputs",
                hint="take the module around it as the region, or its parts",
                stage="regions",
            )
    if not found:
        raise never_called(path, dims)
    return found


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """While active, the module may be called; afterwards its buffers and its Python objects are restored."""
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


# -- the forms of a kind ----------------------------------------------------------------------------------------------


def _parts(
    spec: ModelSpec, instances: Sequence[str], found: Sequence[tuple[Dims, dict[RegionForm, _Seen]]], calls_at: _CallsAt
) -> Iterator[RegionPart]:
    path = instances[0]
    forms = list(dict.fromkeys(form for _, calls in found for form in calls))
    buckets = {form: _buckets_of(path, form, spec.buckets, found) for form in forms}
    first = next(iter(found[0][1].values()))
    names: list[str] = []
    for form in forms:
        calls, samples = zip(*((calls[form], dims) for dims, calls in found if form in calls), strict=True)
        names.append(_name(path, first, calls[0], names))
        region = Region(names[-1], tuple(instances), _signature(spec, path, calls, samples))

        def is_called(dims: Dims, form: RegionForm = form) -> bool:
            try:
                return any(call.form == form for one in calls_at(dims) for call in one[path])
            except BuildError:  # the model fails there, which `checks.specialization` reports
                return True

        own = [_from_first_call(bucket, is_called) for bucket in buckets[form]] if len(forms) > 1 else buckets[form]
        yield from (RegionPart(region, *part) for part in _buckets(own, region))


def _name(path: str, first: _Seen, call: _Seen, taken: Sequence[str]) -> str:
    """A form's name: the path for the first form; for others with the arguments that differ from the first."""
    if not taken:
        return path
    before = dict(zip(first.paths, first.leaves, strict=True))
    told = [
        f"{name}={_told(leaf, before.get(name))}"
        for name, leaf in zip(call.paths, call.leaves, strict=True)
        if name not in before or before[name].form != leaf.form
    ]
    name = f"{path}({','.join(told)})"
    return name if told and len(name) <= LONGEST and name not in taken else f"{path}(form={len(taken) + 1})"


LONGEST = 160
"""The limit of a form's name in characters; longer names are replaced by a number."""


def _told(leaf: _SeenLeaf, before: _SeenLeaf | None) -> str:
    if leaf.shape is None:
        return str(leaf.value)
    return "tensor" if before is None or before.shape is None else f"{leaf.kind}[{len(leaf.shape)}]"


def _buckets_of(
    path: str, form: RegionForm, buckets: Sequence[Bucket], found: Sequence[tuple[Dims, dict[RegionForm, _Seen]]]
) -> list[Bucket]:
    """The buckets at whose sizes the region is called in that form. Raises BuildError for a range with such calls at
    some of its sizes only."""
    own = []
    for bucket in buckets:
        samples = _samples([bucket])
        calls = [(dims, calls) for dims, calls in found if dims in samples]
        having = [dims for dims, calls in calls if form in calls]
        if having:
            own.append(bucket)
        if having and len(having) < len(calls):
            dims, others = next((dims, calls) for dims, calls in calls if form not in calls)
            here = next(calls[form] for dims, calls in calls if form in calls)
            raise _changes_form(path, (having[0], here), (dims, next(iter(others.values()))))
    return own


def _changes_form(path: str, one: tuple[Dims, _Seen], other: tuple[Dims, _Seen]) -> BuildError:
    """The error for a range of sizes within which a region's calls change their form."""
    texts = [_forms_told(call) for _, call in (one, other)]
    (before, now), (first, second) = texts, (dims for dims, _ in (one, other))
    return BuildError(
        f"the arguments of the region `{path}` change within the sizes of one bucket: "
        f"{_listed(before - now)} at {_text(first)}, {_listed(now - before)} at {_text(second)}",
        hint="split the range into two buckets at the change; a Python value that depends on the sizes is compiled in: "
        "let the region take it from a tensor's shape",
        stage="regions",
    )


def _forms_told(call: _Seen) -> set[str]:
    return {
        f"{name}={leaf.value}" if leaf.shape is None else f"{name} a {leaf.kind} of {len(leaf.shape)} axes"
        for name, leaf in zip(call.paths, call.leaves, strict=True)
    }


def _from_first_call(bucket: Bucket, is_called: Callable[[Dims], bool]) -> Bucket:
    """The bucket without the sizes 0 and 1 at the beginning of a range, if the region has no such call there."""
    tuned, own = tuned_dims(bucket), dict(bucket)
    for dim, sizes in bucket.items():
        if isinstance(sizes, SizeRange):
            least = sizes.at_least(sizes.min)
            while least is not None and least < 2 and not is_called({**tuned, dim: least}):
                least = sizes.at_least(least + 1)
            own[dim] = msgspec.structs.replace(sizes, min=least) if least is not None else sizes
    return own


# -- the calling convention of a region -------------------------------------------------------------------------------


def _signature(spec: ModelSpec, path: str, calls: Sequence[_Seen], samples: Sequence[Dims]) -> Signature:
    """A signature for all calls, which have one form; sizes that differ are expressions over the model's dims."""
    first = calls[0]
    columns = list(zip(*(call.leaves for call in calls), strict=True))
    leaves = [
        _leaf(path, name, column, samples, spec.buckets) for name, column in zip(first.paths, columns, strict=True)
    ]
    copies = any(leaf.shape is not None and not _common_layouts(column) for column in columns for leaf in column[:1])
    _check_readable(path, leaves)
    parameters = msgspec.json.decode(first.parameters, type=tuple[Parameter, ...])
    return Signature(parameters, tuple(leaves), make_contiguous=spec.make_contiguous or copies)


def _listed(texts: Collection[str]) -> str:
    return ", ".join(sorted(texts)[:3]) or "nothing else"


def _common_layouts(column: Sequence[_SeenLeaf]) -> list[Layout]:
    return [layout for layout in column[0].layouts if all(layout in leaf.layouts for leaf in column)]


def _leaf(
    region: str, name: str, column: Sequence[_SeenLeaf], samples: Sequence[Dims], buckets: Sequence[Bucket]
) -> Leaf:
    first = column[0]
    if first.shape is None:
        return ConstantLeaf(name, float(first.value) if first.kind == "float" else first.value)
    shapes = [leaf.shape for leaf in column if leaf.shape is not None]
    axes = []
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        entry = size_over_dims(sizes, samples)
        if entry is None or (isinstance(entry, str) and entry.count("*") > 1 and any(map(has_range, buckets))):
            shown = ", ".join(f"{size} at {_text(dims)}" for size, dims in list(zip(sizes, samples, strict=True))[:3])
            raise BuildError(
                f"axis {axis} of `{name}` of the region `{region}` is not an expression over the model's dims: {shown}",
                hint="give each bucket a model of its own, or take the module around it as the region",
                stage="regions",
            )
        axes.append(entry)
    layouts = _common_layouts(column)
    return TensorLeaf(name, first.kind, tuple(axes), layout=layouts[0] if layouts else "contiguous")


def _text(dims: Dims) -> str:
    return ",".join(f"{name}={size}" for name, size in dims.items()) or "every call"


def size_over_dims(sizes: Sequence[int], samples: Sequence[Dims]) -> int | str | None:
    """The expression with these sizes at these samples: a number, a dim, a line over one dim, or a product of two; else
    None."""
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
    """Raises BuildError unless every dim is the only one of some axis, from which a call reads its size."""
    entries = [entry for leaf in leaves if isinstance(leaf, TensorLeaf) for entry in leaf.shape]
    texts = [entry for entry in entries if isinstance(entry, str)]
    alone = {name for text in texts if len(names := dims_in(text)) == 1 for name in names}
    for text in texts:
        if unread := dims_in(text) - alone:
            raise BuildError(
                f"the region `{region}` has an input with an axis of `{text}`, and none from which to read "
                f"{' and '.join(f'`{name}`' for name in sorted(unread))}",
                hint="take the module around it as the region",
                stage="regions",
            )


def dims_in(text: str) -> frozenset[str]:
    return Expression(text).names


def _buckets(buckets: Sequence[Bucket], region: Region) -> Iterator[tuple[Bucket, Dims]]:
    """The distinct buckets over the dims of the region's inputs, each with the model's sizes at which to run it."""
    shapes = [leaf.shape for leaf in region.signature.leaves if isinstance(leaf, TensorLeaf)]
    told = {name for shape in shapes for entry in shape if isinstance(entry, str) for name in dims_in(entry)}
    seen: list[Bucket] = []
    for bucket in buckets:
        own = {name: size for name, size in bucket.items() if name in told}
        if own not in seen:
            seen.append(own)
            yield own, tuned_dims(bucket)


def regions_of(parts: Sequence[RegionPart]) -> tuple[Region, ...]:
    """Each region once, in order."""
    return tuple({part.region.name: part.region for part in parts}.values())
