"""Dynamic batching into buckets: requests that wait together run in one call.

While a call runs, requests gather; so batches grow with the load, and a lone request waits for nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Buckets:
    """The compiled sizes, as (rows, length), and what one call of each takes."""

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        self.seconds = dict(seconds)
        self.longest = max(length for _, length in seconds)

    def length_for(self, length: int) -> int:
        """The least compiled length that holds this one. Raises ValueError where none does."""
        return min(compiled for _, compiled in self.seconds if compiled >= length)

    def rows_for(self, waiting: int, length: int) -> int:
        """The compiled number of rows that answers so many requests of this compiled length in the least time for each.

        On a CPU a call of eight rows takes about eight times as long as one of one row, so that two requests are
        answered sooner by two calls; on a GPU it takes hardly longer.
        """
        rows = [own for own, compiled in self.seconds if compiled == length]
        return min(rows, key=lambda own: (self.seconds[own, length] / min(own, waiting), -own))

    def choose(self, lengths: Sequence[int]) -> list[int]:
        """Which of the waiting requests run next, by index; the first is the oldest, and always runs.

        With it run those that need the same compiled length. Rows that would be padding are filled with shorter ones.
        """
        length = self.length_for(lengths[0])
        alike = [n for n, own in enumerate(lengths) if self.length_for(own) == length]
        rows = self.rows_for(len(alike), length)
        shorter = [n for n, own in enumerate(lengths) if self.length_for(own) < length]
        return [*alike[:rows], *shorter[: max(0, rows - len(alike))]]


class Overloaded(Exception):
    """Too many requests wait already."""


class Waiting(NamedTuple):
    request: list[int]
    answer: asyncio.Future[Any]


class Batcher:
    """A queue, and a task that serves it.

    Args:
        choose: which of the waiting requests run next, by index.
        run: answers one batch, in the order of its requests.
        most: requests that may wait; others are refused with Overloaded.
    """

    def __init__(
        self,
        choose: Callable[[Sequence[list[int]]], list[int]],
        run: Callable[[list[list[int]]], Awaitable[Sequence[Any]]],
        most: int = 1000,
    ) -> None:
        self._choose, self._run, self._most = choose, run, most
        self._waiting: list[Waiting] = []
        self._arrived = asyncio.Event()

    async def submit(self, request: list[int]) -> Any:
        """The answer to a request. Raises Overloaded, or what its run raises."""
        if len(self._waiting) >= self._most:
            raise Overloaded(f"{self._most} requests wait already")
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(Waiting(request, answer))
        self._arrived.set()
        try:
            return await answer
        finally:
            del answer  # it may hold an exception, whose traceback holds this frame: a cycle, with the release in it

    async def serve(self) -> None:
        """Answer requests until this task is cancelled."""
        while True:
            await self._arrived.wait()
            self._waiting = [entry for entry in self._waiting if not entry.answer.cancelled()]  # clients that left
            if not self._waiting:
                self._arrived.clear()
                continue
            chosen = self._choose([entry.request for entry in self._waiting])
            batch = [self._waiting[n] for n in chosen]
            self._waiting = [entry for n, entry in enumerate(self._waiting) if n not in {*chosen}]
            await self._answer(batch)

    async def _answer(self, batch: list[Waiting]) -> None:
        """Where it fails, the batch is empty then: the traceback holds this frame, which may not hold the answers."""
        try:
            answers = await self._run([entry.request for entry in batch])
        except Exception as error:
            if len(batch) == 1:
                with contextlib.suppress(asyncio.InvalidStateError):
                    batch.pop().answer.set_exception(error)
        else:
            for entry, answer in zip(batch, answers, strict=True):
                if not entry.answer.done():
                    entry.answer.set_result(answer)
            return
        while batch:  # one bad request must not fail its neighbours
            await self._answer([batch.pop(0)])
