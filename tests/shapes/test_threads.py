"""Many threads, one callable, on a CPU. Speeds are compared as ratios in one run, and loosely: CI machines are busy."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import aotc

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread for each call, so that calls do not compete for cores with themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("concurrency", [1, 2])
def test_eight_threads_get_their_own_right_answers(zoo: Any, zoo_store: Path, concurrency: int) -> None:
    module = zoo.Pooled().eval()
    compiled = aotc.load(f"{zoo_store}#pooled", module, concurrency=concurrency)
    barrier = threading.Barrier(8)

    def work(seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        barrier.wait()
        right = 0
        for step in range(25):
            ids = torch.randint(0, 32, (1 + (seed + step) % 4, 1 + (7 * seed + step) % 16), generator=generator)
            mask = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                got, want = compiled(ids, mask), module(ids, mask)
            right += all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, want, strict=True))
        return right

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [25] * 8
    assert compiled.stats().calls == 200, "no count is lost"


def test_misses_and_calls_from_many_threads_are_all_counted(zoo: Any, zoo_store: Path) -> None:
    compiled = aotc.load(f"{zoo_store}#linear", zoo.Linear().eval(), on_miss=lambda error, x: None)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: compiled(torch.randn(2 + number % 2, 8)), range(400)))
    stats = compiled.stats()
    assert (stats.calls, stats.misses) == (200, 200)


def _repeat(work: Callable[[], Any], seconds: float) -> int:
    done, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        work()
        done += 1
    return done


def _counted_meanwhile(work: Callable[[], Any], seconds: float) -> int:
    """How far a thread of pure Python counts while this one repeats `work`."""
    counted, running = 0, True

    def count() -> None:
        nonlocal counted
        while running:
            counted += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        _repeat(work, seconds)
    finally:
        running = False
        thread.join()
    return counted


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_the_gil_is_free_while_the_kernel_runs(zoo: Any, zoo_store: Path, one_thread: None) -> None:
    """A thread of pure Python keeps most of its pace beside calls of compiled code. Held, it would get next to nothing:
    it waits for the whole of each call, milliseconds, for a turn of its own."""
    compiled = aotc.load(f"{zoo_store}#repeated", zoo.Repeated().eval())
    x = torch.randn(128, 256)
    compiled(x)
    best = 0.0
    for _ in range(5):
        alone = _counted_meanwhile(lambda: time.sleep(0.02), 0.2)
        beside = _counted_meanwhile(lambda: compiled(x), 0.2)
        best = max(best, beside / alone)
        if best > 0.5:
            return
    pytest.fail(f"at best {best:.2f} of its pace")
