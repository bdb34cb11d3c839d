"""A first manifest for a model, from its factory and one example call."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aotc.errors import ManifestError
from aotc.manifest.inputs import Tree, is_tensor
from aotc.manifest.read import check_path, read_manifest
from aotc.manifest.schema import DTYPES, MODEL_NAME
from aotc.manifest.types import ModelSpec
from aotc.models.auto_inputs import auto_inputs
from aotc.models.factory import build_module, build_modules, import_object
from aotc.models.signature import Argument, UnnamedArguments, convention, named_arguments
from aotc.snapshot import dtype_name


def write_first_manifest(
    output: Path, factory: str, call: str | None, kwargs: Mapping[str, Any], name: str | None = None
) -> str:
    """Write a manifest of one model and give its text; it was read back, and its inputs fit the module.

    `call` names a function that gives the arguments of one call of forward: a tuple, a mapping by name, both in a pair,
    or a lone tensor. Without it the module is asked: `example_inputs()`, or its configuration, as `inputs: auto` does.
    Raises ManifestError, also where `output` exists.
    """
    with _writing(output):
        if output.exists():
            raise ManifestError(f"{output} exists", hint="name another file with --output")
    check_path(output.absolute())
    if name is not None and not (re.search(MODEL_NAME, name) and len(name) <= 128):
        hint = "write at most 128 letters, digits, `.`, `_`, `-`"
        raise ManifestError(f"{name!r} cannot be a model's name", hint=hint)
    folder = output.absolute().parent
    spec = ModelSpec(name=name or _model_name(factory), factory=factory, inputs={}, buckets=({},), kwargs=dict(kwargs))
    module = build_module(spec, folder)
    inputs, sizes = _inputs_of(module, call, folder)
    guessed = call is not None or hasattr(module, "example_inputs")
    text = _text(spec, module, inputs, sizes, output.name, guessed)
    unfinished = output.with_name(f".{output.name}.{spec.name}.tmp.yaml")
    with _writing(output):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
    try:
        build_modules(read_manifest(unfinished))
        unfinished.rename(output)
    finally:
        unfinished.unlink(missing_ok=True)
    return text


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    """Turn an OSError within into a ManifestError that names the file."""
    try:
        yield
    except OSError as error:
        raise ManifestError(
            f"cannot write {output}: {error.strerror or error}",
            hint="name a file in a folder that you can write to, with --output",
        ) from error


def _model_name(factory: str) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", factory.rpartition(":")[2].replace("_", "-").lower())
    return name.strip("-._") or "model"


# -- from a call to inputs --------------------------------------------------------------------------------------------


def _inputs_of(module: nn.Module, call: str | None, folder: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The inputs in a manifest's form, and a size for each dim."""
    if call is not None:
        function = import_object(call, folder)
        try:
            given = function()
        except Exception as error:
            message = f"`{call}` raised {type(error).__name__}: {error}"
            raise ManifestError(message, hint="it is called without arguments") from error
    elif callable(offer := getattr(module, "example_inputs", None)):
        given = offer()
    else:
        try:
            inputs = auto_inputs(module)
        except ManifestError as error:
            hint = "name a function that gives the arguments of one call: --call package.module:function"
            raise ManifestError(f"there is no example call: {error.message}", hint=hint) from None
        return inputs, {dim: size for dim, size in _AUTO_SIZES.items() if f'"{dim}"' in json.dumps(inputs)}
    bound = _bound(module, given)
    dims = _guess_dims(list(_tensors(bound)))
    inputs = {name: _form(value, dims, name) for name, value in bound.items()}
    return inputs, {name: size for name, (size, _) in dims.items()}


_AUTO_SIZES = {"batch": 1, "seq": 128, "decoder_seq": 32, "samples": 16_000}


def _bound(module: nn.Module, given: Any) -> dict[str, Any]:
    """The arguments by the names of forward's parameters, without those that are None or have their default value."""
    args, kwargs = _arguments(given)
    try:
        named = named_arguments(module.forward, args, kwargs)
    except UnnamedArguments as error:
        message = f"the example call passes `*{error.name}`"
        raise ManifestError(message, hint="write a forward with a parameter for each input") from None
    except TypeError as error:
        message = f"the example call does not fit {type(module).__name__}.forward: {error}"
        raise ManifestError(message, hint=f"forward takes {inspect.signature(module.forward)}") from None
    return {
        argument.name: argument.value
        for argument in convention(module.forward, named)
        if argument.given and not _is_default(argument)
    }


def _is_default(argument: Argument) -> bool:
    value = argument.value
    return value is None or (not isinstance(value, Tensor | Mapping | list | tuple) and value == argument.default)


