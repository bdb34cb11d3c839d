"""The pages of documentation: what is in them that a test can check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from processes import ROOT

PAGES = sorted(
    path.relative_to(ROOT)
    for pattern in ("*.md", "aotc/**/*.md", "examples/**/*.md", "tests/**/*.md")
    for path in ROOT.glob(pattern)
)

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: .+ -->\n *\Z")


class Block(NamedTuple):
    """A fenced block of code, its first line's number, and whether a comment above it says why it is not run."""

    language: str
    code: str
    line: int
    runs: bool


def blocks(page: Path) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for found in _FENCE.finditer(text):
        indent = found["indent"]
        code = "".join(line.removeprefix(indent) for line in found["code"].splitlines(keepends=True))
        line = text.count("\n", 0, found.start("code")) + 1
        yield Block(found["language"], code, line, not _NOT_RUN.search(text[: found.start()]))


def links(page: Path) -> Iterator[str]:
    text = _FENCE.sub("", (ROOT / page).read_text())
    yield from re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`(?!\])", "", text))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to the headings."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", (ROOT / page).read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
