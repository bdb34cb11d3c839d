"""The manifest that `aotc.record` writes: calls by module and kind, and the text."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from aotc.errors import Issue, ManifestError
from aotc.manifest.read import check_path, read_manifest
from aotc.manifest.schema import MODEL_NAME
from aotc.manifest.types import ModelSpec
from aotc.records import Dims
from aotc.tools.recording.check_written import is_small
from aotc.tools.recording.first_manifest import model_lines, to_yaml, writing
from aotc.tools.recording.module_factories import Made, factory_of
from aotc.tools.recording.seen_calls import InputsOfCalls, Seen, bound_arguments, inputs_of_calls, kind_of_call, look_at

_log = logging.getLogger("aotc")

MOST_KINDS = 8


class _Recorded(NamedTuple):
    module: nn.Module
    method: str
    kinds: dict[object, list[dict[str, Seen]]]


class Calls:
    """The calls that were recorded, without the values of their tensors; `issues` are of those that could not be."""

    def __init__(self) -> None:
        self.of: dict[str, _Recorded] = {}
        self.issues: dict[Issue, None] = {}
        self._adding = threading.Lock()

    @property
    def is_empty(self) -> bool:
        return not self.of and not self.issues

    def add(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, method: Callable[..., Any] | None = None
    ) -> Callable[[], None]:
        """Look at the arguments now, before the module may write to them; they are kept when the result is called."""
        try:
            call = {key: look_at(value, key) for key, value in bound_arguments(module, args, kwargs, method).items()}
        except ManifestError as error:
            issue = Issue(error.message, where=name, hint=error.hint)
            return lambda: self.issues.update({issue: None})

        def keep() -> None:
            with self._adding:
                kinds = self.of.setdefault(name, _Recorded(module, method.__name__ if method else "", {})).kinds
                kinds.setdefault(kind_of_call(call), []).append(call)

        return keep


def write_recorded(output: Path, calls: Calls, factories: Mapping[str, Any]) -> dict[str, list[Dims]]:
    """Write the manifest, which is read back. Adds to the issues of `calls`. Returns the models that can be checked by
    making them again, each with the sizes of its calls. Raises ManifestError."""
    check_path(output.absolute())
    lines: list[str] = []
    to_check: dict[str, list[Dims]] = {}
    for name, (module, method, kinds) in calls.of.items():
        if len(kinds) > MOST_KINDS:
            issue = Issue(
                f"was called in {len(kinds)} ways that differ in more than the sizes of tensors; the first "
                f"{MOST_KINDS} are recorded",
                where=name,
                hint="code is compiled for each value of a Python number: pass one that varies as a tensor",
            )
            calls.issues[issue] = None
        made = _factory(name, module, factories, output)
        for number, recorded in enumerate(list(kinds.values())[:MOST_KINDS]):
            shown = _shown(f"{name}-{number + 1}" if number else name)
            of_calls = inputs_of_calls(recorded)
            lines += _lines(shown, module, method, made, len(recorded), of_calls)
            if not made.comment and is_small(module):
                to_check[shown] = of_calls.sizes
    if not lines:
        return {}
    count = sum(len(recorded) for _, _, kinds in calls.of.values() for recorded in kinds.values())
    head = f"# By `aotc.record`, from {count} calls. Edit it, then:  aotc build {output.name}"
    unfinished = output.with_name(f".{output.name}.recorded.tmp.yaml")
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text("\n".join([head, "version: 1", "models:", *lines]) + "\n")
        try:
            read_manifest(unfinished)
            unfinished.rename(output)
        finally:
            unfinished.unlink(missing_ok=True)
    return to_check


def _factory(name: str, module: nn.Module, factories: Mapping[str, Any], output: Path) -> Made:
    if (given := factories.get(name)) is not None:
        return Made(given) if isinstance(given, str) else Made(given["factory"], dict(given.get("kwargs", {})))
    if made := factory_of(module, output.absolute().parent):
        return made
    function = re.sub(r"\W", "_", name)
    _log.warning(
        "aotc.record: how to make %s, a %s, is not known: write a function that returns it and name it in %s",
        *(name, type(module).__qualname__, output),
    )
    return Made(f"my_models:{function}", comment=f"write this function: it returns the {type(module).__qualname__}")


def _shown(name: str) -> str:
    return name if re.search(MODEL_NAME, name) else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "model"


def _lines(name: str, module: nn.Module, method: str, made: Made, count: int, calls: InputsOfCalls) -> list[str]:
    inputs, buckets, _ = calls
    spec = ModelSpec(name=name, factory=made.factory, inputs={}, buckets=({},), kwargs=made.kwargs, method=method)
    lines = model_lines(spec, module, inputs, "1 call" if count == 1 else f"{count} calls")
    if made.comment:
        lines[1] += f" # {made.comment}"
    if any("randint" in str(form) for form in inputs.values()):
        lines.append(
            "      # randint: as far as the values that were seen; use the whole range, such as the vocabulary"
        )
    if buckets != [{}]:
        lines += ["    buckets:", *(f"      - {to_yaml(bucket)}" for bucket in buckets)]
    return lines
