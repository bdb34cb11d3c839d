"""Narrow the matches of Inductor's pattern replacements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Check = Callable[[Any], bool]


@contextmanager
def patterns_narrowed(narrowed: Callable[[Any, Check], Check | None]) -> Iterator[None]:
    """While active, a pattern of a pass uses the check that `narrowed` returns for it, if it returns one."""
    from torch._inductor.pattern_matcher import PatternMatcherPass

    apply: Any = PatternMatcherPass.apply
    seen: set[int] = set()

    def applied(self: Any, graph: Any) -> Any:
        for entry in [entry for entries in self.patterns.values() for entry in entries if id(entry) not in seen]:
            seen.add(id(entry))
            if check := narrowed(self, entry.extra_check):
                stack.enter_context(mock.patch.object(entry, "extra_check", check))
        return apply(self, graph)

    with ExitStack() as stack, mock.patch.object(PatternMatcherPass, "apply", applied):
        yield


def both(first: Check, second: Check) -> Check:
    return lambda match: first(match) and second(match)
