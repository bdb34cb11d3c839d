"""Checks of each tensor of a model's inputs by itself: shape, layout, padding, and what it is filled with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from aotc.expressions import Expression
from aotc.manifest.findings import describe, did_you_mean
from aotc.manifest.inputs import leaf_path, mistyped_tensors, nested_factories, tensors_in
from aotc.manifest.model_form import ModelForm, TensorForm
from aotc.manifest.schema import FACTORY, INITS, TENSOR_KEYS, is_tensor
from aotc.manifest.types import KeyPath

_RANKS = {"channels_last": 4, "channels_last_3d": 5}


def check_tensors(model: ModelForm) -> Iterator[TensorForm]:
    """Check each tensor by itself. Tensors whose shape is in doubt are left out."""
    inputs = model.typed("inputs", {})
    for keys, key in mistyped_tensors(inputs):
        path = model.path("inputs", *keys)
        message = f"unknown key `{key}` in `{leaf_path(path)}`"
        model.report((*path, key), message, hint=did_you_mean(key, TENSOR_KEYS))
    for keys in _texts_for_none(inputs):
        name = leaf_path(keys)
        model.report(model.path("inputs", *keys), f'`{name}` is the text "None"', hint="write `null` for Python's None")
    for keys, form in tensors_in(inputs):
        if model.sound("inputs", *keys, "init") and model.sound("inputs", *keys, "dtype"):
            _check_init(model, keys, form)
        expressions = _check_shape(model, keys, form.get("shape"))
        if not model.sound("inputs", *keys, "shape"):
            continue
        tensor = TensorForm(keys, form, expressions)
        _check_layout(model, tensor)
        _check_pad(model, tensor)
        _check_default(model, tensor)
        yield tensor


def _texts_for_none(value: Any, keys: KeyPath = ()) -> Iterator[KeyPath]:
    """The constants that are the text "None": YAML writes Python's None as `null`."""
    if value == "None":
        yield keys
    if isinstance(value, Mapping | list) and not (keys and is_tensor(value)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _texts_for_none(item, (*keys, key))


def _check_shape(model: ModelForm, keys: KeyPath, shape: Any) -> dict[int, Expression]:
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


def _check_layout(model: ModelForm, tensor: TensorForm) -> None:
    layout, rank = tensor.form.get("layout", "contiguous"), len(tensor.form["shape"])
    needed = _RANKS.get(layout) if isinstance(layout, str) else None
    if needed is not None and rank != needed:
        message = f"`{tensor.name}` has {rank} dimensions; the layout {layout} needs {needed}"
        model.report(model.path("inputs", *tensor.keys, "layout"), message)


def _check_pad(model: ModelForm, tensor: TensorForm) -> None:
    if not model.sound("inputs", *tensor.keys, "pad"):
        return
    dtype = dtype_of(model, tensor.keys, tensor.form)
    for dim, value in tensor.form.get("pad", {}).items():
        path = model.path("inputs", *tensor.keys, "pad", dim)
        if dim not in tensor.dims:
            message = f"`{tensor.name}` cannot be padded along `{dim}`: its shape is {describe(tensor.form['shape'])}"
            model.report(path, message, hint=did_you_mean(dim, tensor.dims))
        elif value != "edge" and dtype and (problem := _misfit(value, dtype)):
            model.report(path, f"`{tensor.name}` cannot be padded with {describe(value)}: {problem}")


def _check_default(model: ModelForm, tensor: TensorForm) -> None:
    """Check the default's value, and that a call without the tensor has others from which each of its sizes is
    known."""
    if "default" not in tensor.form or not model.sound("inputs", *tensor.keys, "default"):
        return
    path, value = model.path("inputs", *tensor.keys, "default"), tensor.form["default"]
    dtype = dtype_of(model, tensor.keys, tensor.form)
    if dtype and (problem := _misfit(value, dtype)):
        model.report(path, f"`{tensor.name}` cannot be filled with {describe(value)}: {problem}")
    others = [form for _, form in tensors_in(model.typed("inputs", {})) if "default" not in form]
    given = [entry for form in others if isinstance(form.get("shape"), list) for entry in form["shape"]]
    if unknown := [entry for entry in tensor.form["shape"] if isinstance(entry, str) and entry not in given]:
        message = f"`{tensor.name}` cannot have a default: `{unknown[0]}` is in the shape of no input without one"
        model.report(path, message, hint=f"leave out `default`, or that of another input with `{unknown[0]}`")
    if model.get("regions", ()):
        message = f"`{tensor.name}` cannot have a default: of a model by regions, the module itself runs"
        model.report(path, message, hint="leave out `default`: a region has code for calls with the tensor and without")


def dtype_of(model: ModelForm, keys: KeyPath, form: Mapping[str, Any]) -> str | None:
    """A tensor's dtype, or None where a mistake hides it."""
    if "dtype" in form:
        return str(form["dtype"]) if model.sound("inputs", *keys, "dtype") else None
    return str(model.get("dtype", None) or "float32") if model.sound("dtype") else None


def _check_init(model: ModelForm, keys: KeyPath, form: Mapping[str, Any]) -> None:
    init, dtype = form.get("init"), dtype_of(model, keys, form)
    path = model.path("inputs", *keys, "init")
    for index, each in enumerate(init if isinstance(init, list) else ()):
        _check_one_init(model, (*path, index), leaf_path(keys), each, dtype)
    if not isinstance(init, list):
        _check_one_init(model, path, leaf_path(keys), init, dtype)


def _check_one_init(model: ModelForm, path: KeyPath, name: str, init: Any, dtype: str | None) -> None:
    match init:
        case {"randint": [int(low), int(high)]}:
            _check_randint(model, path, low, high, dtype)
        case {"randint": [*ends]}:
            for index, end in enumerate(ends):
                _check_limit(model, (*path, "randint", index), end)
        case {"constant": value} if dtype and (problem := _misfit(value, dtype)):
            model.report(path, f"`{name}` cannot be filled with {describe(value)}: {problem}")
        case "randn" if dtype and not _is_real_or_complex(dtype):
            hint = "use {randint: [low, high]}, ones, zeros, padding or {constant: value}"
            model.report(path, f"`{name}` is {dtype}, and randn makes numbers that are not integers", hint=hint)
        case str() if init not in INITS:
            if re.match(FACTORY, init):
                check_reference(model, path, init)
            else:
                model.report(path, f"`{init}` names no function", hint="write package.module:function")


def _check_limit(model: ModelForm, path: KeyPath, end: int | str) -> None:
    try:
        Expression(str(end))
    except ValueError as error:
        model.report(path, str(error), hint="write an integer, a dim, or an expression like `2*seq`")


def _check_randint(model: ModelForm, path: KeyPath, low: int, high: int, dtype: str | None) -> None:
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
        return "" if value in (0, 1) else f"{describe(value)} is not a bool"
    if isinstance(value, float):
        return f"{describe(value)} is not a value of {dtype}"
    unsigned, bits = dtype.startswith("u"), int(dtype.lstrip("uint"))
    low, high = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return "" if low <= value <= high else f"{value} is outside of {dtype}'s range {low} to {high}"


def check_factory(model: ModelForm) -> None:
    if model.sound("factory"):
        check_reference(model, model.path("factory"), model.get("factory", ""))
    for keys, reference in nested_factories(model.get("kwargs", {})) if model.sound("kwargs") else ():
        path = model.path("kwargs", *keys, "factory")
        if re.match(FACTORY, reference):
            check_reference(model, path, reference)
        else:
            model.report(path, f"`{reference}` names no factory", hint="write package.module:name")


def check_reference(model: ModelForm, path: KeyPath, reference: str) -> None:
    """`package.module:name` or a relative `path/to/file.py:name`."""
    module = reference.partition(":")[0]
    if PurePath(module).is_absolute():
        hint = "name it relative to the manifest's folder: artifacts carry this text to other machines"
        model.report(path, f"`{reference}` is an absolute path", hint=hint)
    elif not module.endswith(".py") and not all(part.isidentifier() for part in module.split(".")):
        hint = "write package.module:name or path/to/file.py:name"
        model.report(path, f"`{module}` in `{reference}` is neither a module nor a Python file", hint=hint)