def _arguments(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), given
    if isinstance(given, tuple | list):
        pair = len(given) == 2 and isinstance(given[0], tuple | list) and isinstance(given[1], Mapping)
        return (given[0], given[1]) if pair else (given, {})
    raise ManifestError(
        f"the example call gave {type(given).__name__}; expected a tuple, a mapping or a tensor",
        hint="return the arguments in order, or by name, or as a pair of both: ((x,), {'mask': mask})",
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _guess_dims(tensors: Sequence[Tensor]) -> dict[str, tuple[int, int]]:
    """A name for the sizes that look as if they vary: name → (size, axis).

    The first axis is the batch where all tensors that have axes agree on it; the second is a length where it is one of
    token ids or a mask, `[batch, seq]` of integers or bools.
    """
    axes = [tensor for tensor in tensors if tensor.dim()]
    dims: dict[str, tuple[int, int]] = {}
    if axes and len({tensor.shape[0] for tensor in axes}) == 1:
        dims["batch"] = (axes[0].shape[0], 0)
        lengths = dict.fromkeys(
            tensor.shape[1] for tensor in axes if tensor.dim() == 2 and not tensor.is_floating_point()
        )
        for number, size in enumerate(lengths):
            dims[f"seq{number + 1}" if number else "seq"] = (size, 1)
    return dims


def _form(value: Any, dims: Mapping[str, tuple[int, int]], path: str) -> Tree:
    """A value as the manifest writes it. Raises ManifestError."""
    if isinstance(value, Tensor):
        return _tensor_form(value, dims, path)
    if isinstance(value, Mapping):
        form = {str(key): _form(item, dims, f"{path}.{key}") for key, item in value.items()}
        if is_tensor(form):
            raise ManifestError(
                f"`{path}` is a mapping with a key `shape`, `dtype` or `init`, which says a tensor",
                hint="a manifest cannot say both: let forward take that mapping with other keys",
            )
        return form
    if isinstance(value, list | tuple):
        return [_form(item, dims, f"{path}[{index}]") for index, item in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ManifestError(
        f"`{path}` is {type(value).__name__}; a manifest holds tensors, plain values, and mappings and lists of these",
        hint="leave it out of the example call, or wrap the module in a forward that makes it",
    )


def _tensor_form(tensor: Tensor, dims: Mapping[str, tuple[int, int]], path: str) -> dict[str, Any]:
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPES:
        message = f"`{path}` is a tensor of {dtype}, which a manifest cannot hold"
        raise ManifestError(message, hint=f"it holds {', '.join(DTYPES)}")
    names = {(size, axis): name for name, (size, axis) in dims.items()}
    form: dict[str, Any] = {
        "shape": [names.get((size, axis), size) for axis, size in enumerate(tensor.shape)],
        "dtype": dtype,
    }
    if tensor.numel() and not (tensor.is_floating_point() or tensor.is_complex()):
        low, high = int(tensor.min()), int(tensor.max())
        same = {0: "zeros", 1: "ones"}.get(low) if low == high else None
        form["init"] = same or {"randint": [min(low, 0), high + 1]}
    if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        form["layout"] = "channels_last"
    return form


# -- the text ---------------------------------------------------------------------------------------------------------


def _text(
    spec: ModelSpec, module: nn.Module, inputs: Mapping[str, Any], sizes: Mapping[str, int], file: str, guessed: bool
) -> str:
    """YAML with comments on what was `guessed` from an example."""
    dtypes = sorted({dtype_name(p.dtype) for p in module.parameters() if p.is_floating_point()})
    lines = [
        f"# A first version, by `aotc init`. Edit it, then:  aotc build {file}",
        "version: 1",
        "models:",
        f"  {_yaml(spec.name)}:",
        f"    factory: {_yaml(spec.factory)}",
        *([f"    kwargs: {_yaml(spec.kwargs)}"] if spec.kwargs else []),
        *([f"    dtype: {dtypes[0]}"] if len(dtypes) == 1 else []),
        "    inputs:" if inputs else "    inputs: {}",
        *(f"      {name}: {_yaml(form)}" for name, form in inputs.items()),
    ]
    if guessed and "randint" in json.dumps(inputs):
        lines.append("      # randint: as far as the example's values; use the whole range, such as the vocabulary")
    if sizes:
        ranged = {name: f"[2, {max(size, 2) * 4}]" if name != "batch" else size for name, size in sizes.items()}
        other = ", ".join(f"{name}: {size}" for name, size in ranged.items())
        lines += [
            "      # a name in a shape is a dim, guessed from the example; a number never varies",
            "    buckets: # one compiled variant each",
            f"      - {_yaml(dict(sizes))}",
            *([f"      # - {{{other}}}   # every length, with dynamic shapes"] if len(sizes) > 1 else []),
        ]
    return "\n".join(lines) + "\n"


_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def _yaml(value: Any) -> str:
    """A value on one line; words without quotes where YAML reads them as text."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_yaml(key)}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(":"):
        return value
    return json.dumps(value, ensure_ascii=False)
