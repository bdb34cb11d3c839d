"""Rewrite generated code: the number of replacements must be the expected one."""

from __future__ import annotations

import re

from aotc.errors import BuildError


def rewritten(patch: str, pattern: re.Pattern[str] | str, by: str, text: str, times: int = 1) -> str:
    """The text with each match of a pattern, or of a string, replaced.

    Raises BuildError unless there are `times` matches: else torch generates other code than the patch was written for.
    """
    if isinstance(pattern, str):
        found, changed = text.count(pattern), text.replace(pattern, by)
    else:
        changed, found = pattern.subn(by, text)
    check_count(patch, found, times)
    return changed


def check_count(patch: str, found: int, expected: int) -> None:
    """Raises BuildError if the number of rewritten places is not the expected one."""
    if found != expected:
        raise BuildError(
            f"the patch `{patch}` of torch expects to rewrite generated code in {expected} places, and finds {found}",
            hint="this torch generates other code than the patch was written for; use a tested version",
            stage="compile",
        )
