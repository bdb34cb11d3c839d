"""A first manifest for a model, from its factory and one example call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aotc.errors import ManifestError
from aotc.manifest.read import check_path, read_manifest
from aotc.manifest.schema import MODEL_NAME
from aotc.manifest.types import ModelSpec
from aotc.models.auto_inputs import auto_inputs
from aotc.models.casting import changed_by_cast
from aotc.models.factory import build_module, build_modules, import_object
from aotc.reads.tensors import dtype_name
from aotc.tools.recording.check_written import check_written, is_small
from aotc.tools.recording.seen_calls import SeenArgument, bound_arguments, inputs_of_calls, left_out_arguments, look_at
from aotc.tools.recording.values_file import values_file, write_values


def write_first_manifest(
    output: Path,
    factory: str,
    call: str | None,
    kwargs: Mapping[str, Any],
    name: str | None = None,
    *,
    check: bool = False,
) -> str:
    """Write a manifest of one model and give its text; it was read back, and its inputs fit the module. To `check` it,
    the model is captured in another process, see `check_written`.

    The same model and call give the same text each time: random numbers are those of seed 0.

    `call` names a function that gives the arguments of one call of forward: a tuple, a mapping by name, both in a pair,
    or a lone tensor. Without it the module is asked: `example_inputs()`, or its configuration, as `inputs: auto` does.
    Raises ManifestError, also where `output` exists.
    """
    with writing(output):
        if output.exists():
            raise ManifestError(f"{output} exists", hint="name another file with --output")
    check_path(output.absolute())
    if name is not None and not (re.search(MODEL_NAME, name) and len(name) <= 128):
        hint = "write at most 128 letters, digits, `.`, `_`, `-`"
        raise ManifestError(f"{name!r} cannot be a model's name", hint=hint)
    folder = output.absolute().parent
    spec = ModelSpec(name=name or _model_name(factory), factory=factory, inputs={}, buckets=({},), kwargs=dict(kwargs))
    torch.manual_seed(0)
    random.seed(0)
    module = build_module(spec, folder)
    values = values_file(output.absolute())
    inputs, buckets, left_out, calls = _inputs_of(module, call, folder, f"{values.name}#{spec.name}")
    sizes = buckets[0]
    guessed = call is not None or hasattr(module, "example_inputs")
    text = _text(spec, module, inputs, sizes, left_out, output.name, guessed)
    unfinished = output.with_name(f".{output.name}.{spec.name}.tmp.yaml")
    with writing(output):
        folder.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text)
        write_values(values, {spec.name: (inputs, calls)})
    try:
        build_modules(read_manifest(unfinished))
        unfinished.rename(output)
    except BaseException:
        values.unlink(missing_ok=True)
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    if check and is_small(module):
        check_written(output, {spec.name: [dict(sizes)]})
    return output.read_text()


@contextmanager
def writing(output: Path) -> Iterator[None]:
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


def _inputs_of(
    module: nn.Module, call: str | None, folder: Path, reference: str
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any], list[dict[str, SeenArgument]]]:
    """The inputs in a manifest's form, a bucket with a size for each dim, the arguments that need not be inputs, and
    the example call, if there is one, to whose values `reference` refers."""
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
            hint = (
                "name a function that gives the arguments of one call: --call package.module:function; "
                f"or give {type(module).__name__} a method `example_inputs()` that returns them"
            )
            raise ManifestError(f"there is no example call: {error.message}", hint=hint) from None
        return inputs, [{dim: size for dim, size in _AUTO_SIZES.items() if f'"{dim}"' in json.dumps(inputs)}], {}, []
    args, kwargs = _arguments(given)
    given = bound_arguments(module, args, kwargs)
    seen = {name: look_at(value, name, values=True) for name, value in given.items()}
    inputs, buckets, _ = inputs_of_calls([seen], reference)
    return inputs, buckets, left_out_arguments(module, args, kwargs), [seen]


_AUTO_SIZES = {"batch": 1, "seq": 128, "decoder_seq": 32, "samples": 16_000}


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


# -- the text ---------------------------------------------------------------------------------------------------------


def _text(
    spec: ModelSpec,
    module: nn.Module,
    inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    left_out: Mapping[str, Any],
    file: str,
    guessed: bool,
) -> str:
    """YAML with comments on what was `guessed` from an example, and on the arguments that were `left_out`."""
    lines = [
        f"# A first version, by `aotc init`. Edit it, then:  aotc build {file}",
        "version: 1",
        "models:",
        *model_lines(spec, module, inputs),
    ]
    if left_out:
        lines.append("      # arguments of the example that are None or forward's default, and need not be inputs:")
        lines += [f"      # {name}: {_constant(value)}" for name, value in left_out.items()]
    lines += integers_comment(inputs) if guessed else []
    if sizes:
        ranged = {name: f"[2, {max(size, 2) * 4}]" if name != "batch" else size for name, size in sizes.items()}
        other = ", ".join(f"{name}: {size}" for name, size in ranged.items())
        lines += [
            "      # a name in a shape is a dim, guessed from the example; a number never varies",
            "    buckets: # one compiled variant each",
            f"      - {to_yaml(dict(sizes))}",
            *([f"      # - {{{other}}}   # every length, with dynamic shapes"] if len(sizes) > 1 else []),
        ]
    return "\n".join(lines) + "\n"


def integers_comment(inputs: Mapping[str, Any]) -> list[str]:
    """What to know of integers that are drawn as far as those of calls, or are those of calls."""
    if "'recorded'" not in str(inputs) and "'randint'" not in str(inputs):
        return []
    told = "integers as in the calls: recorded, or randint as far as they went"
    return [f"      # {told}; where any will do, write the whole range, such as the vocabulary"]


def model_lines(spec: ModelSpec, module: nn.Module, inputs: Mapping[str, Any], comment: str = "") -> list[str]:
    """A model's lines, but for its buckets."""
    return [
        f"  {to_yaml(spec.name)}:{comment and f' # {comment}'}",
        f"    factory: {to_yaml(spec.factory)}",
        *([f"    kwargs: {to_yaml(spec.kwargs)}"] if spec.kwargs else []),
        *([f"    method: {spec.method}"] if spec.method else []),
        *_dtype_lines(module),
        "    inputs:" if inputs else "    inputs: {}",
        *(f"      {name}: {to_yaml(form)}" for name, form in inputs.items()),
    ]


def _dtype_lines(module: nn.Module) -> list[str]:
    """The dtype of all parameters, where a cast to that dtype leaves the buffers as they are."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    if len(dtypes) != 1:
        return []
    (dtype,) = dtypes
    if others := changed_by_cast(module, dtype):
        listed = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        return [
            f"    # no `dtype: {dtype_name(dtype)}`: it would cast {listed}; the factory has to make them as they are"
        ]
    return [f"    dtype: {dtype_name(dtype)}"]


def _constant(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str)
    return to_yaml(value) if plain else " ".join(repr(value).split())


_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*")
_WORDS = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def to_yaml(value: Any) -> str:
    """A value on one line; words without quotes where YAML reads them as text."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{to_yaml(key)}: {to_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_yaml, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS and not value.endswith(":"):
        return value
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")  # YAML 1.1 takes `1e-06` for text
    return text
