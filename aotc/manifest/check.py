"""The second pass: what the parts of a well-formed manifest mean together, and the specs that come of it.

A check looks only at parts in which no mistake was found before, so one mistake gives one message.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from aotc.expressions import Expression
from aotc.manifest.findings import Findings, describe, did_you_mean, nearest
from aotc.manifest.inputs import leaf_path, nested_factories, tensors_in
from aotc.manifest.schema import FACTORY, INITS, MAX_SIZE
from aotc.manifest.sizes import ImpossibleSizeError, distinct_buckets, extreme_dims, grid_product, parse_size
from aotc.manifest.types import Key, KeyPath, ModelSpec
from aotc.records import Bucket, Dims, Size

RESERVED_DIMS = frozenset({*keyword.kwlist, "min", "max", "abs"})
"""Names with a meaning of their own in expressions over dims."""

_RANKS = {"channels_last": 4, "channels_last_3d": 5}


@dataclass(frozen=True)
class _Model:
    """One model with the defaults applied, and where each of its keys stands in the file."""

    name: str
    own: Mapping[str, Any]
    defaults: Mapping[str, Any]
    findings: Findings

    def path(self, key: str, *keys: Key) -> KeyPath:
        inherited = key not in self.own and key in self.defaults
        return ("defaults", key, *keys) if inherited else ("models", self.name, key, *keys)

    def get(self, key: str, default: Any) -> Any:
        return self.own.get(key, self.defaults.get(key, default))

    def sound(self, key: str, *keys: Key) -> bool:
        return self.findings.sound(self.path(key, *keys))

    def report(self, path: KeyPath, message: str, *, hint: str = "") -> None:
        # A default can suit one model and not another.
        text = f"{message} (for the model `{self.name}`)" if path[0] == "defaults" else message
        self.findings.add(path, text, hint=hint)


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a model's inputs, and the expressions over dims of its shape by axis."""

    keys: KeyPath
    form: Mapping[str, Any]
    expressions: Mapping[int, Expression]

    @property
    def name(self) -> str:
        return leaf_path(self.keys)

    @property
    def dims(self) -> frozenset[str]:
        return frozenset().union(*(expression.names for expression in self.expressions.values()))


def check_models(data: Any, findings: Findings) -> dict[str, ModelSpec]:
    """Check every model of a manifest's data. Gives the models' specs, those left out in which a mistake was found."""
    if not isinstance(data, Mapping) or not isinstance(data.get("models"), Mapping):
        return {}
    defaults = data.get("defaults")
    specs = {}
    for name, own in data["models"].items():
        if isinstance(own, Mapping):
            model = _Model(name, own, defaults if isinstance(defaults, Mapping) else {}, findings)
            if spec := _check_model(model):
                specs[name] = spec
    return specs


def _check_model(model: _Model) -> ModelSpec | None:
    _check_factory(model)
    tensors = list(_check_tensors(model))
    buckets = list(_check_buckets(model))
    # With a shape or a bucket in doubt, the two cannot be held against each other.
    known = model.get("inputs", {}) != "auto"
    certain = known and all(model.sound(key) for key in ("inputs", "buckets", "grid"))
    if certain:
        _check_dims_given(model, tensors, buckets)
        _check_dims_used(model, tensors)
    _check_regions(model, tensors)
    if known and model.sound("inputs"):
        _check_crop(model, _dims_of(tensors))
        _check_graph_sizes(model, _dims_of(tensors), [bucket for _, bucket in buckets])
    if certain and all(model.sound(key) for key in ("inputs", "buckets", "grid")):
        _check_derived_sizes(model, tensors, buckets)
    if model.findings.found:
        return None
    return _spec(model, [bucket for _, bucket in buckets])


def _dims_of(tensors: Iterable[_Tensor]) -> frozenset[str]:
    return frozenset().union(*(tensor.dims for tensor in tensors))


# -- factory ----------------------------------------------------------------------------------------------------------


def _check_factory(model: _Model) -> None:
    if model.sound("factory"):
        _check_reference(model, model.path("factory"), model.get("factory", ""))
    for keys, reference in nested_factories(model.get("kwargs", {})) if model.sound("kwargs") else ():
        path = model.path("kwargs", *keys, "factory")
        if re.match(FACTORY, reference):
            _check_reference(model, path, reference)
        else:
            model.report(path, f"`{reference}` names no factory", hint="write package.module:name")


