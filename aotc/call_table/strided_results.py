"""Results that are views of a call's inputs or of the module's tensors: made of the tensors that the caller has.

A record says how a view lies in the tensor that the code ran with. Where that was a copy, padded or in another layout,
the view is translated to the caller's own tensor: each of its axes is a walk along axes of the tensor. What a tensor is
says a `TensorLibrary`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aotc.errors import LibraryError
from aotc.expressions import parse
from aotc.records import Output, StridedView

SizesOf = Callable[[Sequence[Any]], Mapping[str, int]]
"""From the leaves of a call to its dims."""


class ViewLie(NamedTuple):
    """How a view lies: of `offset` and `stride`, in elements, from the first element of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class StridedForm(NamedTuple):
    """Of a tensor: strides in elements, and bytes of an element."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int


class TensorLibrary(NamedTuple):
    """A library whose tensors can be viewed. `viewed` raises CorruptError for one beyond the tensor's memory."""

    form: Callable[[Any], StridedForm]
    itemsize: Callable[[str], int]
    viewed: Callable[[Any, StridedView, ViewLie], Any]
    clone: Callable[[Any], Any]


class _Axes(NamedTuple):
    """Axes of a tensor that follow one another without gaps, as one: sizes and strides in the tensor that the code ran
    with, and in the caller's."""

    size: int
    stride: int
    given_size: int
    given_stride: int


def view_maker(
    output: Output, view: StridedView, sizes_of: SizesOf, library: TensorLibrary
) -> Callable[[Any, Any, Sequence[Any], Sequence[Any]], Any]:
    """A function from the caller's tensor, the one that the code ran with, and the leaves of both, to the view.

    Raises CorruptError for an expression that cannot be read; the function also for a view beyond the tensor's storage,
    and LibraryError for one of padded elements.
    """
    lie_at = _lie_at(view, sizes_of)
    crops = [(axis, parse(text).evaluate) for axis, text in enumerate(output.dims) if text]

    def make(given: Any, ran: Any, leaves: Sequence[Any], ran_leaves: Sequence[Any]) -> Any:
        lie = lie_at(ran_leaves)
        if ran is given:
            return library.viewed(given, view, lie)
        asked, shape = sizes_of(leaves) if crops else {}, list(lie.shape)
        for axis, size in crops:
            shape[axis] = size(asked)
        form = library.form(given)
        itemsize = library.itemsize(view.dtype) if view.dtype else form.itemsize
        own = translated(lie, tuple(shape), library.form(ran), form, itemsize)
        if own is not None:
            return library.viewed(given, view, own)
        # Axes that do not follow one another in the caller's tensor: eager's `reshape` makes a copy, too.
        return library.clone(library.viewed(ran, view, lie._replace(shape=tuple(shape))))

    return make


def _lie_at(
    view: StridedView, sizes_of: Callable[[Sequence[Any]], Mapping[str, int]]
) -> Callable[[Sequence[Any]], ViewLie]:
    """A function from the leaves with which the code runs."""
    entries = [parse(str(entry)).evaluate for entry in (*view.shape, *view.stride, view.offset)]
    rank = len(view.shape)

    def at(sizes: Mapping[str, int]) -> ViewLie:
        numbers = [entry(sizes) for entry in entries]
        return ViewLie(tuple(numbers[:rank]), tuple(numbers[rank:-1]), numbers[-1])

    if any(view.texts()):
        return lambda leaves: at(sizes_of(leaves))
    always = at({})
    return lambda leaves: always


def translated(
    lie: ViewLie, shape: tuple[int, ...], ran: StridedForm, given: StridedForm, itemsize: int
) -> ViewLie | None:
    """How the first elements of a view, those of `shape`, lie in the caller's tensor; `itemsize` is that of the view's
    elements. None where it has no such view. Raises LibraryError where they are not in it."""
    if 0 in shape:
        return ViewLie(shape, lie.stride, 0)
    axes = _axes_of(ran, given, itemsize)
    steps = [step if size > 1 else 0 for size, step in zip(lie.shape, lie.stride, strict=True)]
    walks = [walk for step in (lie.offset, *steps) if axes is not None and (walk := _walk(step, axes)) is not None]
    if axes is None or len(walks) <= len(steps):
        return None

    def last(sizes: tuple[int, ...], position: int) -> int:
        """Of a view of these sizes, the last element's place along an axis."""
        return sum(walk[position] * (size - 1) for walk, size in zip(walks, (2, *sizes), strict=True))

    if any(last(lie.shape, position) >= axis.size for position, axis in enumerate(axes)):
        return None
    if any(last(shape, position) >= axis.given_size for position, axis in enumerate(axes)):
        raise LibraryError(
            f"a result is a view of an input that is padded: it has the shape {list(shape)}, and ends beyond the "
            f"elements of the caller's tensor of shape {list(given.shape)}",
            hint="let forward return a copy, `….clone()`; or build a bucket of these sizes",
        )
    offset, *stride = [sum(map(operator.mul, walk, (axis.given_stride for axis in axes))) for walk in walks]
    return ViewLie(shape, tuple(stride), offset)


def _axes_of(ran: StridedForm, given: StridedForm, itemsize: int) -> list[_Axes] | None:
    """The axes from the outermost on, those joined that follow one another without gaps in both tensors, in elements of
    `itemsize`. None where these have no place of their own in one of the tensors."""
    each = [_Axes(*axis) for axis in zip(ran.shape, ran.stride, given.shape, given.stride, strict=True) if axis[0] > 1]
    each.sort(key=lambda axis: axis.stride, reverse=True)
    own = given.itemsize
    if itemsize < own:
        parts = own // itemsize
        each = [axis._replace(stride=axis.stride * parts, given_stride=axis.given_stride * parts) for axis in each]
        each.append(_Axes(parts, 1, parts, 1))
    elif itemsize > own:
        joined = itemsize // own
        *outer, inner = each or [_Axes(1, 1, 1, 1)]
        steps = [step for axis in outer for step in (axis.stride, axis.given_stride)]
        if (inner.stride, inner.given_stride) != (1, 1) or any(number % joined for number in (inner.size, *steps)):
            return None
        each = [
            *(axis._replace(stride=axis.stride // joined, given_stride=axis.given_stride // joined) for axis in outer),
            inner._replace(size=inner.size // joined, given_size=inner.given_size // joined),
        ]
    found = each[:1]
    for axis in each[1:]:
        before = found[-1]
        follows = before.stride == axis.stride * axis.size and before.given_stride == axis.given_stride * axis.size
        if follows and axis.size == axis.given_size:
            found[-1] = axis._replace(size=before.size * axis.size, given_size=before.given_size * axis.size)
        else:
            found.append(axis)
    return found


def _walk(step: int, axes: Sequence[_Axes]) -> list[int] | None:
    """How many elements a step through memory goes along each axis."""
    walk = []
    for axis in axes:
        along, step = divmod(step, axis.stride)
        walk.append(along)
    return None if step else walk
