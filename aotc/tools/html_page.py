"""A page that is one file: no script, and nothing that a browser would fetch.

A tool has its contents, `page.html.jinja`, and what its `page.css` adds to the style. Here are the frame around them,
`page_frame.html.jinja`; what is on several pages, `page_parts.html.jinja`; and the style of all, `page.css`.

The texts are untrusted: whatever a template shows is escaped. The frame allows, by a Content-Security-Policy with
`style_digest`, the page's own style sheet and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from aotc.amounts import seconds_text

_KIT = "aotc.tools"

# Control characters, and those that change the direction of text, could make a text look like another one.
_INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def render(package: str, filters: Mapping[str, Callable[..., Any]], rules: str = "", **values: Any) -> str:
    """The page of a package; `rules` are added to its style, and trusted. A name that a template lacks is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: resource(package if name == "page.html.jinja" else _KIT, name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: visible(value) if type(value) is str else value,
    )
    environment.filters.update({"percent": percent, "share": share, "seconds": seconds, "ms": ms, **filters})
    style = resource(_KIT, "page.css") + resource(package, "page.css") + rules
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(style=Markup(style), style_digest=digest, **values)


def percent(share: float) -> str:
    """A share of a chart's width, for an SVG attribute."""
    return f"{max(0.0, min(1.0, share)) * 100:.2f}%"


def share(share: float) -> str:
    return f"{share * 100:.1f} %"


def seconds(seconds: float | None) -> str:
    return "–" if seconds is None else seconds_text(seconds)


def ms(ms: float | None) -> str:
    return "–" if ms is None else f"{ms:.3g} ms" if ms < 1000 else f"{ms / 1000:.3g} s"


@cache
def resource(package: str, name: str) -> str:
    """A text file of a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def visible(text: str) -> str:
    """The text with escapes for invisible characters; tabs and newlines stay."""
    return _INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)
