"""Checks of a model's buckets and grid, and of the sizes that they give the dims of its inputs."""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aotc.expressions import Expression
from aotc.manifest.findings import did_you_mean, nearest
from aotc.manifest.model_form import ModelForm, TensorForm, dims_of
from aotc.manifest.schema import MAX_SIZE
from aotc.manifest.sizes import ImpossibleSizeError, extreme_dims, grid_product, parse_size
from aotc.manifest.types import KeyPath
from aotc.records import Bucket, Dims, Size

RESERVED_DIMS = frozenset({*keyword.kwlist, "min", "max", "abs"})
"""Names with a meaning of their own in expressions over dims."""


def check_buckets(model: ModelForm) -> Iterator[tuple[KeyPath, Bucket]]:
    """Every bucket that can be read, with the place where it stands."""
    for index, form in enumerate(model.typed("buckets", [])):
        path = model.path("buckets", index)
        if model.findings.sound(path):
            bucket = {dim: _check_size(model, (*path, dim), value) for dim, value in form.items()}
            _check_dim_names(model, path, form)
            if model.findings.sound(path):
                yield path, {dim: size for dim, size in bucket.items() if size is not None}
    yield from _check_grid(model)


def _check_grid(model: ModelForm) -> Iterator[tuple[KeyPath, Bucket]]:
    path = model.path("grid")
    form = model.typed("grid", {})
    if not model.findings.sound(path):
        return
    _check_dim_names(model, path, form)
    sizes = {
        dim: [_check_size(model, (*path, dim, index), value) for index, value in enumerate(values)]
        for dim, values in form.items()
    }
    if not model.findings.sound(path):
        return
    try:
        product = grid_product({dim: [size for size in row if size is not None] for dim, row in sizes.items()})
    except ImpossibleSizeError as error:
        model.report(path, str(error), hint=error.hint)
        return
    yield from ((path, bucket) for bucket in product)


def _check_size(model: ModelForm, path: KeyPath, value: Any) -> Size | None:
    if not model.findings.sound(path):
        return None
    try:
        return parse_size(value)
    except ImpossibleSizeError as error:
        model.report(path, f"`{path[-1]}`: {error}" if isinstance(path[-1], str) else str(error), hint=error.hint)
        return None


def _check_dim_names(model: ModelForm, path: KeyPath, dims: Iterable[str]) -> None:
    for dim in dims:
        if dim in RESERVED_DIMS:
            hint = f"rename it, to `{dim}_` for example"
            model.report(
                (*path, dim),
                f"`{dim}` has a meaning of its own in expressions, so no dim can have that name",
                hint=hint,
            )


def check_dims_given(model: ModelForm, tensors: list[TensorForm], buckets: list[tuple[KeyPath, Bucket]]) -> None:
    """Every bucket must give every dim of the shapes a size."""
    users = {dim: tensor.name for tensor in reversed(tensors) for dim in tensor.dims}
    if users and not buckets:
        dims = ", ".join(f"`{dim}`" for dim in sorted(users))
        sizes = ", ".join(f"{dim}: 1" for dim in sorted(users))
        message = f"the model `{model.name}` has no bucket, but its shapes use the dims {dims}"
        model.report(model.path("inputs"), message, hint=f"add buckets: [{{{sizes}}}]")
    for path, bucket in buckets:
        # A mistyped dim is reported where it stands, and not a second time as missing.
        meant = {nearest(dim, sorted(users)) for dim in bucket.keys() - users.keys()}
        if missing := sorted(users.keys() - bucket.keys() - meant):
            _report_missing_dims(model, path, missing, users)


def _report_missing_dims(model: ModelForm, path: KeyPath, missing: list[str], users: Mapping[str, str]) -> None:
    what = "the grid" if path[-1] == "grid" else "the bucket"
    uses = ", ".join(f"`{dim}`, which the shape of `{users[dim]}` uses" for dim in missing)
    model.report(path, f"{what} gives no size for {uses}", hint=f"add {', '.join(missing)} to {what}")


