"""What ranks of a load tell one another, in one process. `tests/end_to_end/test_parallel.py` has several."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import destroy_process_group  # before aotc is imported

import aotc
from aotc.errors import BindError, GradientError, GroupError
from aotc.runtime.parallel.graph_release import released_with
from aotc.runtime.parallel.rank_call import ParallelCall
from aotc.runtime.parallel.ranks import RanksOfLoad
from aotc.runtime.parallel.watching import Watch


def test_a_later_group_does_not_read_what_an_earlier_one_said() -> None:
    """The store of torchrun outlives a group, and the next one has its name."""
    store, failed = dist.HashStore(), []
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            ranks = RanksOfLoad(dist.group.WORLD, 5)
            failed.append(ranks.store.check(["call/0"]))
            ranks.store.set("call/0", "{}")
        finally:
            dist.destroy_process_group()
    assert failed == [False, False]


@pytest.mark.parametrize("timeout", [-1, 0, "60", None, float("inf")])
def test_a_time_limit_is_some_seconds(timeout: Any) -> None:
    with pytest.raises(BindError, match=r"ranks\.timeout is .*, and may be seconds, more than 0"):
        aotc.load("model", ranks=aotc.Ranks(dist.group.WORLD, timeout))


def test_the_thread_that_watches_calls_ends_with_the_compiled_code() -> None:
    alone: Any = SimpleNamespace(size=1, rank=0, timeout=5)
    watch = Watch(alone)
    with watch:
        thread = watch._thread
    assert isinstance(thread, threading.Thread) and thread.is_alive()
    del watch
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_calls_of_two_threads_at_a_time_end_the_group() -> None:
    """Another rank may take them in another order: each would have half of the other's result."""
    said: dict[str, str] = {}
    group = SimpleNamespace(abort=lambda: said.setdefault("aborted", "yes"))
    alone: Any = SimpleNamespace(size=1, rank=0, timeout=60, store=SimpleNamespace(set=said.__setitem__), group=group)
    watch, errors = Watch(alone), list[Exception]()

    def call() -> None:
        try:
            with watch:
                pass
        except GroupError as error:
            errors.append(error)

    with pytest.raises(GroupError, match="two threads of rank 0 call the model at a time"), watch:
        other = threading.Thread(target=call)
        other.start()
        other.join()
    call()
    assert len(errors) == 2
    assert said["aborted"] == "yes"
    assert '"call": -1' in said["call/0"]


