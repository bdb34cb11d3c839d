"""The text of a manifest, and its file: by `aotc init`, `aotc.record` and `aotc.compile`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from aotc.errors import ManifestError
from aotc.models.casting import changed_by_cast
from aotc.reads.tensors import dtype_name
from aotc.tools.recording.module_factories import Made
from aotc.tools.recording.seen_calls import SeenArgument
from aotc.tools.recording.values_file import values_file, write_values

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


def model_lines(
    name: str, made: Made, settings: Mapping[str, Any], inputs: Mapping[str, Any], comment: str = ""
) -> list[str]:
    """A model's lines, without its buckets. Settings that are false are left out; `comment` is on the name."""
    given = {"kwargs": made.kwargs, **settings}
    return [
        f"  {to_yaml(name)}:{comment and f' # {comment}'}",
        f"    factory: {to_yaml(made.factory)}{made.comment and f' # {made.comment}'}",
        *(f"    {to_yaml(key)}: {to_yaml(value)}" for key, value in given.items() if value),
        "    inputs:" if inputs else "    inputs: {}",
        *(f"      {to_yaml(key)}: {to_yaml(form)}" for key, form in inputs.items()),
    ]


def recorded_lines(
    name: str,
    made: Made,
    module: nn.Module,
    inputs: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    comment: str = "",
) -> list[str]:
    """A model's lines, without its buckets, with the dtype of the module's parameters."""
    dtype, others = dtype_to_cast(module)
    lines = model_lines(name, made, {"dtype": "" if others else dtype, **(settings or {})}, inputs, comment)
    if others:
        lines[-1 - len(inputs) : -1 - len(inputs)] = _dtype_comment(dtype, others)
    return lines


def _dtype_comment(dtype: str, others: Sequence[str]) -> list[str]:
    listed = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
    return [f"    # no `dtype: {dtype}`: it would cast {listed}; the factory has to make them as they are"]


def bucket_lines(buckets: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a model's buckets: none of one without dims."""
    return ["    buckets:", *(f"      - {to_yaml(bucket)}" for bucket in buckets)] if any(buckets) else []


def integers_comment(inputs: Mapping[str, Any]) -> list[str]:
    """What to know of integers that are drawn as far as those of calls, or are those of calls."""
    if "'recorded'" not in str(inputs) and "'randint'" not in str(inputs):
        return []
    told = "integers as in the calls: recorded, or randint as far as they went"
    return [f"      # {told}; where any will do, write the whole range, such as the vocabulary"]


def dtype_to_cast(module: nn.Module) -> tuple[str, list[str]]:
    """The dtype of all parameters, for a factory that makes them in another one; "" where they have several. And the
    names of what such a cast would change, too."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    only = dtypes.pop() if len(dtypes) == 1 else None
    return (dtype_name(only), changed_by_cast(module, only)) if only is not None else ("", [])


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


def write_checked(
    output: Path,
    lines: Sequence[str],
    values: Mapping[str, tuple[Mapping[str, Any], Sequence[Mapping[str, SeenArgument]]]],
    check: Callable[[Path], object],
) -> None:
    """Write a manifest, and the values that it refers to as `write_values` does. Neither is there where `check` raises,
    which reads a file of the same text in the same folder."""
    beside, unfinished = values_file(output.absolute()), output.with_name(f".{output.name}.unfinished.yaml")
    with writing(output):
        output.absolute().parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text("\n".join(lines) + "\n")
        write_values(beside, values)
        try:
            check(unfinished)
            unfinished.rename(output)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
        finally:
            unfinished.unlink(missing_ok=True)
