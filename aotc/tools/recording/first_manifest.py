"""A first manifest for a model, from its factory and one example call."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aotc.errors import ManifestError
from aotc.manifest.read import check_path, read_manifest
from aotc.manifest.schema import MODEL_NAME
from aotc.manifest.types import ModelSpec
from aotc.models.auto_inputs import auto_inputs
from aotc.models.factory import build_module, build_modules, import_object
from aotc.tools.recording.check_written import check_written, is_small
from aotc.tools.recording.manifest_text import integers_comment, recorded_lines, to_yaml, write_checked, writing
from aotc.tools.recording.module_factories import Made
from aotc.tools.recording.seen_calls import SeenArgument, inputs_of_calls, left_out_arguments, seen_call
from aotc.tools.recording.values_file import values_file


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
    reference = f"{values_file(output.absolute()).name}#{spec.name}"
    inputs, buckets, left_out, calls = _inputs_of(module, call, folder, reference)
    sizes = buckets[0]
    guessed = call is not None or hasattr(module, "example_inputs")
    lines = _lines(spec, module, inputs, sizes, left_out, output.name, guessed)
    write_checked(output, lines, {spec.name: (inputs, calls)}, lambda path: build_modules(read_manifest(path)))
    if check and is_small(module):
        check_written(output, {spec.name: [dict(sizes)]})
    return output.read_text()


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
    seen = seen_call(module, args, kwargs, values=True)
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


def _lines(
    spec: ModelSpec,
    module: nn.Module,
    inputs: Mapping[str, Any],
    sizes: Mapping[str, int],
    left_out: Mapping[str, Any],
    file: str,
    guessed: bool,
) -> list[str]:
    """YAML with comments on what was `guessed` from an example, and on the arguments that were `left_out`."""
    lines = [
        f"# A first version, by `aotc init`. Edit it, then:  aotc build {file}",
        "version: 1",
        "models:",
        *recorded_lines(spec.name, Made(spec.factory, dict(spec.kwargs)), module, inputs),
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
    return lines


def _constant(value: Any) -> str:
    plain = value is None or isinstance(value, bool | int | float | str)
    return to_yaml(value) if plain else " ".join(repr(value).split())
