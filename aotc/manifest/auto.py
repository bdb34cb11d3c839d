"""`inputs: auto`: the inputs of a model of transformers, from its own configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
from torch import nn

from aotc.errors import Issue, ManifestError
from aotc.expressions import Expression
from aotc.manifest.findings import did_you_mean
from aotc.manifest.inputs import tensors_in
from aotc.manifest.types import Manifest, ModelSpec

_WRITE_THEM = "write the inputs out; `aotc init FACTORY --call FUNCTION` makes a first version from an example call"


def with_inputs(manifest: Manifest, spec: ModelSpec, module: nn.Module) -> ModelSpec:
    """The spec with its inputs, where the manifest leaves them to the module's configuration.

    Raises ManifestError where there is none, or where the buckets give other dims than the inputs have.
    """
    if spec.name not in manifest.auto:
        return spec
    try:
        inputs = auto_inputs(module)
    except ManifestError as error:
        issue = Issue(error.message, where=manifest.where("models", spec.name, "inputs"), hint=error.hint)
        raise ManifestError(f"{manifest.path}: `inputs: auto` of `{spec.name}`", issues=(issue,)) from None
    if issues := _dim_issues(manifest, spec, inputs):
        raise ManifestError(f"{manifest.path}: the dims of `{spec.name}` are not those of its inputs", issues=issues)
    return msgspec.structs.replace(spec, inputs=inputs)


def auto_inputs(module: nn.Module) -> dict[str, Any]:
    """The inputs in a manifest's form: `main_input_name` and what belongs to it.

    The dims are `batch`, for token ids `seq`, and for an encoder-decoder `decoder_seq`. Raises ManifestError.
    """
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", None)
    if config is None or not isinstance(main, str):
        message = f"{type(module).__name__} has no `config` and `main_input_name`, as models of transformers have"
        raise ManifestError(message, hint=_WRITE_THEM)
    takes = inspect.signature(module.forward).parameters
    if main == "input_ids":
        inputs = {main: _token_ids(config, "seq")}
        if "attention_mask" in takes:
            inputs["attention_mask"] = {"shape": ["batch", "seq"], "dtype": "int64", "init": "ones"}
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
            inputs["decoder_input_ids"] = _token_ids(config, "decoder_seq")
        return dict(sorted(inputs.items()))
    if main == "pixel_values":
        return {main: {"shape": ["batch", getattr(config, "num_channels", 3), *_image_size(config, module)]}}
    raise ManifestError(
        f"{type(module).__name__} takes `{main}`, whose sizes its configuration does not say", hint=_WRITE_THEM
    )


def _token_ids(config: Any, dim: str) -> dict[str, Any]:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {"shape": ["batch", dim], "dtype": "int64", "init": {"randint": [0, text.vocab_size]}}


def _image_size(config: Any, module: nn.Module) -> list[int]:
    size = getattr(config, "image_size", None)
    if isinstance(size, Mapping):
        size = [size.get("height"), size.get("width")]
    sizes = [size, size] if isinstance(size, int) else list(size or ())
    if len(sizes) != 2 or not all(isinstance(each, int) for each in sizes):
        message = f"the configuration of {type(module).__name__} says no size of an image: image_size is {size!r:.40}"
        raise ManifestError(message, hint=_WRITE_THEM)
    return sizes


def _dim_issues(manifest: Manifest, spec: ModelSpec, inputs: Mapping[str, Any]) -> tuple[Issue, ...]:
    entries = (entry for _, form in tensors_in(inputs) for entry in form["shape"] if isinstance(entry, str))
    dims = {name for entry in entries for name in Expression(entry).names}
    where, listed = manifest.where("models", spec.name, "buckets"), ", ".join(sorted(dims))
    issues = []
    for bucket in spec.buckets:
        for dim in sorted(bucket.keys() - dims):
            hint = did_you_mean(dim, dims) or f"they have {listed}"
            issues.append(Issue(f"the dim `{dim}` is in no shape of the inputs", where=where, hint=hint))
        if missing := sorted(dims - bucket.keys()):
            names = ", ".join(f"`{dim}`" for dim in missing)
            issues.append(Issue(f"a bucket gives no size for {names}", where=where, hint=f"the inputs have {listed}"))
    cropped = spec.crop if isinstance(spec.crop, tuple) else [dim for each in spec.crop.values() for dim in each]
    for dim in {*cropped, *spec.graph_sizes} - dims - {None}:
        issues.append(Issue(f"the dim `{dim}` is in no shape of the inputs", where=where, hint=f"they have {listed}"))
    return tuple(dict.fromkeys(issues))
