"""An exception of a signal's handler, wherever Python lets one raise, leaves no lock held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interruptions import interruptions
from torch import Tensor

from aotc.errors import BindError
from aotc.runtime.libraries.runner import CallingBack
from aotc.runtime.state.read_write_lock import ReadWriteLock

WITHIN = 20


def beside(action: Callable[[], Any]) -> Any:
    """What another thread gets, which must not wait for ever."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()), daemon=True)
    thread.start()
    thread.join(WITHIN)
    assert results, "it waits for ever"
    return results[0]


@pytest.mark.parametrize("way", ["run_inside", "run_alone"])
def test_a_gate_is_as_open_after_an_interruption_as_before(way: str) -> None:
    gate, count = ReadWriteLock(), 0
    run = getattr(gate, way)
    for _ in interruptions(lambda: run(lambda: run(lambda: 1))):
        assert beside(lambda: gate.run_inside(lambda: 2)) == 2
        assert beside(lambda: gate.run_alone(lambda: 3)) == 3
        count += 1
    assert count > 10


def test_who_is_inside_a_gate_may_enter_again_while_another_waits_to_be_alone() -> None:
    gate, alone = ReadWriteLock(), threading.Event()

    def enter_again() -> int:
        waiting = threading.Thread(target=lambda: gate.run_alone(alone.set), daemon=True)
        waiting.start()
        while gate._entry.acquire(blocking=False):
            gate._entry.release()
        assert not alone.is_set()
        with pytest.raises(BindError):
            gate.run_alone(lambda: 0)
        return gate.run_inside(lambda: 1)

    assert beside(lambda: gate.run_inside(enter_again)) == 1
    assert alone.wait(WITHIN)


class Echo:
    counts = None

    def run(self, arguments: list[Tensor]) -> list[Tensor]:
        return arguments


def test_a_library_that_calls_back_has_its_models_after_an_interruption() -> None:
    library, count = CallingBack(Echo, 1), 0  # type: ignore[arg-type]
    for _ in interruptions(lambda: library.run([])):
        assert library._free.qsize() == 1
        assert not library._inside
        assert beside(lambda: library.run([torch.ones(1)])) == [1]
        count += 1
    assert count > 5
