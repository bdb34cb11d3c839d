"""Generated code that a patch rewrites: the text must be as the patch expects it."""

from __future__ import annotations

import re

from aotc.errors import BuildError


def rewritten(patch: str, pattern: re.Pattern[str] | str, by: str, text: str, times: int = 1) -> str:
    """The text with what a pattern, or a string, matches replaced.

    Raises BuildError where that is not there so often: torch writes other code than the patch was made for.
    """
    if isinstance(pattern, str):
        found, changed = text.count(pattern), text.replace(pattern, by)
    else:
        changed, found = pattern.subn(by, text)
    check_count(patch, found, times)
    return changed


def check_count(patch: str, found: int, expected: int) -> None:
    """Raises BuildError where a patch has not rewritten what it should."""
    if found != expected:
        raise BuildError(
            f"the patch `{patch}` of torch is to rewrite generated code in {expected} places, and finds {found}",
            hint="this torch writes other code than the patch was made for; use one that was tested",
            stage="compile",
        )
