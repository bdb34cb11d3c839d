"""The page of `aotc inspect --html`. Names and sources are untrusted: any writer of the store chooses them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from markupsafe import Markup, escape
from pygments.lexer import Lexer
from pygments.lexers import CppLexer, PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType, is_token_subtype

from aotc.provenance import CallTimes
from aotc.store.layout.bundle import Bundle
from aotc.store.readable import ReadableStore
from aotc.tools.html_page import render, visible
from aotc.tools.inspection.overview import Overview, overviews
from aotc.tools.inspection.races import describe_config
from aotc.verify.verdicts import VerifyReport

BUCKETS_NAMED = 4
"""Lists of buckets that are longer are cut to this many names, and the number of the others."""

_COLOURED = ((Comment, "c"), (Keyword, "k"), (String, "s"), (Number, "m"), (Name.Function, "f"), (Name.Decorator, "f"))


def render_page(store: ReadableStore, bundle: Bundle, reference: str, verdicts: Sequence[VerifyReport] = ()) -> str:
    """The whole page, as HTML; `verdicts` are those of `aotc verify` on this bundle. Raises what `overviews` raises."""
    views = overviews(store, bundle, verdicts)
    rules = _filter_rules(views)
    return render("aotc.tools.inspection", _FILTERS, rules, bundle=bundle, reference=reference, overviews=views)


def _filter_rules(views: Sequence[Overview]) -> str:
    """Of a filter for the kernels of one operator, which are known by the operator's number: the others are hidden."""
    rule = ".filtered:has(.only-o{0}:checked) .kernels > li:not(.o{0}) {{ display: none; }}\n"
    operators = max((len(view.fates) for view in views), default=0)
    return "".join(map(rule.format, range(operators)))


# -- filters ----------------------------------------------------------------------------------------------------------


def _source(text: str, kind: str) -> Markup:
    lexer: Lexer = CppLexer() if kind == "cpp" else PythonLexer()
    return Markup("").join(_spans(lexer.get_tokens(visible(text).rstrip("\n"))))


def _spans(tokens: Any) -> Iterator[Markup]:
    """Colour few kinds of tokens: fewer spans keep the page small."""
    for token, text in tokens:
        name = _class(token)
        yield Markup('<span class="{}">{}</span>').format(name, text) if name else escape(text)


def _class(token: _TokenType) -> str:
    return next((name for kind, name in _COLOURED if is_token_subtype(token, kind)), "")


def _difference(text: str) -> Markup:
    """A unified diff, its lines marked as removed and added."""
    marks = {"-": "del", "+": "ins"}
    lines = [(marks.get(line[:1]), visible(line)) for line in text.splitlines()]
    return Markup("\n").join(
        Markup("<{0}>{1}</{0}>").format(Markup(mark), line) if mark else escape(line) for mark, line in lines
    )


def _some(names: Sequence[str], total: int) -> str:
    """A list of buckets in few words."""
    if len(names) == total:
        return "every bucket" if total != 1 else names[0]
    if len(names) > BUCKETS_NAMED:
        return f"{', '.join(names[: BUCKETS_NAMED - 1])} and {len(names) - BUCKETS_NAMED + 1} more of {total} buckets"
    return ", ".join(names)


def _times(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def _compared(times: CallTimes) -> str:
    """Compiled code and eager in words: a ratio only where the times show one."""
    if times.eager is None:
        return "eager could not be run"
    if times.on_busy_machine:
        return "not compared"  # a badge beside it says why
    if times.few_calls:
        return f"not compared: only {times.few_calls} call{'s' * (times.few_calls != 1)} timed"
    if (speedup := times.speedup) is None:
        return "no difference beyond the noise"
    return f"{speedup:.3g} × as fast as eager" if speedup >= 1 else f"eager is {1 / speedup:.3g} × as fast"


def _figure(error: float | None) -> str:
    return "–" if error is None else f"{error:.2e}"


_FILTERS: dict[str, Callable[..., Any]] = {
    "config": describe_config,
    "source": _source,
    "difference": _difference,
    "some": _some,
    "json": functools.partial(json.dumps, ensure_ascii=False),
    "times": _times,
    "compared": _compared,
    "figure": _figure,
}
