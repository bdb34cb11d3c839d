"""The inputs of a manifest, from calls that were seen: a size that varies is a dim, any other a number."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from aotc.errors import ManifestError
from aotc.manifest.schema import DTYPES, is_tensor, is_tuple
from aotc.models.signature import BoundArgument, UnnamedArguments, convention, named_arguments
from aotc.reads.tensors import dtype_name
from aotc.records import TUPLE, Dims

SeenArgument = Any
"""An argument without its values: a `SeenTensor`, a constant, or a dict, list or tuple of these."""

Inputs = dict[str, Any]
Buckets = list[dict[str, Any]]

MOST_KINDS, MOST_BUCKETS = 8, 8

_COMPARED = (bool, int, float, str, complex, bytes, torch.device)
"""Types of values that are compared with a parameter's default value; of others, as arrays, only the same is equal."""

_UNORDERED = (torch.uint16, torch.uint32, torch.uint64)
"""Of which torch finds no least value."""

MOST_COORDINATES = 4
"""Columns of integers that are places or pairs, as of edges, and not tokens."""

MOST_ELEMENTS = 1 << 16
"""Of a tensor of integers whose values are kept: ids, masks, edges, grids, and no images."""


class SeenTensor(NamedTuple):
    """What a manifest says of a tensor; `low` and `high` are its least and greatest value, if it holds integers.
    `requires_grad` is looked at only where gradients are asked for, and `values` are kept where these are: of integers
    that are few, on the CPU. `is_sequence`: sizes that vary are lengths, as of a cache, and no heights or widths."""

    shape: tuple[int, ...]
    dtype: str
    low: int | None = None
    high: int | None = None
    layout: str | None = None
    requires_grad: bool = False
    values: Tensor | None = None
    is_sequence: bool = False

    @property
    def is_integral(self) -> bool:
        return self.dtype == "bool" or "int" in self.dtype

    def form(self, shape: Sequence[int | str], reference: str = "") -> dict[str, Any]:
        """As a manifest writes it; `reference` is that of recorded values."""
        form: dict[str, Any] = {"shape": list(shape), "dtype": self.dtype}
        if self.low is not None and self.high is not None:
            if self.low == self.high in (0, 1):
                form["init"] = "ones" if self.high else "zeros"
            elif self.low == self.high and math.prod(self.shape) > 1:  # one element, as a next token, may be any other
                form["init"] = {"constant": self.high}
            elif reference and self.values is not None:
                form["init"] = {"recorded": reference}
            else:
                form["init"] = {"randint": [min(self.low, 0), self.high + 1]}
        if self.layout:
            form["layout"] = self.layout
        if self.requires_grad:
            form["requires_grad"] = True
        return form


def bound_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], method: Callable[..., Any] | None = None
) -> dict[str, Any]:
    """The arguments by the names of the parameters of forward, or of the method, without those that are None or have
    their default value.

    Raises ManifestError where they do not fit, or are passed without a name.
    """
    given = _given_arguments(module, args, kwargs, method)
    return {argument.name: argument.value for argument in given if not _is_default(argument)}


