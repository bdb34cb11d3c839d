"""The second pass: what the parts of a well-formed manifest mean together, and the specs that come of it.

A check looks only at parts in which no mistake was found before, so one mistake gives one message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from aotc.manifest.check_buckets import (
    check_buckets,
    check_derived_sizes,
    check_dims_given,
    check_dims_used,
    check_limits,
)
from aotc.manifest.check_tensors import check_factory, check_tensors, dtype_of
from aotc.manifest.findings import Findings, did_you_mean
from aotc.manifest.model_form import ModelForm, TensorForm, dims_of
from aotc.manifest.schema import FloatDtype
from aotc.manifest.sizes import distinct_buckets
from aotc.manifest.types import KeyPath, ModelSpec
from aotc.records import Bucket, Size


def check_models(data: Any, findings: Findings) -> dict[str, ModelSpec]:
    """Check every model of a manifest's data. Gives the models' specs, those left out in which a mistake was found."""
    return {model.name: spec for model in _forms(data, findings) if (spec := _check_model(model))}


def _forms(data: Any, findings: Findings) -> Iterator[ModelForm]:
    """The models of a manifest's data that are mappings."""
    models, defaults = (data.get(key) if isinstance(data, Mapping) else None for key in ("models", "defaults"))
    for name, own in models.items() if isinstance(models, Mapping) else ():
        if isinstance(own, Mapping):
            yield ModelForm(name, own, defaults if isinstance(defaults, Mapping) else {}, findings)


def _check_model(model: ModelForm) -> ModelSpec | None:
    check_factory(model)
    tensors = list(check_tensors(model))
    _check_forms(model, tensors)
    buckets = list(check_buckets(model))
    # With a shape or a bucket in doubt, the two cannot be held against each other.
    known = model.get("inputs", {}) != "auto"
    certain = known and all(model.sound(key) for key in ("inputs", "buckets", "grid"))
    if certain:
        check_dims_given(model, tensors, buckets)
        check_dims_used(model, tensors)
    _check_regions(model)
    _check_train(model, tensors)
    _check_parallel(model)
    _check_runtime(model)
    if known and model.sound("inputs"):
        _check_crop(model, dims_of(tensors))
        _check_graph_sizes(model, dims_of(tensors), [bucket for _, bucket in buckets])
    if certain and all(model.sound(key) for key in ("inputs", "buckets", "grid")):
        check_derived_sizes(model, tensors, buckets)
        check_limits(model, tensors, buckets)
    if model.findings.found:
        return None
    return _spec(model, [bucket for _, bucket in buckets])


def sound_parts(data: Any, findings: Findings) -> dict[str, ModelSpec]:
    """Of a manifest with mistakes, the models that can be checked further: each with its sound keys, without buckets.

    A model is left out whose factory could not be called as it is meant, or whose inputs have no names.
    """
    specs = {}
    for model in _forms(data, findings):
        inputs = model.get("inputs", None)
        known = isinstance(inputs, Mapping) and not findings.is_broken(model.path("inputs"))
        if "factory" not in model.own or not (known or inputs == "auto") or not all(map(model.sound, _NEEDED)):
            continue
        kept = {key: model.get(key, None) for key in _CHECKED if key in model.own or key in model.defaults}
        named = {key: value if model.sound("inputs", key) else None for key, value in (inputs if known else {}).items()}
        plain = {key: _with_sorted_keys(value) for key, value in kept.items() if model.sound(key)}
        specs[model.name] = ModelSpec(**plain, name=model.name, inputs=_with_sorted_keys(named), buckets=())
    return specs


_NEEDED = ("factory", "kwargs", "method", "dtype", "parallel")
_CHECKED = ("factory", "kwargs", "method", "dtype", "parallel", "train", "weights", "options", "patches")

MOST_FORMS = 16


def _check_forms(model: ModelForm, tensors: list[TensorForm]) -> None:
    """Every combination of `init`s is tried."""
    lists = [tensor.form["init"] for tensor in tensors if isinstance(tensor.form.get("init"), list)]
    if (count := math.prod(map(len, lists))) > MOST_FORMS:
        hint = "list more than one `init` only where the model does other things with other values"
        model.report(
            model.path("inputs"), f"the inputs have {count} combinations of `init`s; at most {MOST_FORMS}", hint=hint
        )


