"""What `aotc fsck` finds: typed, so that printing is somebody else's job."""

from __future__ import annotations

from typing import Literal

from aotc.records import Record

Severity = Literal["error", "warning", "garbage"]
Kind = Literal[
    "layout",
    "index",
    "tag",
    "ambiguous tag",
    "blob missing",
    "blob size",
    "blob digest",
    "blob content",
    "blob type",
    "blob permissions",
    "blob unreadable",
    "unit",
    "foreign file",
    "linked folder",
    "temporary",
    "stale lock",
    "unreferenced",
    "unfinished",
    "hot copy",
]


class Finding(Record, frozen=True):
    """One thing that is not as it should be.

    An `error` is damage, a `warning` deserves a look, `garbage` is what `aotc gc` removes. `path` is relative to the
    folder that was checked (for a tag, its name); `needed_by` says which tags and units want the blob.
    """

    kind: Kind
    severity: Severity
    path: str
    message: str
    digest: str = ""
    size: int = 0
    expected: str = ""
    actual: str = ""
    hint: str = ""
    needed_by: tuple[str, ...] = ()


class Repair(Record, frozen=True):
    """Something that `--repair` did."""

    path: str
    action: str


class FsckReport(Record, frozen=True):
    """What is wrong after all repairs, what was repaired, and how much was read: a number of blobs, and bytes."""

    folder: str
    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    blobs: int = 0
    size: int = 0

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]