def left_out_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The other arguments: those that are None or have their default value. Raises as `bound_arguments`."""
    given = _given_arguments(module, args, kwargs)
    return {argument.name: argument.value for argument in given if _is_default(argument)}


def _given_arguments(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], method: Callable[..., Any] | None = None
) -> list[BoundArgument]:
    called = method or module.forward
    name = getattr(called, "__name__", "forward")
    try:
        named = named_arguments(called, args, kwargs)
    except UnnamedArguments as error:
        message = f"the example call passes `*{error.name}`"
        takes_names = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(called).parameters.values())
        or_pass = "pass each by name, or " if takes_names else ""
        raise ManifestError(message, hint=f"{or_pass}write a {name} with a parameter for each input") from None
    except TypeError as error:
        message = f"the example call does not fit {type(module).__name__}.{name}: {error}"
        raise ManifestError(message, hint=f"{name} takes {inspect.signature(called)}") from None
    return [argument for argument in convention(called, named) if argument.given]


def _is_default(argument: BoundArgument) -> bool:
    value, default = argument.value, argument.default
    return value is None or value is default or (isinstance(value, _COMPARED) and bool(value == default))


def seen_call(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    method: Callable[..., Any] | None = None,
    *,
    gradients: bool = False,
    device: torch.device | None = None,
    values: bool = False,
) -> dict[str, SeenArgument]:
    """A call as all that record calls see it: `bound_arguments`, looked at. Raises ManifestError."""
    bound = bound_arguments(module, args, kwargs, method)
    return {name: look_at(value, name, gradients, device, values) for name, value in bound.items()}


def look_at(
    value: Any, path: str, gradients: bool = False, device: torch.device | None = None, values: bool = False
) -> SeenArgument:
    """An argument without its values; with `values`, those of small tensors of integers are kept. With `gradients`,
    which tensors require them. Raises ManifestError for what a manifest cannot hold, as a tensor that is not on the
    module's `device`."""
    if isinstance(value, Tensor):
        if device is not None and value.device != device:
            raise ManifestError(
                f"`{path}` is on the device {value.device}, and the module on {device}",
                hint=f"pass it on the module's device, as all that a manifest says lies there: .to({str(device)!r})",
            )
        return _look_at_tensor(value, path, gradients, values)
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise ManifestError(
                f"`{path}` is a dict with the key {other[0]!r}, and a manifest's keys are strings",
                hint="let forward take a dict with strings as keys, or a list",
            )
        seen = {key: look_at(item, f"{path}.{key}", gradients, device, values) for key, item in value.items()}
        if is_tensor(seen) or is_tuple(seen):
            said = "of the key `tuple`" if is_tuple(seen) else "with a key `shape`, `dtype` or `init`"
            raise ManifestError(
                f"`{path}` is a mapping {said}, which says a {'tuple' if is_tuple(seen) else 'tensor'}",
                hint="a manifest cannot say both: let forward take that mapping with other keys",
            )
        return seen
    if isinstance(value, list) or type(value) in (tuple, torch.Size):
        items = [look_at(item, f"{path}[{index}]", gradients, device, values) for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ManifestError(
        f"`{path}` is {type(value).__name__}; a manifest holds tensors, plain values, and mappings, "
        "lists and tuples of these",
        hint="pass `use_cache=False` in the call, or keep the cache in buffers, as examples/llm does"
        if "cache" in type(value).__name__.lower()
        else "leave it out of the example call, or wrap the module in a forward that makes it",
    )


def _look_at_tensor(tensor: Tensor, path: str, gradients: bool, values: bool) -> SeenTensor:
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPES:
        message = f"`{path}` is a tensor of {dtype}, which a manifest cannot hold"
        raise ManifestError(message, hint=f"it holds {', '.join(DTYPES)}")
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        message = f"`{path}` is a {kind} tensor, which a manifest cannot hold"
        raise ManifestError(message, hint="pass a padded or dense tensor, and make the other one in forward")
    low = high = kept = None
    if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex()):
        compared = tensor.to(torch.int64) if tensor.dtype in _UNORDERED else tensor
        low, high = int(compared.min()), int(compared.max())
        if low < 0 and tensor.dtype is torch.uint64:  # above what int64 holds
            low, high = 0, (1 << 63) - 1
        if values and tensor.numel() <= MOST_ELEMENTS:
            kept = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    layout = _layout_of(tensor)
    return SeenTensor(tuple(tensor.shape), dtype, low, high, layout, gradients and tensor.requires_grad, kept)


def _layout_of(tensor: Tensor) -> str | None:
    is_last = tensor.dim() == 4 and not tensor.is_contiguous()
    return "channels_last" if is_last and tensor.is_contiguous(memory_format=torch.channels_last) else None


def lies_otherwise(value: Any) -> bool:
    """Whether a tensor of an argument is in an order in memory that a manifest cannot say, as a slice is."""
    if isinstance(value, Tensor):
        return not value.is_contiguous() and _layout_of(value) is None
    if isinstance(value, Mapping):
        return any(map(lies_otherwise, value.values()))
    return isinstance(value, list | tuple) and any(map(lies_otherwise, value))


