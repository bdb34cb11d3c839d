"""The task that a Ray worker process runs for each unit, and the fork servers that it keeps between tasks.

Ray imports this module first. It does not import torch, so that the fork servers can import torch at the same time as
this process.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aotc.compiler.workers.unit_servers import ForkServers, unit_environment
from aotc.digest import sha256_json
from aotc.machine.processes import with_variables

_GRACE = 5.0  # seconds of waiting for the units' shared measurements


def run(request: bytes, variables: Mapping[str, str | None], queue: Any, measured: Any) -> Any:
    """The NodeAnswer to a NodeRequest, which is pickled so that it is decoded here; `variables` are the request's."""
    with kept_servers(variables) as servers:
        from aotc.compiler.executors.ray.node import run_on_node

        there = _MeasuredThere(measured) if measured is not None else None
        return run_on_node(pickle.loads(request), queue.put, there, servers)


_kept: dict[str, ForkServers] = {}


@contextmanager
def kept_servers(variables: Mapping[str, str | None]) -> Iterator[ForkServers]:
    """The fork servers of this process, kept from task to task.

    A task with another environment starts new ones, since imported modules may have read the old one. A cancelled task
    ends them. They end with this process, however it ends.
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
    """A node's interface to the actor that holds the units' measurements."""

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
