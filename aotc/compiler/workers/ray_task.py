"""The task that a Ray worker process runs for each unit, and what that process keeps from one task to the next.

Ray imports this module to begin. It imports no torch: that is left to the processes that the unit's are forked from,
and to this one meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aotc.compiler.workers.forks import ForkServers, unit_environment
from aotc.digest import sha256_json
from aotc.machine.processes import with_variables

_GRACE = 5.0  # seconds in which what the units have measured must come


def run(request: bytes, variables: Mapping[str, str | None], queue: Any, measured: Any) -> Any:
    """The NodeAnswer to a NodeRequest, pickled so that it is read here; `variables` are the request's."""
    with kept_servers(variables) as servers:
        from aotc.compiler.executors.ray.node import run_on_node

        there = _MeasuredThere(measured) if measured is not None else None
        return run_on_node(pickle.loads(request), queue.put, there, servers)


_kept: dict[str, ForkServers] = {}


@contextmanager
def kept_servers(variables: Mapping[str, str | None]) -> Iterator[ForkServers]:
    """What the units of this process are forked from: one task after the other has them.

    A task in another environment has new ones, since what they import may have read it. A task that is cancelled ends
    them. They end with this process, however it ends.
    """
    environment = with_variables(unit_environment(), variables)
    key = sha256_json(environment)
    servers = _kept.pop(key, None) or ForkServers()
    while _kept:
        _kept.popitem()[1].close()
    try:
        servers.begin(environment)
        yield servers
    except BaseException:
        servers.close()
        raise
    _kept[key] = servers


class _MeasuredThere:
    """The actor that holds what the units have measured, as a node sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def get(self) -> Mapping[str, bytes]:
        answers: Mapping[str, bytes] = self._wait(self._actor.get.remote())
        return answers

    def add(self, answers: Mapping[str, bytes]) -> None:
        self._wait(self._actor.add.remote(answers))

    def _wait(self, reference: Any) -> Any:
        import ray

        return ray.get(reference, timeout=_GRACE)
