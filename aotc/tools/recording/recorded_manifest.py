"""The manifest that `aotc.record` writes: calls by module and kind, and the text."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from aotc.errors import Issue, ManifestError
from aotc.manifest.read import check_path, read_manifest
from aotc.manifest.schema import MODEL_NAME
from aotc.reads.modes import ambient_here
from aotc.reads.tensors import named_state
from aotc.records import Dims
from aotc.tools.recording.check_written import is_small
from aotc.tools.recording.made_again import made_again, made_as_it_is, relative_to
from aotc.tools.recording.manifest_text import bucket_lines, integers_comment, recorded_lines, write_checked
from aotc.tools.recording.module_factories import Made
from aotc.tools.recording.seen_calls import (
    MOST_KINDS,
    SeenArgument,
    inputs_of_calls,
    kind_in,
    lies_otherwise,
    seen_call,
    sizes_of_call,
    without_values,
)
from aotc.tools.recording.values_file import MOST_BYTES, MOST_CALLS, bytes_of, values_file

_log = logging.getLogger("aotc")


@dataclass
class _Kind:
    """Calls that one model of a manifest can take, in one state of torch's modes. The first of equal sizes keeps the
    values of small integers. `lies_otherwise`: tensors of a call did, as slices do."""

    ambient: dict[str, str | None]
    calls: list[dict[str, SeenArgument]] = field(default_factory=list)
    sizes: set[object] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)
    nbytes: int = 0
    lies_otherwise: bool = False

    def add(self, call: dict[str, SeenArgument], lies_otherwise: bool) -> None:
        self.lies_otherwise |= lies_otherwise
        if (sizes := sizes_of_call(call)) in self.sizes:
            self.calls.append(without_values(call))
            return
        self.sizes.add(sizes)
        self.kept.append(len(self.calls))
        self.nbytes += bytes_of(call)
        self.calls.append(call)
        if len(self.kept) > MOST_CALLS or self.nbytes > MOST_BYTES:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drop the values of every second call, but never those of the first and the last call."""
        for number in self.kept[1:-1:2]:
            self.nbytes -= bytes_of(self.calls[number])
            self.calls[number] = without_values(self.calls[number])
        self.kept = [*self.kept[:-1:2], self.kept[-1]]


class _Recorded(NamedTuple):
    module: nn.Module
    method: str
    kinds: dict[object, _Kind]


class RecordedCalls:
    """The calls that were recorded, with values of small integers alone; `issues` are of those that could not be."""

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
            call = seen_call(module, args, kwargs, method, values=True)
            otherwise = any(map(lies_otherwise, [*args, *kwargs.values()]))
            ambient = ambient_here(next((tensor.device.type for tensor in named_state(module).values()), "cpu"))
        except ManifestError as error:
            issue = Issue(error.message, where=name, hint=error.hint)
            return lambda: self.issues.update({issue: None})

        def keep() -> None:
            with self._adding:
                kinds = self.of.setdefault(name, _Recorded(module, method.__name__ if method else "", {})).kinds
                kinds.setdefault(kind_in(call, ambient), _Kind(ambient)).add(call, otherwise)

        return keep


def write_recorded(output: Path, calls: RecordedCalls, factories: Mapping[str, Any]) -> dict[str, list[Dims]]:
    """Write the manifest, which is read back. Adds to the issues of `calls`. Returns the models that can be checked by
    making them again, each with the sizes of its calls. Raises ManifestError."""
    check_path(output.absolute())
    reference, with_values = values_file(output).name, {}
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
        for number, kind in enumerate(list(kinds.values())[:MOST_KINDS]):
            recorded, shown = kind.calls, _shown(f"{name}-{number + 1}" if number else name)
            of_calls = inputs_of_calls(recorded, f"{reference}#{shown}")
            with_values[shown] = of_calls.inputs, recorded
            count = "1 call" if len(recorded) == 1 else f"{len(recorded)} calls"
            settings = {"method": method, "make_contiguous": kind.lies_otherwise, **kind.ambient}
            lines += recorded_lines(shown, made, module, of_calls.inputs, settings, count)
            lines += [*integers_comment(of_calls.inputs), *bucket_lines(of_calls.buckets)]
            if not made.comment and is_small(module):
                to_check[shown] = of_calls.sizes
    if not lines:
        return {}
    total = sum(len(kind.calls) for _, _, kinds in calls.of.values() for kind in kinds.values())
    head = f"# By `aotc.record`, from {total} calls. Edit it, then:  aotc build {output.name}"
    write_checked(output, [head, "version: 1", "models:", *lines], with_values, read_manifest)
    return to_check


def _factory(name: str, module: nn.Module, factories: Mapping[str, Any], output: Path) -> Made:
    """How a build makes the module again. Where that is not known, a function that is to be written."""
    folder, comment = output.absolute().parent, ""
    try:
        if (given := factories.get(name)) is not None:
            factory, kwargs = (given, {}) if isinstance(given, str) else (given["factory"], given.get("kwargs", {}))
            made = made_again(module, str(folder / factory) if ".py:" in factory else factory, kwargs)
        else:
            made = made_again(module, None, None)
    except ManifestError as error:
        function, cls = re.sub(r"\W", "_", name), type(module).__qualname__
        told = "aotc.record: how to make %s, a %s, is not known: %s. Write a function that returns it and name it in %s"
        _log.warning(told, name, cls, error.message, output)
        made, comment = Made(f"my_models:{function}"), f"write {function}: it returns the {cls}"
    made = made_as_it_is(made, module)
    return Made(**relative_to(folder, {"factory": made.factory, "kwargs": made.kwargs}), comment=comment)


def _shown(name: str) -> str:
    return name if re.search(MODEL_NAME, name) else re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "model"
