"""Ends calls that wait for a rank which has failed or is gone.

A collective waits for all ranks. One that raised before it came there (a miss), or whose process has ended, would keep
the others waiting for the group's own time limit, half an hour by default; within a CUDA graph, for ever. So while a
call lasts, a thread looks at the group's store from time to time, and at the clock, and aborts the group.

The rank that raised may catch its error and make the next call, whose collectives would meet those of the others' last
one. So it first waits until that call has failed on every rank, as where all of them were given the same input.

Collectives of other sizes than another rank's end its process, or give numbers of nothing. So ranks tell each other the
form of a call's arguments where it is not that of the call before, and wait until all have told the same.

Two threads' calls at a time would meet in another order on another rank, half of one request with half of the other. So
would those of threads that take turns, where each rank has an order of its own: ranks that several threads call compare
the values of the arguments in each call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from aotc.errors import GroupError
from aotc.runtime.parallel.ranks import RanksOfLoad

_log = logging.getLogger("aotc")

TICK = 0.25
"""Seconds between two looks in a call."""
_BEFORE_NEXT = 0.01
"""Seconds between two looks before the call that follows a failed one."""
_BEFORE_COLLECTIVES = 0.0001
"""Seconds between two looks before the collectives of a call of another form."""
_LONGEST_FORM = 300


class _OfThread(threading.local):
    is_inside = False
    """Whether this thread is in a call."""
    has_called = False


class Watch:
    """A context for each call, in all of which one thread looks after the ranks."""

    def __init__(self, ranks: RanksOfLoad) -> None:
        self._ranks = ranks
        self._calls = 0
        self._inside = 0
        """The thread that is in a call."""
        self._callers = 0
        """How many threads have called."""
        self._process = os.getpid()
        self.of_thread = _OfThread()
        self._began = 0.0
        self._failed = 0
        """The last call, if it failed on this rank."""
        self._form = ""
        """Of the arguments of the last call, as all ranks made it."""
        self._changes = 0
        """How many calls had another form than the one before."""
        self._lock = threading.Lock()
        self._wake = threading.Event()
        weakref.finalize(self, self._wake.set)  # the thread ends with what it watches
        self._thread: threading.Thread | None = None
        self.failure: GroupError | None = None
        """Why no further call can run."""

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise GroupError(
                "this process was forked from a rank, whose connections to the others are not its own",
                hint="call aotc.load in the processes that torchrun starts, and make all calls there",
            )
        with self._lock:
            own = threading.get_ident()
            is_another = self._inside not in (0, own)  # its own: Ctrl-C has ended the last call
            if not is_another:
                self._inside = own
        if is_another:
            self._refuse_another_thread()
        try:
            if self._failed:
                self._wait_for_failures()
            if self.failure is not None:
                raise self.failure
        except BaseException:
            self._inside = 0
            raise
        with self._lock:
            self._calls += 1
            if not self.of_thread.has_called:
                self.of_thread.has_called = True
                self._callers += 1
            self.of_thread.is_inside = True
            self._began = time.monotonic()
            if self._thread is None:
                which = weakref.ref(self), self._wake
                self._thread = threading.Thread(target=_look, args=which, name="aotc ranks", daemon=True)
                self._thread.start()
        if not self._wake.is_set():
            self._wake.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside = 0
            self.of_thread.is_inside = False
            self._wake.clear()
        if error is not None and error is self.failure:
            return
        if self.failure is not None:
            raise self.failure from error
        if isinstance(error, Exception):
            self._failed = self._calls
            self._tell(self._calls, f"{type(error).__name__}: {error}")

    def agree(self, form: str, leaves: Sequence[Any] = ()) -> None:
        """Return when every rank makes this call with arguments of this form, and, where several threads call, of these
        values. Raises GroupError where one does not."""
        if form != self._form:
            self._agree_on_form(form)
        if self._callers > 1:
            self._compare_values(leaves)

    def _agree_on_form(self, form: str) -> None:
        self._form, self._changes = "", self._changes + 1
        store, keys = self._ranks.store, [self._key_of_form(self._changes, rank) for rank in range(self._ranks.size)]
        try:
            store.set(keys[self._ranks.rank], json.dumps([self._calls, form]))
            while self.failure is None and not store.check(keys):
                time.sleep(_BEFORE_COLLECTIVES)
            said = [] if self.failure is not None else [json.loads(store.get(key)) for key in keys]
            store.delete_key(self._key_of_form(self._changes - 1, self._ranks.rank))  # which all ranks have read
        except (RuntimeError, dist.DistError) as error:
            self.failure = _out_of_reach(error)
            raise self.failure from error
        if self.failure is not None:
            raise self.failure
        for rank, (call, other) in enumerate(said):
            if (call, other) != (self._calls, form):
                self.failure = self._other_form(rank, call, other, form)
                raise self.failure
        self._form = form

    def _key_of_form(self, change: int, rank: int) -> str:
        return f"form/{change}/{rank}"

    def _other_form(self, rank: int, call: int, other: str, form: str) -> GroupError:
        of_ours, of_theirs = f"({form[:_LONGEST_FORM]})", f"({other[:_LONGEST_FORM]})"
        if call != self._calls:
            of_ours, of_theirs = f"call {self._calls} {of_ours}", f"call {call} {of_theirs}"
        return GroupError(
            f"rank {rank} calls the model with other arguments: {of_theirs}, rank {self._ranks.rank} with {of_ours}",
            hint="every rank must make the same calls, in one order: give all ranks the same batch",
            expected=of_ours,
            actual=of_theirs,
            ranks=(rank,),
        )

    def _compare_values(self, leaves: Sequence[Any]) -> None:
        """With each other rank that several threads call: it has a key, and of two the later one sees the other's."""
        ranks, digest, name = self._ranks, _digest(leaves), threading.current_thread().name
        try:
            ranks.store.set(f"turn/{ranks.rank}", json.dumps([self._calls, digest, name]))
            for rank in self._others:
                if not ranks.store.check([key := f"turn/{rank}"]):
                    continue
                while (said := json.loads(ranks.store.get(key)))[0] < self._calls and self.failure is None:
                    time.sleep(_BEFORE_COLLECTIVES)
                if said[0] == self._calls and said[1] != digest:
                    self._refuse_other_values(rank, said[2], name)
        except (RuntimeError, dist.DistError) as error:
            self.failure = self.failure or _out_of_reach(error)
        if self.failure is not None:
            raise self.failure

    def _refuse_other_values(self, rank: int, there: str, here: str) -> None:
        failure = GroupError(
            f"several threads call the model, and rank {rank} calls it with other values: in call {self._calls} of its "
            f"thread {there}, rank {self._ranks.rank} in that of {here}",
            hint="make all calls in one thread of each rank, or let the threads of all ranks take turns in one order; "
            "the group is aborted, so start the processes again",
            ranks=(rank,),
        )
        self._abort(self._calls, failure)
        raise failure

    def _refuse_another_thread(self) -> None:
        failure = GroupError(
            f"two threads of rank {self._ranks.rank} call the model at a time",
            hint="make all calls in one thread of each rank, in one order; the group is aborted, so start the "
            "processes again",
        )
        self._abort(self._calls, failure)
        raise failure

    def _wait_for_failures(self) -> None:
        """Return when the last call has failed on every rank; else no further call can run."""
        until = time.monotonic() + self._ranks.timeout
        while self.failure is None:
            try:
                said = {rank: self._said(rank).get("call", 0) for rank in self._others}
            except (RuntimeError, dist.DistError) as error:
                self.failure = _out_of_reach(error)
                return
            behind = [rank for rank, call in said.items() if call < self._failed]
            if not behind:
                self._failed = 0
                return
            if any(said[rank] == -1 for rank in behind) or time.monotonic() > until:
                names = ", ".join(map(str, behind))
                self.failure = GroupError(
                    f"the last call failed on rank {self._ranks.rank}, and did not on rank {names}",
                    hint="every rank must make the same calls: start the processes again",
                    ranks=tuple(behind),
                )
                return
            time.sleep(_BEFORE_NEXT)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]

    def _said(self, rank: int) -> dict[str, Any]:
        """The rank's report of the last call that failed there."""
        key, store = f"call/{rank}", self._ranks.store
        said: dict[str, Any] = json.loads(store.get(key)) if store.check([key]) else {}
        return said

    def _tell(self, call: int, text: str) -> None:
        """Tell the other ranks that this one does not take part in that call, -1 for all further ones."""
        try:
            self._ranks.store.set(f"call/{self._ranks.rank}", json.dumps({"call": call, "error": text[:2000]}))
        except (RuntimeError, dist.DistError) as error:
            _log.debug("the other ranks cannot be told: %s", error)

    def look(self) -> None:
        """Abort the group where a call waits in vain."""
        with self._lock:
            call, waited = self._calls, time.monotonic() - self._began
            waits = bool(self._inside) and waited >= TICK and self.failure is None
        if waits and (failure := self._reason(call, waited)) is not None:
            self._abort(call, failure)

    def _reason(self, call: int, waited: float) -> GroupError | None:
        ranks = self._ranks
        for rank in self._others:
            try:
                said = self._said(rank)
                key = self._key_of_form(self._changes + 1, rank)
                told, other = json.loads(ranks.store.get(key)) if ranks.store.check([key]) else (0, "")
            except (RuntimeError, dist.DistError) as error:
                return _out_of_reach(error)
            if told == call and self._form:
                return self._other_form(rank, told, other, self._form)
            if said.get("call") in (call, -1):
                return GroupError(
                    f"rank {rank} takes no part in a call that rank {ranks.rank} waits in: {said['error']}",
                    hint="every rank must make the same calls; the group is aborted, so start the processes again",
                    ranks=(rank,),
                )
        if waited > ranks.timeout:
            return GroupError(
                f"a call was not done within {ranks.timeout:g} s: another rank has ended, or makes other calls",
                hint="see the logs of the other ranks; the group is aborted, so start the processes again; a slow call "
                "needs a longer `ranks.timeout`",
            )
        return None

    def _abort(self, call: int, failure: GroupError) -> None:
        with self._lock:
            if self._calls != call or not self._inside:
                return  # it has ended meanwhile
            self.failure = failure
        _log.error("%s; the process group is aborted", failure.message)
        self._tell(-1, f"rank {self._ranks.rank} has aborted the group: {failure.message}")
        try:
            self._ranks.group.abort()  # of NCCL's, it returns when graphs that hold collectives are gone
        except Exception:
            _log.exception("the process group cannot be aborted")


def _digest(leaves: Sequence[Any]) -> str:
    """Of the values of a call's arguments."""
    digest = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            own = leaf.detach().to("cpu").contiguous().reshape(-1).resolve_conj().resolve_neg()
            digest.update(own.view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, str | int | float | None):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _out_of_reach(error: Exception) -> GroupError:
    words = (str(error).splitlines() or [""])[0]
    return GroupError(
        f"the store of the process group cannot be reached, in a call: {words}",
        hint="its process (mostly that of rank 0) has ended: see its log",
    )


def _look(which: weakref.ref[Watch], wake: threading.Event) -> None:
    while True:
        wake.wait()
        time.sleep(TICK)
        if (watch := which()) is None:
            return
        watch.look()
        del watch
