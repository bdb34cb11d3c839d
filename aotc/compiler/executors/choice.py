"""Choose the executor of a build: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aotc.compiler.estimate import Estimate
from aotc.compiler.executors.executor import Executor
from aotc.compiler.executors.host import check_host
from aotc.compiler.executors.local import LocalExecutor, jobs_for, targets_of_many
from aotc.compiler.plan import Unit
from aotc.compiler.publish.url_store import Place
from aotc.compiler.request import BuildRequest
from aotc.compiler.workers.forks import ForkServers


@contextmanager
def executor_for(
    request: BuildRequest, units: Sequence[Unit], place: Place, known: Estimate, servers: ForkServers | None = None
) -> Iterator[Executor]:
    """The executor for these units. Without units, no cluster is connected.

    Raises BuildError and StoreError where no unit could be compiled on this machine.
    """
    executor = _cluster(request, units, place, known) if request.cluster and units else None
    if executor is None and units:
        check_host(place.folder, known)
    executor = executor or LocalExecutor(
        jobs_for(units, request.jobs, known.memory),
        share=request.share,
        precompiled=targets_of_many(units),
        servers=servers,
    )
    try:
        yield executor
    finally:
        executor.close()


def _cluster(request: BuildRequest, units: Sequence[Unit], place: Place, known: Estimate) -> Executor:
    from aotc.compiler.executors.ray.executor import RayExecutor

    assert request.cluster is not None
    return RayExecutor(
        units,
        request.manifest.folder,
        request.cluster,
        share=request.share,
        staging=place.staging,
        exclude=place.folder,
        used=known.memory,
    )
