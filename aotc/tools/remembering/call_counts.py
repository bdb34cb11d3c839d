"""What calls ran, compiled code or eager, by their form; and why eager, in words. `model.stats()` shows it."""

from __future__ import annotations

import html
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from aotc.amounts import counted
from aotc.reads.tensors import dtype_name
from aotc.runtime.call import CompiledCall

CallMode = Literal["inference", "train"]

MOST_COUNTED = 1024
"""Forms whose calls in eager are counted by form; those of further forms are counted together."""

_OTHERS = "other forms"


class FormCalls(NamedTuple):
    """Calls of one form. `form` says it in words, or names the bucket whose code ran; `reason` is why the last one of
    them that was made in eager was."""

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


class CallCounter:
    """Counts the calls of one module. Many threads may call."""

    def __init__(self, mode: CallMode) -> None:
        """`mode`: of the calls that compiled code runs."""
        self.mode: CallMode = mode
        self._compiled: Counter[str] = Counter()
        """By bucket: of code that is loaded no more, and of regions."""
        self._eager: dict[tuple[CallMode, Hashable], tuple[str, int, str]] = {}
        """By form: in words, calls, and why the last one was made in eager."""
        self.renew()

    def renew(self) -> None:
        """A child that is forked may have got the lock locked."""
        self._lock = threading.Lock()

    def ran_eager(self, mode: CallMode, form: Hashable, reason: str) -> None:
        """Count a call in eager; `form` is a text, or that of the call by `aotc.tools.remembering.forms`."""
        with self._lock:
            if (mode, form) not in self._eager and len(self._eager) >= MOST_COUNTED:
                form = _OTHERS
            said, calls, _ = self._eager.get((mode, form)) or (in_words(form), 0, "")
            self._eager[mode, form] = said, calls + 1, reason

    def ran_compiled(self, name: str) -> None:
        """Count a call by regions."""
        with self._lock:
            self._compiled[name] += 1

    def keep(self, compiled: Iterable[CompiledCall]) -> None:
        """Keep the calls that were counted by code that is loaded no more."""
        with self._lock:
            for name, calls in _calls_of(compiled):
                self._compiled[name] += calls

    def counts(self, compiled: Iterable[CompiledCall]) -> CallCounts:
        """All calls, with those of the code that is loaded."""
        with self._lock:
            ran, eager = Counter(self._compiled), [(mode, *each) for (mode, _), each in self._eager.items()]
        for name, calls in _calls_of(compiled):
            ran[name] += calls
        forms = [FormCalls(name, self.mode, calls, 0) for name, calls in ran.items() if calls]
        forms += [FormCalls(said, mode, 0, calls, reason) for mode, said, calls, reason in eager]
        return CallCounts(ran.total(), sum(calls for *_, calls, _ in eager), tuple(forms))


def _calls_of(compiled: Iterable[CompiledCall]) -> Iterable[tuple[str, int]]:
    for call in compiled:
        if not call.artifact.regions:  # whose own counters are of the parts
            for bucket, seen in call.stats().buckets.items():
                yield f"{call.artifact.model} {bucket}".strip(), seen.calls


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
    return text if len(text) <= 200 else f"{text[:199]}…"


def _said(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    first, *items = value
    if not isinstance(first, type):  # of a tensor: its sizes and dtype, and what it may be besides
        return f"{dtype_name(items[0])}{list(first)}"
    if issubclass(first, Mapping):
        return f"{{{', '.join(f'{name}: {_said(item)}' for name, item in items)}}}"
    if issubclass(first, list | tuple):
        return f"{first.__name__}({', '.join(map(_said, items))})"
    return repr(items[0])