def without_extents(value: Any, gradients: bool = False) -> SeenArgument:
    """As `look_at`, without the least and greatest values, for which a GPU would be waited for, and without a check."""
    if isinstance(value, Tensor):
        dtype, requires_grad = dtype_name(value.dtype), gradients and value.requires_grad
        return SeenTensor(tuple(value.shape), dtype, layout=_layout_of(value), requires_grad=requires_grad)
    if isinstance(value, Mapping):
        return {key: without_extents(item, gradients) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [without_extents(item, gradients) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def kind_in(seen: Mapping[str, SeenArgument], ambient: Mapping[str, str | None]) -> object:
    """Equal for calls in these modes of torch that differ in sizes and values of tensors alone, which one model of a
    manifest can take."""
    return frozenset(ambient.items()), _kind(seen)


def _kind(seen: SeenArgument) -> object:
    if isinstance(seen, SeenTensor):
        return len(seen.shape), seen.dtype, seen.layout, seen.requires_grad
    if isinstance(seen, dict):
        return tuple((key, _kind(item)) for key, item in seen.items())
    if isinstance(seen, list | tuple):
        return isinstance(seen, tuple), *map(_kind, seen)
    return type(seen), repr(seen)


def sizes_of_call(seen: Mapping[str, SeenArgument]) -> tuple[tuple[int, ...], ...]:
    """Equal for calls of one kind that differ in values of tensors alone."""
    return tuple(tensor.shape for tensor in _tensors(seen))


def tensors_by_path(seen: SeenArgument, path: str = "") -> dict[str, SeenTensor]:
    """The tensors of an argument, or of a mapping of arguments, by their paths: `ids`, `batch.ids[0]`."""
    if isinstance(seen, SeenTensor):
        return {path: seen}
    if isinstance(seen, Mapping):
        parts = ((f"{path}.{key}" if path else key, item) for key, item in seen.items())
    elif isinstance(seen, list | tuple):
        parts = ((f"{path}[{index}]", item) for index, item in enumerate(seen))
    else:
        return {}
    return {name: tensor for part, item in parts for name, tensor in tensors_by_path(item, part).items()}


def without_values(seen: SeenArgument) -> SeenArgument:
    """What was seen, and no values of tensors."""
    if isinstance(seen, SeenTensor):
        return seen._replace(values=None)
    if isinstance(seen, Mapping):
        return {key: without_values(item) for key, item in seen.items()}
    return type(seen)(map(without_values, seen)) if isinstance(seen, list | tuple) else seen


class InputsOfCalls(NamedTuple):
    """The inputs and the buckets in a manifest's form, and the sizes of the dims in each call."""

    inputs: Inputs
    buckets: Buckets
    sizes: list[Dims]


def inputs_of_calls(calls: Sequence[Mapping[str, SeenArgument]], reference: str = "") -> InputsOfCalls:
    """What a manifest says of calls of one kind. Integers whose values were kept are said to be in `reference`.

    A size that varies is a dim, the same one wherever the sizes of all calls are the same, or an expression of dims:
    `2*seq`, `seq + 1`, `seq + seq2`. Batches and images get a bucket for each size; lengths, `seq` and of a first axis
    `length`, a range. Where no size varies, dims are guessed, and the bucket has the sizes seen.
    """
    tensors = [list(_tensors(call)) for call in calls]
    sizes = [list(zip(*(one.shape for one in each), strict=True)) for each in zip(*tensors, strict=True)]
    sequences = [one.is_sequence for one in tensors[0]]
    dims = _Dims(len(calls))
    if all(len({one.shape for one in each}) == 1 for each in zip(*tensors, strict=True)):
        dims.guess(tensors[0])
        named = [[dims.names.get((axis, sizes), sizes[0]) for axis, sizes in enumerate(axes)] for axes in sizes]
    else:
        batches = _batches([each[0] for each in zip(*tensors, strict=True)], sizes)
        bases = [
            [_base(axis, axes, batches, is_sequence) for axis in range(len(axes))]
            for axes, is_sequence in zip(sizes, sequences, strict=True)
        ]
        lengths = {
            each
            for axes, of in zip(sizes, bases, strict=True)
            for each, base in zip(axes, of, strict=True)
            if base == "seq"
        }
        shortest = {each for each in lengths if lengths.isdisjoint(_shorter(each).values())}
        named = [
            [dims.entry(axis, axes[axis], base, batches, shortest) for axis, base in enumerate(of)]
            for axes, of in zip(sizes, bases, strict=True)
        ]
    shapes = iter(named)
    merged = (_merged(each) for each in zip(*tensors, strict=True))
    inputs = {name: _form(seen, shapes, merged, reference) for name, seen in calls[0].items()}
    each = [{name: sizes[call] for name, sizes in dims.sizes.items()} for call in range(len(calls))]
    return InputsOfCalls(inputs, dims.buckets(), each)


class Batches(NamedTuple):
    """Sizes of first axes that are batches; `of_all`: every tensor that has axes begins with the one."""

    sizes: set[tuple[int, ...]]
    of_all: bool


def _batches(tensors: Sequence[SeenTensor], sizes: Sequence[Sequence[tuple[int, ...]]]) -> Batches:
    """Which first axes are batches: the one that all tensors have in common; else those of tensors with three axes or
    more, and of token ids or masks. Others are lengths: nodes of a graph, the tokens of a caption in a list."""
    if len({axes[0] for axes in sizes if axes}) == 1:
        return Batches({axes[0] for axes in sizes if axes}, True)
    found = set()
    for tensor, axes in zip(tensors, sizes, strict=True):
        is_tokens = len(axes) == 2 and tensor.is_integral and max(axes[1]) > MOST_COORDINATES
        if len(axes) > 2 or is_tokens:
            found.add(axes[0])
    return Batches(found, False)


class _Dims:
    """The dims by the sizes that they had in each call."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.sizes: dict[str, tuple[int, ...]] = {}
        self.names: dict[tuple[int, tuple[int, ...]], str] = {}
        """Of guessed dims, by the axis too."""

    def guess(self, tensors: Sequence[SeenTensor]) -> None:
        """A name for the sizes that look as if they vary.

        The first axis is the batch where all tensors that have axes agree on it; the second is a length where it is one
        of token ids or a mask, `[batch, seq]` of integers or bools.
        """
        axes = [tensor for tensor in tensors if tensor.shape]
        if axes and len({tensor.shape[0] for tensor in axes}) == 1:
            self._guessed("batch", axes[0].shape[0], 0)
            lengths = [tensor.shape[1] for tensor in axes if len(tensor.shape) == 2 and tensor.is_integral]
            for number, size in enumerate(dict.fromkeys(lengths)):
                self._guessed(f"seq{number + 1}" if number else "seq", size, 1)

    def _guessed(self, name: str, size: int, axis: int) -> None:
        self.sizes[name] = (size,) * self.count
        self.names[axis, self.sizes[name]] = name

    def entry(
        self, axis: int, sizes: tuple[int, ...], base: str, batches: Batches, shortest: Container[tuple[int, ...]]
    ) -> int | str:
        """What stands in a shape for an axis of these sizes in each call. `shortest`: the lengths of which no other is
        one or two shorter."""
        if len(set(sizes)) == 1 and not (axis == 0 and batches.of_all):
            return sizes[0]
        alike = [name for name, known in self.sizes.items() if known == sizes]
        if alike and {base, alike[0].rstrip("0123456789")} != {"height", "width"}:
            return alike[0]
        if base in alike:
            return base
        if len(set(sizes)) > 2:  # two sizes are some multiple or sum of two others by chance
            for name, known in self.sizes.items():
                if factor := _multiple(sizes, known):
                    return f"{factor}*{name}"
            like = {name: known for name, known in self.sizes.items() if name.rstrip("0123456789") == base}
            for name, known in like.items():
                if (more := sizes[0] - known[0]) in (1, 2) and list(sizes) == [size + more for size in known]:
                    return f"{name} + {more}"
            for (one, first), (other, second) in itertools.combinations(like.items(), 2):
                if sizes == tuple(map(operator.add, first, second)):
                    return f"{one} + {other}"
            for more, shorter in _shorter(sizes).items() if base == "seq" else ():
                if shorter in shortest:  # a mask before the cache that is one token shorter
                    return f"{self._named(base, shorter)} + {more}"
        return self._named(base, sizes)

    def _named(self, base: str, sizes: tuple[int, ...]) -> str:
        name = next(name for name in (base, *(f"{base}{n}" for n in range(2, 100))) if name not in self.sizes)
        self.sizes[name] = sizes
        return name

    def buckets(self) -> Buckets:
        ranged = {name for name in self.sizes if name.startswith(("seq", "length"))}
        fixed = [name for name in self.sizes if name not in ranged]
        combinations = list(dict.fromkeys(zip(*(self.sizes[name] for name in fixed), strict=True))) if fixed else [()]
        if len(combinations) > MOST_BUCKETS:
            return [{name: _size(sizes) for name, sizes in self.sizes.items()}]
        buckets = []
        for combination in combinations:
            bucket = dict(zip(fixed, combination, strict=True))
            of_it = [n for n in range(self.count) if all(self.sizes[name][n] == bucket[name] for name in fixed)]
            buckets.append(
                {
                    name: bucket[name] if name in bucket else _size([sizes[n] for n in of_it])
                    for name, sizes in self.sizes.items()
                }
            )
        return buckets


def _base(axis: int, axes: Sequence[tuple[int, ...]], batches: Batches, is_sequence: bool) -> str:
    """The name, without a number, of the dim for this axis of a tensor, of which the sizes in each call are `axes`."""
    if axis == 0:
        return "batch" if axes[0] in batches.sizes else "length"
    rank = len(axes)
    return {rank - 2: "height", rank - 1: "width"}.get(axis, "seq") if rank > 3 and not is_sequence else "seq"


def _shorter(sizes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Lengths that are one or two less in each call."""
    return {less: tuple(size - less for size in sizes) for less in (1, 2)}


def _multiple(sizes: Sequence[int], known: Sequence[int]) -> int:
    """By what all of `known` are multiplied, if that is more than 1; else 0."""
    factor = sizes[0] // known[0] if known[0] else 0
    return factor if factor > 1 and list(sizes) == [factor * size for size in known] else 0


def _size(sizes: Sequence[int]) -> int | list[int]:
    low, high = min(sizes), max(sizes)
    return low if low == high else [low, high]


def _tensors(seen: SeenArgument) -> Iterator[SeenTensor]:
    if isinstance(seen, SeenTensor):
        yield seen
    elif isinstance(seen, Mapping | list | tuple):
        for item in seen.values() if isinstance(seen, Mapping) else seen:
            yield from _tensors(item)


def _merged(tensors: Sequence[SeenTensor]) -> SeenTensor:
    """The tensor of one place in all calls: its values are within those of all."""
    lows, highs = ([getattr(one, end) for one in tensors] for end in ("low", "high"))
    low, high = (
        min((v for v in lows if v is not None), default=None),
        max((v for v in highs if v is not None), default=None),
    )
    kept = next((one.values for one in tensors if one.values is not None), None)
    return tensors[0]._replace(low=low, high=high, values=kept)


def _form(
    seen: SeenArgument, shapes: Iterator[Sequence[int | str]], merged: Iterator[SeenTensor], reference: str
) -> Any:
    """A value as the manifest writes it, with the next shape for each tensor."""
    if isinstance(seen, SeenTensor):
        return next(merged).form(next(shapes), reference)
    if isinstance(seen, Mapping):
        return {key: _form(item, shapes, merged, reference) for key, item in seen.items()}
    if isinstance(seen, list | tuple):
        items = [_form(item, shapes, merged, reference) for item in seen]
        return items if isinstance(seen, list) else {TUPLE: items}
    return seen