def _check_crop(model: ModelForm, known: frozenset[str]) -> None:
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


def _check_graph_sizes(model: ModelForm, known: frozenset[str], buckets: list[Bucket]) -> None:
    if not model.sound("graph_sizes"):
        return
    for dim, sizes in model.get("graph_sizes", {}).items():
        path = model.path("graph_sizes", dim)
        if dim not in known:
            model.report(path, f"graph_sizes names the dim `{dim}`, which no input has", hint=did_you_mean(dim, known))
        elif model.sound("buckets") and model.sound("grid"):
            _check_graph_sizes_of(model, path, [bucket[dim] for bucket in buckets if dim in bucket], sizes)


def _check_graph_sizes_of(model: ModelForm, path: KeyPath, known: list[Size], sizes: list[int]) -> None:
    for index, size in enumerate(sizes):
        if not any(size == other if isinstance(other, int) else size in other for other in known):
            hint = f"the buckets have {', '.join(dict.fromkeys(map(str, known)))}" if known else ""
            model.report((*path, index), f"{size} is in no bucket's `{path[-1]}`", hint=hint)


def _check_regions(model: ModelForm) -> None:
    if model.get("regions", ()) and model.get("weights", "live") == "frozen":
        hint = "leave out `weights: frozen`: one library serves all instances of a region, each with its own weights"
        model.report(model.path("weights"), "the weights of regions cannot be frozen", hint=hint)


def _check_train(model: ModelForm, tensors: list[TensorForm]) -> None:
    """The keys that only training has, and those that it excludes."""
    if model.get("train", False) is not True:
        if "activation_memory" in model.own:
            model.report(model.path("activation_memory"), "only a training step keeps activations", hint=_TRAIN)
        for tensor in tensors:
            if tensor.form.get("requires_grad") is True:
                path = model.path("inputs", *tensor.keys, "requires_grad")
                model.report(path, f"`{tensor.name}` has no gradient in a model that is not trained", hint=_TRAIN)
        return
    if model.get("weights", "live") == "frozen":
        hint = "leave out `weights: frozen`: what is compiled in gets no gradient"
        model.report(model.path("weights"), "frozen weights cannot be trained", hint=hint)
    if model.get("cuda_graphs", "auto") == "always":
        hint = "leave out `cuda_graphs`: aotc.TrainingStep captures the whole step"
        model.report(model.path("cuda_graphs"), "the halves of a training step are not captured alone", hint=hint)
    for tensor in tensors:
        dtype = dtype_of(model, tensor.keys, tensor.form)
        has_gradient = not dtype or dtype in get_args(FloatDtype) or "complex" in dtype
        if tensor.form.get("requires_grad") is True and not has_gradient:
            path = model.path("inputs", *tensor.keys, "requires_grad")
            model.report(path, f"`{tensor.name}` is {dtype}: only floating-point tensors have gradients")


_TRAIN = "write `train: true`, or leave this out"


def _check_parallel(model: ModelForm) -> None:
    if model.get("parallel", {}) and model.get("weights", "live") == "frozen":
        hint = "leave out `weights: frozen`: the ranks share the code, and each has weights of its own"
        model.report(model.path("weights"), "the weights of a parallel model cannot be frozen", hint=hint)
    if model.get("parallel", {}) and model.get("train", False):
        hint = "leave out `train: true`: collectives are compiled for inference"
        model.report(model.path("train"), "a parallel model cannot be trained", hint=hint)


def _check_runtime(model: ModelForm) -> None:
    """What code that runs without torch cannot be."""
    if model.get("runtime", "any") != "standalone":
        return
    cannot = {
        "regions": "the model around regions is eager code of torch",
        "parallel": "collectives need torch",
        "train": "gradients need torch",
        "autocast": "a service without torch has no autocast: write `dtype`",
    }
    for key, reason in cannot.items():
        if model.get(key, None):
            hint = "leave it out, or write `runtime: any`"
            model.report(model.path(key), f"`runtime: standalone` excludes `{key}`: {reason}", hint=hint)


def _spec(model: ModelForm, buckets: list[Bucket]) -> ModelSpec:
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
            "inputs": _with_sorted_keys(model.typed("inputs", {})),
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
