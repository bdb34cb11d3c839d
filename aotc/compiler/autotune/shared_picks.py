"""What the units of one build have measured, for each other: an equal question has an equal answer.

A question is called by the digest of all that its answer depends on, so a file found here answers it as it stands.
Files appear whole (under another name first) and locks go with their process, so a killed unit leaves no false answer,
and no other unit waits for it. Nothing here outlasts the build. No unit's key names it: an answer is not an input.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aotc.digest import sha256_json
from aotc.errors import CorruptError
from aotc.picks import Pick
from aotc.records import decode

T = TypeVar("T")

_ENDING = ".pick"
_DONE = ".done"


class SharedPicks:
    """The answers in a folder, asked by one `unit`; `context` is what all its questions depend on (the device, …)."""

    def __init__(self, folder: Path, context: Any, unit: str) -> None:
        self._folder, self._context, self._unit = folder, context, unit
        self._asking = False
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, question: Any) -> Pick | None:
        """What another unit has measured; `Pick.measured_in` names it."""
        try:
            pick = decode(self._path(question).read_bytes(), Pick)
        except (OSError, CorruptError):
            return None
        return pick if pick.measured_in != self._unit else None

    def put(self, question: Any, pick: Pick) -> None:
        """Let the other units know. What was measured first stays."""
        path = self._path(question)
        measured = msgspec.structs.replace(pick, measured_in=self._unit)
        with suppress(OSError):  # a full disk costs the others a measurement, and this unit nothing
            _write(path, msgspec.json.encode(measured))

    def mark(self, what: Any) -> None:
        """Let the other units of this machine know that something is done, and need not be done again."""
        with suppress(OSError):
            _write(self._path(what).with_suffix(_DONE), self._unit.encode())

    def marked(self, what: Any) -> bool:
        """Whether another unit of this machine has done it."""
        try:
            return self._path(what).with_suffix(_DONE).read_bytes() != self._unit.encode()
        except OSError:
            return False

    def rotated(self, items: Sequence[T]) -> list[T]:
        """The items from another one on for each unit."""
        start = int(sha256_json(self._unit)[-8:], 16) % max(1, len(items))
        return [*items[start:], *items[:start]]

    @contextmanager
    def asking(self, question: Any) -> Iterator[None]:
        """Keep other units from measuring the same meanwhile: they wait here, and find the answer.

        A thread that asks one question within another does not wait, so no circle of waiting threads can form.
        """
        if self._asking:
            yield
            return
        descriptor = os.open(self._path(question).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._asking = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            self._asking = False
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has the same open file
            os.close(descriptor)

    def _path(self, question: Any) -> Path:
        digest = sha256_json([self._context, question])
        return self._folder / f"{digest.removeprefix('sha256:')}{_ENDING}"


def _write(path: Path, data: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent) as stream:
        stream.write(data)
        stream.flush()
        with suppress(FileExistsError):
            os.link(stream.name, path)


# -- between machines -------------------------------------------------------------------------------------------------


def answers_in(folder: Path) -> dict[str, bytes]:
    """All answers of a folder, by file name."""
    return {path.name: path.read_bytes() for path in folder.glob(f"*{_ENDING}")}


def add_answers(folder: Path, answers: Mapping[str, bytes]) -> None:
    """Let the units that use this folder have these answers too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in answers.items():
        _write(folder / Path(name).name, data)


class Answers:
    """What the units of several machines have measured, by file name; what was known first counts."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}

    def get(self) -> dict[str, bytes]:
        return self._answers

    def add(self, answers: Mapping[str, bytes]) -> None:
        self._answers = {**answers, **self._answers}