def _check_reference(model: _Model, path: KeyPath, reference: str) -> None:
    """`package.module:name` or a relative `path/to/file.py:name`."""
    module = reference.partition(":")[0]
    if PurePath(module).is_absolute():
        hint = "name it relative to the manifest's folder: artifacts carry this text to other machines"
        model.report(path, f"`{reference}` is an absolute path", hint=hint)
    elif not module.endswith(".py") and not all(part.isidentifier() for part in module.split(".")):
        hint = "write package.module:name or path/to/file.py:name"
        model.report(path, f"`{module}` in `{reference}` is neither a module nor a Python file", hint=hint)


# -- tensors ----------------------------------------------------------------------------------------------------------


def _check_tensors(model: _Model) -> Iterator[_Tensor]:
    """Check each tensor by itself. Tensors whose shape is in doubt are left out."""
    for keys, form in tensors_in(_if_typed(model, "inputs", {})):
        if model.sound("inputs", *keys, "init") and model.sound("inputs", *keys, "dtype"):
            _check_init(model, keys, form)
        expressions = _check_shape(model, keys, form.get("shape"))
        if not model.sound("inputs", *keys, "shape"):
            continue
        tensor = _Tensor(keys, form, expressions)
        _check_layout(model, tensor)
        _check_pad(model, tensor)
        yield tensor


def _check_shape(model: _Model, keys: KeyPath, shape: Any) -> dict[int, Expression]:
    """The expressions that can be read. A mistake in one entry hides none in the others."""
    expressions = {}
    for axis, entry in enumerate(shape if isinstance(shape, list) else ()):
        if isinstance(entry, str):
            path = model.path("inputs", *keys, "shape", axis)
            try:
                expressions[axis] = Expression(entry)
            except ValueError as error:
                model.report(path, str(error), hint="write a size, a dim, or an expression like `2*seq`")
    return expressions


def _check_layout(model: _Model, tensor: _Tensor) -> None:
    layout, rank = tensor.form.get("layout", "contiguous"), len(tensor.form["shape"])
    needed = _RANKS.get(layout) if isinstance(layout, str) else None
    if needed is not None and rank != needed:
        message = f"`{tensor.name}` has {rank} dimensions; the layout {layout} needs {needed}"
        model.report(model.path("inputs", *tensor.keys, "layout"), message)


def _check_pad(model: _Model, tensor: _Tensor) -> None:
    if not model.sound("inputs", *tensor.keys, "pad"):
        return
    dtype = _dtype_of(model, tensor.keys, tensor.form)
    for dim, value in tensor.form.get("pad", {}).items():
        path = model.path("inputs", *tensor.keys, "pad", dim)
        if dim not in tensor.dims:
            message = f"`{tensor.name}` cannot be padded along `{dim}`: its shape is {describe(tensor.form['shape'])}"
            model.report(path, message, hint=did_you_mean(dim, tensor.dims))
        elif value != "edge" and dtype and (problem := _misfit(value, dtype)):
            model.report(path, f"`{tensor.name}` cannot be padded with {describe(value)}: {problem}")


def _dtype_of(model: _Model, keys: KeyPath, form: Mapping[str, Any]) -> str | None:
    """A tensor's dtype, or None where a mistake hides it."""
    if "dtype" in form:
        return str(form["dtype"]) if model.sound("inputs", *keys, "dtype") else None
    return str(model.get("dtype", None) or "float32") if model.sound("dtype") else None


# -- init -------------------------------------------------------------------------------------------------------------


def _check_init(model: _Model, keys: KeyPath, form: Mapping[str, Any]) -> None:
    init, dtype = form.get("init"), _dtype_of(model, keys, form)
    path = model.path("inputs", *keys, "init")
    name = leaf_path(keys)
    match init:
        case {"randint": [low, high]}:
            _check_randint(model, path, low, high, dtype)
        case {"constant": value} if dtype and (problem := _misfit(value, dtype)):
            model.report(path, f"`{name}` cannot be filled with {describe(value)}: {problem}")
        case "randn" if dtype and not _is_real_or_complex(dtype):
            hint = "use {randint: [low, high]}, ones, zeros or {constant: value}"
            model.report(path, f"`{name}` is {dtype}, and randn makes numbers that are not integers", hint=hint)
        case str() if init not in INITS:
            if re.match(FACTORY, init):
                _check_reference(model, path, init)
            else:
                model.report(path, f"`{init}` names no function", hint="write package.module:function")


def _check_randint(model: _Model, path: KeyPath, low: int, high: int, dtype: str | None) -> None:
    if low >= high:
        message = f"randint [{low}, {high}] holds no integer: the high end is excluded"
        model.report(path, message, hint=f"write [{low}, {low + 1}] for {low} alone")
    elif dtype and (problem := _misfit(low, dtype) or _misfit(high - 1, dtype)):
        model.report(path, f"randint [{low}, {high}]: {problem}")


