"""`inputs: auto`: the inputs of a model of transformers, from its own configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
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

    `use_cache` is false: for a cache, write the inputs, with `use_cache: true`. The dims are `batch`, for tokens
    `seq`, for an encoder-decoder `decoder_seq`, and for a wave `samples`. Raises ManifestError.
    """
    config, main = getattr(module, "config", None), getattr(module, "main_input_name", None)
    if config is None or not isinstance(main, str):
        message = f"{type(module).__name__} has no `config` and `main_input_name`, as models of transformers have"
        raise ManifestError(message, hint=_WRITE_THEM)
    takes = inspect.signature(module.forward).parameters
    if main not in takes and "pixel_values" in takes:  # as a method that encodes images, of a model of both
        return {"pixel_values": {"shape": _shape_of_images(config, ("vision_config",), module)}}
    inputs: dict[str, Any] = {main: _main_input(main, config, module)}
    if main == "input_ids":
        if "attention_mask" in takes:
            inputs["attention_mask"] = {"shape": ["batch", "seq"], "dtype": "int64", "init": "ones"}
        if "token_type_ids" in takes and (types := _token_types(config)):
            form = {"shape": ["batch", "seq"], "dtype": "int64", "init": {"randint": [0, types]}}
            optional = takes["token_type_ids"].default is None
            inputs["token_type_ids"] = {**form, **({"default": 0} if optional else {})}
        # What has a token for an image takes texts without one, too.
        has_token = any(hasattr(config, name) for name in ("image_token_id", "image_token_index"))
        if "pixel_values" in takes and not has_token and (shape := _image_shape(config, ("vision_config",))):
            inputs["pixel_values"] = {"shape": shape}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = _token_ids(config, ("decoder",), "decoder_seq", module)
    if _returns_cache(config, takes):
        inputs["use_cache"] = False
    return dict(sorted(inputs.items()))


def _returns_cache(config: Any, takes: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the model may return a cache: it has a parameter that decides, or passes `use_cache` on by `**kwargs`."""
    if "use_cache" in takes:
        return True
    takes_cache = not {"cache", "past_key_values"}.isdisjoint(takes)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    configs = (config, getattr(config, "text_config", None))
    return takes_cache and takes_any and any(getattr(each, "use_cache", None) for each in configs)


def _token_types(config: Any) -> int:
    """How many types of tokens the model tells apart; 0 where the calls of its library pass none.

    The tokenizers of models with one type (RoBERTa) give no `token_type_ids`. Those of models without such an embedding
    (DeBERTa, `type_vocab_size: 0`) give zeros.
    """
    types = getattr(config, "type_vocab_size", 1)
    return 0 if not isinstance(types, int) or types == 1 else max(types, 1)


def _main_input(name: str, config: Any, module: nn.Module) -> dict[str, Any]:
    if name == "input_ids":
        return _token_ids(config, ("encoder", "text_encoder"), "seq", module)
    own = type(module).__name__
    shape: list[int | str] | None
    if name == "pixel_values":
        parts = ("encoder",) if hasattr(config, "text_config") else ("encoder", "vision_config")
        shape = _shape_of_images(config, parts, module)
    elif name == "input_values" and hasattr(config, "conv_stride"):  # as wav2vec 2.0 and its like take a wave
        shape = ["batch", "samples"]
    else:
        shape = _spectrogram_shape(name, config)
    if shape is None:
        raise ManifestError(f"{own} takes `{name}`, whose sizes its configuration does not say", hint=_WRITE_THEM)
    return {"shape": shape}


def _spectrogram_shape(name: str, config: Any) -> list[int | str] | None:
    """As AST takes it, by time, or as Whisper does, twice as long as what its convolutions make of it."""
    bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    half = getattr(config, "max_source_positions", None)
    if name == "input_values" and isinstance(bins, int) and isinstance(length, int):
        return ["batch", length, bins]
    if name == "input_features" and isinstance(bins, int) and isinstance(half, int):
        return ["batch", bins, 2 * half]
    return None


def _token_ids(config: Any, parts: Sequence[str], dim: str, module: nn.Module) -> dict[str, Any]:
    """Token ids of the vocabulary of the first of these parts of the configuration that has one, else of the text's."""
    configs = [getattr(config, part, None) for part in parts]
    if hasattr(config, "get_text_config"):
        with suppress(ValueError):  # there are several
            configs.append(config.get_text_config())
    sizes = [getattr(each, "vocab_size", None) for each in (*configs, config)]
    vocabulary = next((size for size in sizes if isinstance(size, int)), None)
    if vocabulary is None:
        raise ManifestError(f"the configuration of {type(module).__name__} says no `vocab_size`", hint=_WRITE_THEM)
    return {"shape": ["batch", dim], "dtype": "int64", "init": {"randint": [0, vocabulary]}}


def _shape_of_images(config: Any, parts: Sequence[str], module: nn.Module) -> list[int | str]:
    shape = _image_shape(config, parts)
    if shape is None:
        size = getattr(config, "image_size", None)
        message = f"the configuration of {type(module).__name__} says no size of an image: image_size is {size!r:.40}"
        raise ManifestError(message, hint=_WRITE_THEM)
    return shape


def _image_shape(config: Any, parts: Sequence[str]) -> list[int | str] | None:
    """The shape of images, or of videos, by the configuration or the first of these parts of it that says a size."""
    for each in (config, *(getattr(config, part, None) for part in parts)):
        size = getattr(each, "image_size", None)
        if isinstance(size, Mapping):
            size = [size.get("height"), size.get("width")]
        sizes = [size, size] if isinstance(size, int) else list(size or ())
        if len(sizes) == 2 and all(isinstance(size, int) for size in sizes):
            frames = getattr(each, "num_frames", None)
            return ["batch", *([frames] if isinstance(frames, int) else []), getattr(each, "num_channels", 3), *sizes]
    return None


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
