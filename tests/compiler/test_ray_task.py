"""What a Ray worker process keeps between the units that it is given: the processes that they are forked from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from processes import run_python

from aotc.compiler.executors.ray import task as ray_task
from aotc.compiler.executors.ray.task import kept_servers


class Servers:
    """As much of ForkServers as is used."""

    def __init__(self) -> None:
        self.began: list[str | None] = []
        self.closed = False

    def begin(self, environment: dict[str, str]) -> None:
        self.began.append(environment.get("OMP_NUM_THREADS"))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ray_task, "ForkServers", Servers)
    monkeypatch.setattr(ray_task, "_kept", {})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does
    return


def task(**variables: str | None) -> Any:
    with kept_servers({"OMP_NUM_THREADS": None, **variables}) as servers:
        assert not servers.closed  # type: ignore[attr-defined]
        return servers


def test_one_task_after_the_other_has_them() -> None:
    first = task()
    assert task() is first and not first.closed


def test_they_import_in_the_task_s_environment_before_they_are_asked_for_a_process() -> None:
    assert task().began == [None]
    assert task(OMP_NUM_THREADS="3").began == ["3"]


def test_a_task_in_another_environment_has_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    first = task()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    second = task()
    assert second is not first and first.closed and not second.closed
    assert task() is second


def test_a_task_that_is_cancelled_ends_them_and_the_next_one_begins_anew() -> None:
    first = task()
    with pytest.raises(KeyboardInterrupt), kept_servers({"OMP_NUM_THREADS": None}) as cancelled:
        assert cancelled is first
        raise KeyboardInterrupt
    assert first.closed
    assert task() is not first


def test_ray_s_processes_import_no_torch_to_begin() -> None:
    """Neither that of a task nor the actor's that holds the answers."""
    for module in ("executors.ray.task", "autotune.shared_picks"):
        assert run_python(f"import sys, aotc.compiler.{module}; print('torch' in sys.modules)") == "False\n"
