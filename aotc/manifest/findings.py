"""The mistakes of a manifest as they are collected, each with its line, and which parts are sound enough for further
checks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from aotc.errors import Issue
from aotc.manifest.types import KeyPath, place

_MAX_TEXT = 60


class Findings:
    """All mistakes of one manifest. A part is `sound` while no mistake was found in it, above it or below it."""

    def __init__(
        self, file: str, lines: Mapping[KeyPath, int], issues: Iterable[Issue], broken: Iterable[KeyPath]
    ) -> None:
        self.file = file
        self.lines = lines
        self._issues = list(issues)
        self._broken: set[KeyPath] = set()
        self._above_broken: set[KeyPath] = set()
        for path in broken:
            self.mark(path)

    @property
    def issues(self) -> tuple[Issue, ...]:
        """Every mistake once, in the order of lines."""
        return tuple(sorted(dict.fromkeys(self._issues), key=line_of))

    @property
    def found(self) -> bool:
        """Whether there is any mistake so far."""
        return bool(self._issues)

    def add(self, path: KeyPath, message: str, *, hint: str = "", expected: str = "", actual: str = "") -> None:
        """Report a mistake at a key path. The key is not sound from then on."""
        where = place(self.file, self.lines, path)
        self._issues.append(Issue(message, where=where, expected=expected, actual=actual, hint=hint))
        self.mark(path)

    def mark(self, path: KeyPath) -> None:
        """Exclude a part from further checks without reporting a mistake."""
        self._broken.add(path)
        self._above_broken.update(path[:size] for size in range(len(path)))

    def is_broken(self, path: KeyPath) -> bool:
        """Whether a mistake was found at exactly this key path."""
        return path in self._broken

    def sound(self, path: KeyPath) -> bool:
        if path in self._above_broken:
            return False
        return not any(path[:size] in self._broken for size in range(len(path) + 1))


def line_of(issue: Issue) -> int:
    """The line of a manifest that the issue names; 0 for none."""
    line = issue.where.rpartition(":")[2]
    return int(line) if line.isdigit() else 0


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that a mistyped one most likely stands for."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A hint: the nearest known name, or all of them."""
    names = sorted(known)
    if match := nearest(name, names):
        return f"did you mean `{match}`?"
    return f"known: {', '.join(names)}" if names else ""


def describe(value: Any) -> str:
    """A value of the manifest as a message shows it."""
    if value is None:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
