"""The page of `aotc inspect --html`: one file, no script, and nothing that a browser would fetch.

Names and sources are untrusted: any writer of the store chooses them. So everything is escaped, and a
Content-Security-Policy allows this page's own style sheet and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup, escape
from pygments.lexer import Lexer
from pygments.lexers import CppLexer, PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, _TokenType, is_token_subtype

from aotc.inspection.overview import Overview, overviews
from aotc.inspection.races import describe_config
from aotc.provenance import CallTimes
from aotc.store import Bundle, Readable
from aotc.verify.report import Report as Verdict

BUCKETS_NAMED = 4
"""Lists of buckets that are longer are cut to this many names, and the number of the others."""

_COLOURED = ((Comment, "c"), (Keyword, "k"), (String, "s"), (Number, "m"), (Name.Function, "f"), (Name.Decorator, "f"))
# Control characters and those that change the direction of text could make a source look like another one.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def render_page(store: Readable, bundle: Bundle, reference: str, verdicts: Sequence[Verdict] = ()) -> str:
    """The whole page, as HTML; `verdicts` are those of `aotc verify` on this bundle. Raises what `overviews` raises."""
    views = overviews(store, bundle, verdicts)
    style = Markup(_resource("page.css")) + _filter_rules(views)
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            bundle=bundle,
            reference=reference,
            overviews=views,
            style=style,
            style_digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
        )
    )


def _filter_rules(views: Sequence[Overview]) -> Markup:
    """Of a filter for the kernels of one operator, which are known by the operator's number: the others are hidden."""
    rule = ".filtered:has(.only-o{0}:checked) .kernels > li:not(.o{0}) {{ display: none; }}\n"
    operators = max((len(view.fates) for view in views), default=0)
    return Markup("".join(map(rule.format, range(operators))))


@cache
def _resource(name: str) -> str:
    return files("aotc.inspection").joinpath(name).read_text(encoding="utf-8")


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_resource),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: _visible(value) if type(value) is str else value,
    )
    environment.filters.update(
        config=describe_config,
        source=_source,
        difference=_difference,
        some=_some,
        json=_json,
        percent=_percent,
        times=_times,
        ms=_ms,
        compared=_compared,
        figure=_figure,
    )
    return environment


def _visible(text: str) -> str:
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


# -- filters ----------------------------------------------------------------------------------------------------------


def _source(text: str, kind: str) -> Markup:
    lexer: Lexer = CppLexer() if kind == "cpp" else PythonLexer()
    return Markup("").join(_spans(lexer.get_tokens(_visible(text).rstrip("\n"))))


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
    lines = [(marks.get(line[:1]), _visible(line)) for line in text.splitlines()]
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _percent(share: float) -> str:
    """A share of a chart's width, for an SVG attribute."""
    return f"{max(0.0, min(1.0, share)) * 100:.2f}%"


def _times(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def _ms(ms: float) -> str:
    return f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"


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
