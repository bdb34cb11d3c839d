"""One check of `aotc doctor`, and how findings and errors become checks. Imports no torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from aotc.errors import AotcError, Issue
from aotc.records import Record

CheckStatus = Literal["ok", "warn", "fail"]


class Check(Record, frozen=True):
    """One fact of this machine, and whether it will do.

    `part` is what it belongs to; `found` is what is here, `needed` what is asked for ("" where nothing certain is);
    `hint` says what to do about a `warn` or a `fail`.
    """

    part: str
    name: str
    status: CheckStatus
    found: str
    needed: str = ""
    hint: str = ""


def from_issue(part: str, name: str, issue: Issue, status: CheckStatus = "fail") -> Check:
    text = f"{issue.where}: {issue.message}" if issue.where else issue.message
    return Check(part, name, status, text, hint=issue.hint)


def from_error(part: str, name: str, error: AotcError, status: CheckStatus = "fail") -> list[Check]:
    """A check for each finding of the error; where it has none, one for the error itself."""
    if not error.issues:
        return [Check(part, name, status, error.message, hint=error.hint)]
    return [
        from_issue(part, name, Issue(one.message, one.where, one.expected, one.actual, one.hint or error.hint), status)
        for one in error.issues
    ]


@contextmanager
def failing(checks: list[Check], part: str, name: str, status: CheckStatus = "fail") -> Iterator[None]:
    """Add a check for an AotcError that is raised within, instead of raising it."""
    try:
        yield
    except AotcError as error:
        checks += from_error(part, name, error, status)


def check_folder(part: str, name: str, folder: Path, hint: str, lack: CheckStatus = "warn") -> Check:
    """Whether a folder, or the nearest one in which it would be made, can be written, and how much is free there."""
    place = next(filter(_is_there, (folder, *folder.absolute().parents)), Path("/"))
    if place.is_dir() and os.access(place, os.W_OK | os.X_OK):
        free = shutil.disk_usage(place).free / (1 << 30)
        return Check(part, name, "ok", f"{folder}, {free:.1f} GiB free")
    return Check(part, name, lack, f"{folder} cannot be written", hint=hint)


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # in a folder that may not be entered
        return False