def check_dims_used(model: ModelForm, tensors: list[TensorForm]) -> None:
    """Every dim of a bucket must be in a shape."""
    known = dims_of(tensors)
    forms: list[tuple[KeyPath, Mapping[str, Any]]] = [
        (model.path("buckets", index), form) for index, form in enumerate(model.get("buckets", []))
    ]
    for path, form in [*forms, (model.path("grid"), model.get("grid", {}))]:
        for dim in form:
            if dim not in known:
                hint = _bare_shape(model, dim) or did_you_mean(dim, known) or "remove it, or use it in a shape"
                model.report((*path, dim), f"the dim `{dim}` is in no shape of the model's inputs", hint=hint)


def _bare_shape(model: ModelForm, dim: str) -> str:
    """The hint where an input is a list with the dim, which without `shape:` is a list of constants."""
    for name, form in model.get("inputs", {}).items():
        if isinstance(form, list) and dim in form:
            return f"a tensor needs `shape`: write `{name}: {{shape: [{', '.join(map(str, form))}]}}`"
    return ""


def check_derived_sizes(model: ModelForm, tensors: list[TensorForm], buckets: list[tuple[KeyPath, Bucket]]) -> None:
    """What expressions give must be possible sizes, at the ends of ranges too."""
    for tensor in tensors:
        for axis, expression in tensor.expressions.items():
            if problem := _impossible_size(expression, buckets):
                path = model.path("inputs", *tensor.keys, "shape", axis)
                model.report(
                    path, f"`{expression.text}` {problem}", hint="change the expression, or the bucket's sizes"
                )


def check_limits(model: ModelForm, tensors: list[TensorForm], buckets: list[tuple[KeyPath, Bucket]]) -> None:
    """The dims of `randint` must be dims of a shape, and leave an integer between the limits in every bucket."""
    known = dims_of(tensors)
    for tensor in tensors:
        inits = tensor.form.get("init")
        for init in inits if isinstance(inits, list) else [inits]:
            match init:
                case {"randint": [low, high]} if not (isinstance(low, int) and isinstance(high, int)):
                    path = model.path("inputs", *tensor.keys, "init")
                    _check_dims_of_limits(model, path, (Expression(str(low)), Expression(str(high))), known, buckets)


def _check_dims_of_limits(
    model: ModelForm,
    path: KeyPath,
    limits: tuple[Expression, Expression],
    known: frozenset[str],
    buckets: list[tuple[KeyPath, Bucket]],
) -> None:
    names = limits[0].names | limits[1].names
    text = f"randint [{limits[0].text}, {limits[1].text}]"
    if unknown := sorted(names - known):
        message = f"{text} names `{unknown[0]}`, which is a dim of no shape"
        model.report(path, message, hint=did_you_mean(unknown[0], known))
        return
    for dims in (dims for _, bucket in buckets for dims in extreme_dims(bucket, names)):
        try:
            low, high = (limit.evaluate(dims) for limit in limits)
        except ZeroDivisionError:
            low = high = 0
        if low >= high and all(dims.values()):
            at = ", ".join(f"{dim}={size}" for dim, size in dims.items())
            model.report(path, f"{text} holds no integer at {at}", hint="the high end is excluded: write `dim + 1`")
            return


def _impossible_size(expression: Expression, buckets: list[tuple[KeyPath, Bucket]]) -> str:
    if expression.text in expression.names:
        return ""
    for _, bucket in buckets:
        for dims in extreme_dims(bucket, expression.names):
            if problem := _impossible_at(expression, dims):
                return problem
    return ""


def _impossible_at(expression: Expression, dims: Dims) -> str:
    at = ", ".join(f"{dim}={size}" for dim, size in dims.items()) or "every call"
    try:
        size = expression.evaluate(dims)
    except ZeroDivisionError:
        return f"divides by zero at {at}"
    if size < 0:
        return f"is negative: {size} at {at}"
    return f"is {size} at {at}, more than 64 bits hold" if size > MAX_SIZE else ""
