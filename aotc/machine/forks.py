"""A forked child has one thread. Locks that other threads held at the fork are never released in it.

OpenMP's threads do not exist there either, and the child would wait for them in its first parallel loop: they end
before a fork. GNU's OpenMP keeps a pool for each thread that has run such a loop. Only the forking thread's is known to
the child; the parent's next loop starts its threads anew.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_renewals: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()
_alone = False


def renew_in_child(owner: T, renew: Callable[[T], None]) -> None:
    """Call `renew(owner)` in every forked child, as long as `owner` lives. It must not raise.

    It is not called if the parent had a single thread at the fork. Then no change was half done, and the child keeps
    sharing everything with its parent, also the memory of frozen weights.
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


_SOFT = 1
"""`omp_pause_soft` of omp.h: what the program itself keeps in OpenMP's threads may stay."""

_pauses: dict[int | None, Callable[[int], int]] = {}


def end_threads_before_forks(*libraries: ctypes.CDLL) -> None:
    """From now on, end the OpenMP threads of each library before a fork. Libraries may use different OpenMP files."""
    for user in libraries:
        try:
            pause = user.omp_pause_resource_all  # sought in what it is linked to, too
        except AttributeError:
            continue
        _pauses[ctypes.cast(pause, ctypes.c_void_p).value] = pause


def end_threads() -> None:
    for pause in list(_pauses.values()):
        pause(_SOFT)


os.register_at_fork(before=end_threads)