def _is_real_or_complex(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _misfit(value: Any, dtype: str) -> str:
    """Why a tensor of this dtype cannot hold the value; nothing if it can."""
    if _is_real_or_complex(dtype):
        return ""
    if dtype == "bool":
        return "" if value in (0, 1) else f"{describe(value)} is no bool"
    if isinstance(value, float):
        return f"{describe(value)} is no {dtype}"
    unsigned, bits = dtype.startswith("u"), int(dtype.lstrip("uint"))
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return "" if low <= value <= high else f"{value} is outside of {dtype}'s range {low} to {high}"


# -- buckets ----------------------------------------------------------------------------------------------------------


def _check_buckets(model: _Model) -> Iterator[tuple[KeyPath, Bucket]]:
    """Every bucket that can be read, with the place where it stands."""
    for index, form in enumerate(_if_typed(model, "buckets", [])):
        path = model.path("buckets", index)
        if model.findings.sound(path):
            bucket = {dim: _check_size(model, (*path, dim), value) for dim, value in form.items()}
            _check_dim_names(model, path, form)
            if model.findings.sound(path):
                yield path, {dim: size for dim, size in bucket.items() if size is not None}
    yield from _check_grid(model)


def _check_grid(model: _Model) -> Iterator[tuple[KeyPath, Bucket]]:
    path = model.path("grid")
    form = _if_typed(model, "grid", {})
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


def _if_typed(model: _Model, key: str, empty: Any) -> Any:
    """The value, or the empty one if it has not the right type. Mistakes within it do not matter here."""
    value = model.get(key, empty)
    return value if isinstance(value, type(empty)) else empty


def _check_size(model: _Model, path: KeyPath, value: Any) -> Size | None:
    if not model.findings.sound(path):
        return None
    try:
        return parse_size(value)
    except ImpossibleSizeError as error:
        model.report(path, f"`{path[-1]}`: {error}" if isinstance(path[-1], str) else str(error), hint=error.hint)
        return None


def _check_dim_names(model: _Model, path: KeyPath, dims: Iterable[str]) -> None:
    for dim in dims:
        if dim in RESERVED_DIMS:
            hint = f"rename it, to `{dim}_` for example"
            model.report(
                (*path, dim),
                f"`{dim}` has a meaning of its own in expressions, so no dim can have that name",
                hint=hint,
            )


# -- dims and buckets together ----------------------------------------------------------------------------------------


def _check_dims_given(model: _Model, tensors: list[_Tensor], buckets: list[tuple[KeyPath, Bucket]]) -> None:
    """Every bucket must give every dim of the shapes a size."""
    users = {dim: tensor.name for tensor in reversed(tensors) for dim in tensor.dims}
    if users and not buckets:
        dims = ", ".join(f"`{dim}`" for dim in sorted(users))
        sizes = ", ".join(f"{dim}: 1" for dim in sorted(users))
        message = f"the model `{model.name}` has no bucket, but its shapes use the dims {dims}"
        model.report(model.path("inputs"), message, hint=f"add buckets: [{{{sizes}}}]")
    for path, bucket in buckets:
        if missing := sorted(users.keys() - bucket.keys()):
            _report_missing_dims(model, path, bucket, missing, users)


def _report_missing_dims(
    model: _Model, path: KeyPath, bucket: Bucket, missing: list[str], users: Mapping[str, str]
) -> None:
    what = "the grid" if path[-1] == "grid" else "the bucket"
    uses = ", ".join(f"`{dim}`, which the shape of `{users[dim]}` uses" for dim in missing)
    spare = bucket.keys() - users.keys()
    swapped = [(dim, near) for dim in missing if (near := nearest(dim, spare))]
    hint = "; ".join(f"did you mean `{dim}` by `{near}`?" for dim, near in swapped)
    model.report(path, f"{what} gives no size for {uses}", hint=hint or f"add {', '.join(missing)} to {what}")


def _check_dims_used(model: _Model, tensors: list[_Tensor]) -> None:
    """Every dim of a bucket must be in a shape."""
    known = _dims_of(tensors)
    forms: list[tuple[KeyPath, Mapping[str, Any]]] = [
        (model.path("buckets", index), form) for index, form in enumerate(model.get("buckets", []))
    ]
    for path, form in [*forms, (model.path("grid"), model.get("grid", {}))]:
        for dim in form:
            if dim not in known:
                hint = did_you_mean(dim, known) or "remove it, or use it in a shape"
                model.report((*path, dim), f"the dim `{dim}` is in no shape of the model's inputs", hint=hint)


def _check_derived_sizes(model: _Model, tensors: list[_Tensor], buckets: list[tuple[KeyPath, Bucket]]) -> None:
    """What expressions give must be possible sizes, at the ends of ranges too."""
    for tensor in tensors:
        for axis, expression in tensor.expressions.items():
            if problem := _impossible_size(expression, buckets):
                path = model.path("inputs", *tensor.keys, "shape", axis)
                model.report(
                    path, f"`{expression.text}` {problem}", hint="change the expression, or the bucket's sizes"
                )


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


# -- outputs and graphs -----------------------------------------------------------------------------------------------


def _check_crop(model: _Model, known: frozenset[str]) -> None:
    if not model.sound("outputs"):
        return
    crop = model.get("outputs", {}).get("crop", [])
    named: Iterable[tuple[KeyPath, str | None]]
    if isinstance(crop, Mapping):
        named = [((output, axis), dim) for output, dims in crop.items() for axis, dim in enumerate(dims)]
    else:
        named = [((index,), dim) for index, dim in enumerate(crop)]
    for keys, dim in named:
        if dim is not None and dim not in known:
            message = f"the outputs cannot be cropped along `{dim}`: no input has that dim"
            model.report(model.path("outputs", "crop", *keys), message, hint=did_you_mean(dim, known))


def _check_graph_sizes(model: _Model, known: frozenset[str], buckets: list[Bucket]) -> None:
    if not model.sound("graph_sizes"):
        return
    for dim, sizes in model.get("graph_sizes", {}).items():
        path = model.path("graph_sizes", dim)
        if dim not in known:
            model.report(path, f"graph_sizes names the dim `{dim}`, which no input has", hint=did_you_mean(dim, known))
        elif model.sound("buckets") and model.sound("grid"):
            _check_graph_sizes_of(model, path, [bucket[dim] for bucket in buckets if dim in bucket], sizes)


def _check_graph_sizes_of(model: _Model, path: KeyPath, known: list[Size], sizes: list[int]) -> None:
    for index, size in enumerate(sizes):
        if not any(size == other if isinstance(other, int) else size in other for other in known):
            hint = f"the buckets have {', '.join(dict.fromkeys(map(str, known)))}" if known else ""
            model.report((*path, index), f"{size} is in no bucket's `{path[-1]}`", hint=hint)


# -- regions ----------------------------------------------------------------------------------------------------------


def _check_regions(model: _Model, tensors: list[_Tensor]) -> None:
    """What is outside of the regions runs eagerly on the caller's own tensors, so it can neither pad nor be frozen."""
    if not model.get("regions", ()):
        return
    if model.get("weights", "live") == "frozen":
        hint = "leave out `weights: frozen`: one library serves all instances of a region, each with its own weights"
        model.report(model.path("weights"), "the weights of regions cannot be frozen", hint=hint)
    if model.get("cuda_graphs", "auto") == "always" or model.get("graph_sizes", {}):
        key = "graph_sizes" if model.get("graph_sizes", {}) else "cuda_graphs"
        hint = "a graph of each region would copy its inputs, which are the outputs of the one before it"
        model.report(model.path(key), "regions are launched directly, and not as CUDA graphs", hint=hint)
    for tensor in tensors:
        if tensor.form.get("pad"):
            hint = "list the sizes as buckets, or give a range"
            path = model.path("inputs", *tensor.keys, "pad")
            model.report(
                path, f"`{tensor.name}` cannot be padded: outside of its regions the model is eager", hint=hint
            )


# -- the spec ---------------------------------------------------------------------------------------------------------


def _spec(model: _Model, buckets: list[Bucket]) -> ModelSpec:
    crop = model.get("outputs", {}).get("crop", [])
    # `options` and the like may be given as they are: the schema has checked their types.
    plain = {
        key: _with_sorted_keys(model.get(key, None))
        for key in ModelSpec.__struct_fields__
        if key in model.own or key in model.defaults
    }
    return ModelSpec(
        **{
            **plain,
            "name": model.name,
            "inputs": _with_sorted_keys(_if_typed(model, "inputs", {})),
            "buckets": distinct_buckets(buckets),
            "targets": tuple(model.get("targets", ("native",))),
            "regions": tuple(model.get("regions", ())),
            "crop": tuple(crop) if isinstance(crop, list) else _with_sorted_keys(crop),
        }
    )


def _with_sorted_keys(value: Any) -> Any:
    """The same data, in one order: a spec that went through JSON behaves like the one that was read."""
    if isinstance(value, Mapping):
        return {key: _with_sorted_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_with_sorted_keys(item) for item in value]
    return value