def test_a_child_of_a_rank_is_refused() -> None:
    """It would wait for ever: nothing watches its calls."""
    watch = Watch(cast("Any", SimpleNamespace(size=1, rank=0, timeout=60)))
    watch._process += 1  # as after a fork
    with pytest.raises(GroupError, match="was forked from a rank"), watch:
        pass


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_a_call_after_a_ctrl_c_is_watched(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Which comes while the watch is entered or left."""
    watched: list[bool] = []

    class Interrupted(Watch):
        def __enter__(self) -> None:
            super().__enter__()
            if where == "__enter__" and not watched:
                raise KeyboardInterrupt

        def __exit__(self, *error: Any) -> None:
            if where == "__exit__" and len(watched) == 1:
                raise KeyboardInterrupt
            super().__exit__(*error)

    call: Any = object.__new__(ParallelCall)
    call._waiting = watch = Interrupted(cast("Any", SimpleNamespace(size=1, rank=0, timeout=60)))
    monkeypatch.setattr(ParallelCall, "_to_its_end", lambda self, run, *_: run())

    def run() -> None:
        watched.append(watch._calls == len(watched) + 1)

    with pytest.raises(KeyboardInterrupt):
        call.run_watched(run, (), {})
    watched[:] = [True]
    call.run_watched(run, (), {})
    assert watched == [True, True]


def test_an_error_of_the_call_itself_stays_what_it_is() -> None:
    """Also where its text has a word of collectives, like the name of an input."""
    one: Any = SimpleNamespace(_waiting=SimpleNamespace(failure=None), _ranks=SimpleNamespace(rank=0))
    error = GradientError("`peer_ids` requires a gradient")
    assert ParallelCall._told(one, error) is error
    assert isinstance(ParallelCall._told(one, RuntimeError("gloo: connection closed")), GroupError)


def test_a_failed_collective_is_raised_without_itself_as_its_cause() -> None:
    alone: Any = SimpleNamespace(size=1, rank=0, timeout=5)
    watch = Watch(alone)
    with pytest.raises(GroupError, match="a collective failed") as caught, watch:
        watch.failure = GroupError("a collective failed")
        raise watch.failure
    assert caught.value.__cause__ is None


def test_graphs_go_before_their_group_whatever_name_destroys_it() -> None:
    class Graphs:
        group_was_there: bool | None = None

        def release(self) -> None:
            self.group_was_there = dist.is_initialized()

    for destroy in (destroy_process_group, dist.destroy_process_group):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        released_with(dist.group.WORLD, graphs := Graphs())
        destroy()
        assert graphs.group_was_there and not dist.is_initialized()


class Two:
    """Two ranks in one process, with one store."""

    def __init__(self) -> None:
        store, group = dist.HashStore(), SimpleNamespace(abort=lambda: None)
        self.watches = [
            Watch(cast("Any", SimpleNamespace(size=2, rank=rank, timeout=60, store=store, group=group)))
            for rank in (0, 1)
        ]

        self.pools = [[ThreadPoolExecutor(1, f"thread {name}") for name in "AB"] for _ in (0, 1)]

    def call(self, *forms: str, threads: tuple[int, int] = (0, 0), values: tuple[Any, Any] = ((), ())) -> list[str]:
        """What each rank's call with arguments of its form ends with, in one of its two threads."""
        pools = [pools[thread] for pools, thread in zip(self.pools, threads, strict=True)]
        calls = [pool.submit(self._call, *of) for pool, *of in zip(pools, self.watches, forms, values, strict=True)]
        return [call.result() for call in calls]

    def _call(self, watch: Watch, form: str, values: Any) -> str:
        try:
            with watch:
                watch.agree(form, values)
                while form == "waits" and watch.failure is None:  # as a collective does
                    time.sleep(0.01)
        except GroupError as error:
            return error.message
        return ""


def test_calls_with_other_arguments_are_an_error_on_every_rank_before_their_collectives() -> None:
    ranks = Two()
    assert ranks.call("a", "a") == ranks.call("a", "a") == ranks.call("b", "b") == ["", ""]
    assert ranks.call("c", "d") == [
        "rank 1 calls the model with other arguments: (d), rank 0 with (c)",
        "rank 0 calls the model with other arguments: (c), rank 1 with (d)",
    ]
    assert all(ranks.call("b", "b"))


def test_a_rank_that_runs_a_call_of_the_form_before_ends_with_those_that_wait_for_it() -> None:
    ranks = Two()
    ranks.watches[0]._form = ranks.watches[1]._form = "waits"
    running, waiting = ranks.call("waits", "b")
    assert running == "rank 1 calls the model with other arguments: (b), rank 0 with (waits)"
    assert waiting.startswith("rank 0 takes no part in a call that rank 1 waits in") and running in waiting
    assert all(ranks.call("waits", "waits"))


def test_threads_of_two_ranks_that_take_turns_in_one_order_may_call() -> None:
    """Also where other values come in calls of one thread of each rank, or in those of a rank that one thread calls."""
    ranks, one, two = Two(), (torch.ones(2), 3), (torch.zeros(2), 3)
    assert ranks.call("a", "a", values=(one, two)) == ["", ""]
    assert ranks.call("a", "a", values=(one, two), threads=(1, 0)) == ["", ""]
    assert ranks.call("a", "a", values=(one, one), threads=(0, 1)) == ["", ""]
    assert ranks.call("b", "b", values=(two, two), threads=(1, 1)) == ["", ""]


@pytest.mark.parametrize("other", [torch.zeros(2), torch.ones(2, dtype=torch.bfloat16).t(), 4])
def test_threads_of_two_ranks_that_take_turns_in_other_orders_are_an_error_before_collectives(other: Any) -> None:
    ranks, one, two = Two(), (torch.ones(2), 3), (torch.ones(2), 3, other)
    assert ranks.call("a", "a", values=(one, one), threads=(0, 1)) == ["", ""]
    said = ranks.call("waits", "waits", values=(two, one), threads=(1, 0))
    assert all(said) and any("several threads call the model" in each for each in said)
    assert any("thread A" in each and "thread B" in each for each in said)
    assert all(ranks.call("a", "a", values=(one, one)))
