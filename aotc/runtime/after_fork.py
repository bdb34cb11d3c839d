"""A forked child has one thread, and whatever the others were in the middle of: locks that nobody gives back."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_alone = False


def renew_in_child(owner: T, renew: Callable[[T], None]) -> None:
    """Call `renew(owner)` in every forked child, as long as `owner` lives; it may raise nothing.

    But not where the parent ran one thread alone: nothing is half done then, and a child shares it all with its parent,
    the memory of frozen weights too.
    """
    _renewals[owner] = renew


def _look_around() -> None:
    global _alone
    _alone = len(sys._current_frames()) == 1


def _renew() -> None:
    if not _alone:
        for owner, renew in list(_renewals.items()):
            renew(owner)


os.register_at_fork(before=_look_around, after_in_child=_renew)
