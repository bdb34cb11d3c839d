"""What calls ran, compiled code or eager, by their form; and why eager, in words. `model.stats()` shows it."""

from __future__ import annotations

import html
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from aotc.amounts import counted
from aotc.expressions import parse
from aotc.reads.tensors import dtype_name
from aotc.records import Artifact, Bucket, SizeRange, TensorLeaf, bucket_name
from aotc.runtime.call import CompiledCall
from aotc.tools.remembering.caches.cache_structure import class_name

CallMode = Literal["inference", "train"]

MOST_COUNTED = 1024
"""Forms whose calls in eager are counted by form; those of further forms are counted together."""

_OTHERS = "other forms"


class FormCalls(NamedTuple):
    """Calls of one form, or of all forms that the same bucket takes. `form` says it in words, as `int64[2, 2..64]`;
    `reason` is why the last one of them that was made in eager was."""

    form: str
    mode: CallMode
    compiled: int
    eager: int
    reason: str = ""


class CallCounts(NamedTuple):
    """Calls since `aotc.compile`: all that ran compiled code, all that ran in eager, and both by form."""

    compiled: int
    eager: int
    forms: tuple[FormCalls, ...]

    def line(self) -> str:
        """`3 calls compiled, 1 in eager`."""
        return f"{counted(self.compiled, 'call')} compiled, {self.eager:,} in eager"

    def __str__(self) -> str:
        lines = [self.line()]
        for each in self.forms:
            shown = [f"{each.compiled:,} compiled"] if each.compiled else []
            shown += [f"{each.eager:,} in eager"] if each.eager else []
            why = f"; eager since {each.reason}" if each.reason else ""
            lines.append(f"  {each.mode}, {each.form}: {', '.join(shown)}{why}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        names = ("mode", "form", "compiled", "eager", "why eager")
        rows = [(each.mode, each.form, each.compiled, each.eager, each.reason) for each in self.forms]
        return f"<p>{html.escape(self.line())}</p>{html_table(names, rows) if rows else ''}"


def html_table(names: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table of HTML."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def summed(counts: Iterable[CallCounts]) -> CallCounts:
    """The calls of several: of a module in both modes."""
    of = list(counts)
    forms = tuple(form for each in of for form in each.forms)
    return CallCounts(sum(each.compiled for each in of), sum(each.eager for each in of), forms)


class _InEager:
    """Calls of a form in eager: the form in words, how many, and why the last one was."""

    __slots__ = ("calls", "reason", "said")

    def __init__(self, said: str) -> None:
        self.said, self.calls, self.reason = said, 0, ""


class CallCounter:
    """Counts the calls of one module. Many threads may call."""

    def __init__(self, mode: CallMode) -> None:
        """`mode`: of the calls that compiled code runs."""
        self.mode: CallMode = mode
        self._compiled: Counter[str] = Counter()
        """By form, in words: of code that is loaded no more, and of regions."""
        self._taken: dict[Hashable, str] = {}
        """The forms that compiled code takes, and what it takes, in words."""
        self._former: dict[str, str] = {}
        """What took the forms of code of today before, and what that takes; both in words."""
        self._eager: dict[tuple[CallMode, Hashable], _InEager] = {}
        self.renew()

    def renew(self) -> None:
        """A child that is forked may have got the lock locked."""
        self._lock = threading.Lock()

    def ran_eager(self, mode: CallMode, form: Hashable, reason: str) -> None:
        """Count a call in eager; `form` is a text, or that of the call by `aotc.tools.remembering.forms`."""
        with self._lock:
            if (ran := self._eager.get((mode, form))) is None:
                if len(self._eager) >= MOST_COUNTED:
                    form = _OTHERS
                ran = self._eager.setdefault((mode, form), _InEager(in_words(form)))
            ran.calls += 1
            ran.reason = reason

    def ran_compiled(self, form: Hashable) -> None:
        """Count a call by regions."""
        said = in_words(form)
        with self._lock:
            self._compiled[said] += 1

    def keep(self, compiled: Iterable[CompiledCall]) -> None:
        """Keep the calls that were counted by code that is loaded no more."""
        with self._lock:
            for said, calls in _calls_of(compiled):
                self._compiled[said] += calls

    def eager_forms(self) -> set[Hashable]:
        """The forms of which calls were made in eager, in the mode of these calls."""
        with self._lock:
            return {form for mode, form in self._eager if mode == self.mode}

    def takes(self, form: Hashable, call: CompiledCall, bucket: str) -> None:
        """Count the calls of a form with those of this bucket, which takes it."""
        said = bucket_in_words(call.artifact, bucket)
        with self._lock:
            before = self._taken.get(form) or in_words(form)
            self._taken[form] = said
            self._former.pop(said, None)
            if before != said:
                self._former[before] = said

    def counts(self, compiled: Iterable[CompiledCall]) -> CallCounts:
        """All calls, with those of the code that is loaded. A form that it takes has no row beside that code's."""
        with self._lock:
            ran, eager = [*self._compiled.items()], dict(self._eager)
            taken, former = dict(self._taken), dict(self._former)
        rows: dict[tuple[CallMode, str], FormCalls] = {}
        for said, calls in [*ran, *_calls_of(compiled)]:
            if calls:
                _add(rows, FormCalls(_last(former, said), self.mode, calls, 0))
        for (mode, form), each in eager.items():
            said = _last(former, taken[form]) if mode == self.mode and form in taken else each.said
            _add(rows, FormCalls(said, mode, 0, each.calls, each.reason))
        of = rows.values()
        return CallCounts(sum(each.compiled for each in of), sum(each.eager for each in of), tuple(of))


def _last(former: Mapping[str, str], said: str) -> str:
    """What takes the calls today that `said` took, or takes them still."""
    while said in former:
        said = former[said]
    return said


def _add(rows: dict[tuple[CallMode, str], FormCalls], more: FormCalls) -> None:
    """Count calls with those of the same form."""
    if (known := rows.get((more.mode, more.form))) is not None:
        counts = known.compiled + more.compiled, known.eager + more.eager
        more = FormCalls(more.form, more.mode, *counts, more.reason or known.reason)
    rows[more.mode, more.form] = more


def _calls_of(compiled: Iterable[CompiledCall]) -> Iterable[tuple[str, int]]:
    for call in compiled:
        if not call.artifact.regions:  # whose own counters are of the parts
            for bucket, seen in call.stats().buckets.items():
                yield bucket_in_words(call.artifact, bucket), seen.calls


def bucket_in_words(artifact: Artifact, name: str) -> str:
    """The calls that a bucket takes, as `in_words` has those of one form: `int64[2, 2..64], double=True`."""
    bucket = next(variant.bucket for variant in artifact.variants if bucket_name(variant.bucket) == name)
    usual = {each.name: each.default for each in artifact.signature.parameters}
    said = []
    for leaf in artifact.signature.leaves:
        if isinstance(leaf, TensorLeaf):
            said.append(f"{leaf.dtype}[{', '.join(_extent(extent, bucket) for extent in leaf.shape)}]")
        elif name := class_name(leaf.value):
            said.append(f"{leaf.path.removesuffix('.structure')}={name}")
        elif leaf.path not in usual or usual[leaf.path] != leaf.value:
            said.append(f"{leaf.path}={leaf.value!r}")
    return _shortened(", ".join(said) or "no arguments")


def _extent(extent: int | str, bucket: Bucket) -> str:
    """A size, or an expression over dims, in a bucket: a number, a range, or the expression."""
    if isinstance(extent, int):
        return str(extent)
    if isinstance(size := bucket.get(extent), SizeRange):
        return f"{size.min}..{size.max}"
    sizes = {dim: size for dim, size in bucket.items() if isinstance(size, int)}
    try:
        return str(parse(extent).evaluate(sizes))
    except KeyError:  # of a dim with a range
        return extent


def in_words(form: Any) -> str:
    """The form of a call in words: `int64[2, 17], double=True`."""
    if isinstance(form, str):
        return form
    args, kwargs, autocast, precision = form
    said = [*map(_said, args), *(f"{name}={_said(value)}" for name, value in kwargs)]
    modes = [f"autocast {str(autocast).removeprefix('torch.')}"] if autocast is not None else []
    modes += [f"float32_matmul_precision {precision}"] if precision != "highest" else []
    text = ", ".join(said) or "no arguments"
    text = f"{text} ({', '.join(modes)})" if modes else text
    return _shortened(text)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"


def _said(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    first, *items = value
    if not isinstance(first, type):  # of a tensor: its sizes and dtype, and what it may be besides
        return f"{dtype_name(items[0])}{list(first)}"
    if issubclass(first, Mapping) and [name for name, _ in items] == ["structure", "tensors"]:
        (_, (_, structure)), (_, (_, *tensors)) = items
        largest = max(tensors, key=lambda tensor: len(tensor[0]), default=None)
        name = class_name(structure)
        return f"{name} of {_said(largest)}" if largest is not None and largest[0] else f"{name}, empty"
    if issubclass(first, Mapping):
        return f"{{{', '.join(f'{name}: {_said(item)}' for name, item in items)}}}"
    if issubclass(first, list | tuple):
        return f"{first.__name__}({', '.join(map(_said, items))})"
    return repr(items[0])
