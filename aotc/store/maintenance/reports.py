"""The reports of gc and fsck, as typed data. All sizes are in bytes."""

from __future__ import annotations

from typing import Literal

from aotc.records import Record

FlawSeverity = Literal["error", "warning", "garbage"]


class Removal(Record, frozen=True):
    """One thing that was removed: a tag, unit, blob, temporary, lock, log or work folder, or an attachment of a bundle
    that is gone (signatures, attestations); its tag or path, why, and the bytes of disk that this freed."""

    kind: str
    name: str
    reason: str
    size: int = 0


class Freed(Record, frozen=True):
    """The result of a collection.

    `kept`: bytes that stay. `waiting`: unreferenced blobs that may be in use (a later collection frees them). `over`:
    by how much a size limit is missed, `writers` the running ones that were spared.
    """

    folder: str
    removed: tuple[Removal, ...]
    kept: int
    waiting: int = 0
    over: int = 0
    writers: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def freed(self) -> int:
        return sum(removal.size for removal in self.removed)


class Finding(Record, frozen=True):
    """One finding. `kind` is one of `layout`, `index`, `tag`, `unit`, `blob missing`, `blob corrupt`,
    `blob content` (other bytes than the record says), `blob unreadable`, `version` (of another aotc, left alone),
    `foreign file`, `leftover` (of a killed process), `unreferenced`, `unfinished`.

    An `error` is damage, a `warning` deserves a look, `garbage` is what `aotc gc` removes. `path` is relative to the
    store (for a tag, its name); `needed_by` says which tags and units reach the blob. `follows`: damage of blobs that
    have findings of their own is the only cause.
    """

    kind: str
    severity: FlawSeverity
    path: str
    message: str
    digest: str = ""
    size: int = 0
    expected: str = ""
    actual: str = ""
    hint: str = ""
    needed_by: tuple[str, ...] = ()
    follows: bool = False


class Repair(Record, frozen=True):
    """Something that `--repair` did."""

    path: str
    action: str


class FsckReport(Record, frozen=True):
    """The damage left after all repairs, the repairs, and the number of blobs and bytes that were read."""

    folder: str
    findings: tuple[Finding, ...]
    repairs: tuple[Repair, ...] = ()
    blobs: int = 0
    size: int = 0

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "error"]
