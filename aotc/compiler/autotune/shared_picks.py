"""Measurements that the units of one build share with each other: an equal question has an equal answer.

A file is named by the digest of everything that its answer depends on, so it is valid without further checks. Files are
written under a temporary name, and locks end with their process: a killed unit leaves no partial answer, and no other
unit waits for it. The folder is removed with the build. It is not a factor of the units' keys: an answer is not an
input.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aotc.digest import sha256_json
from aotc.errors import CorruptError
from aotc.machine.locks import lock, lock_file, waiting
from aotc.picks import Pick
from aotc.records import decode

T = TypeVar("T")

_ENDING = ".pick"
_DONE = ".done"


class SharedPicks:
    """The answers in a folder, used by one `unit`; all its questions also depend on `context` (the device, …)."""

    def __init__(self, folder: Path, context: Any, unit: str) -> None:
        self._folder, self._context, self._unit = folder, context, unit
        self._asking = False
        folder.mkdir(parents=True, exist_ok=True)

    def find(self, question: Any) -> Pick | None:
        """Another unit's answer, if there is one; `Pick.measured_in` names that unit."""
        try:
            pick = decode(self._path(question).read_bytes(), Pick)
        except (OSError, CorruptError):
            return None
        return pick if pick.measured_in != self._unit else None

    def put(self, question: Any, pick: Pick) -> None:
        """Publish a measurement to the other units. The first one stays."""
        path = self._path(question)
        measured = msgspec.structs.replace(pick, measured_in=self._unit)
        with suppress(OSError):  # with a full disk the others measure for themselves
            _write(path, msgspec.json.encode(measured))

    def mark(self, what: Any) -> None:
        """Tell the other units of this machine that `what` is done."""
        with suppress(OSError):
            _write(self._path(what).with_suffix(_DONE), self._unit.encode())

    def marked(self, what: Any) -> bool:
        """Whether another unit of this machine has marked `what` as done."""
        try:
            return self._path(what).with_suffix(_DONE).read_bytes() != self._unit.encode()
        except OSError:
            return False

    def rotated(self, items: Sequence[T]) -> list[T]:
        """The items, rotated by a number that depends on the unit."""
        start = int(sha256_json(self._unit)[-8:], 16) % max(1, len(items))
        return [*items[start:], *items[:start]]

    @contextmanager
    def asking(self, question: Any) -> Iterator[None]:
        """While active, other units do not measure an answer to this question: they wait here, then find the answer.

        A thread that already asks one question does not wait for another, so a deadlock is impossible.
        """
        if self._asking:
            yield
            return
        with lock_file(self._path(question).with_suffix(".lock"), 0o600) as descriptor:
            self._asking = True
            try:
                with waiting("for another unit, which measures the same"):
                    lock(descriptor)
                yield
            finally:
                self._asking = False

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
    """Add answers to a folder, for the units that use it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in answers.items():
        _write(folder / Path(name).name, data)


class Answers:
    """The measurements of units on several machines, by file name; the first answer to a question stays."""

    def __init__(self) -> None:
        self._answers: dict[str, bytes] = {}

    def get(self) -> dict[str, bytes]:
        return self._answers

    def add(self, answers: Mapping[str, bytes]) -> None:
        self._answers = {**answers, **self._answers}
