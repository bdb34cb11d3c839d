"""From the reports of `aotc verify` to bisections: one fresh process for each artifact that differs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from aotc.errors import VerifyError
from aotc.machine.processes import answer_of, child_environment
from aotc.records import Dims, bucket_name
from aotc.runtime.fetch import local_store
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, is_remote
from aotc.tools.bisection.bisection_messages import Bisection, BisectJob
from aotc.verify.cases import model_dispatcher
from aotc.verify.comparison import VerifyJob
from aotc.verify.runnable import spec_of
from aotc.verify.verdicts import VerifyReport

_IN_RANKS = (
    "a bisection runs one process, and the model is split over ranks\n"
    "build the whole model, without `parallel:`, under another name, and bisect that"
)


def to_bisect(reports: Sequence[VerifyReport]) -> list[VerifyReport]:
    """Of each artifact the first report of a difference: others mostly have the same cause."""
    wrong = [one for one in reports if one.status == "failed" and one.bundle]
    return list({(one.bundle, one.target): one for one in reversed(wrong)}.values())


def bisect_reports(
    where: str, reports: Sequence[VerifyReport], folder: Path, seeds: int
) -> Iterator[tuple[VerifyReport, Bisection]]:
    """Say of each artifact that differs why it does. `where` is the store, `folder` the one of the factory's files.

    Raises VerifyError where the process that bisects ends without an answer; NotFoundError, CorruptError, StoreError.
    """
    store = Store.open(local_store() if is_remote(where) else Path(where))
    for report in to_bisect(reports):
        yield report, _bisect(store, report, folder, seeds)


def _bisect(store: Store, report: VerifyReport, folder: Path, seeds: int) -> Bisection:
    bundle = read_bundle(store, Reference(None, report.model, digest=report.bundle))
    entry = next(one for one in bundle.artifacts if one.target == report.target)
    artifact = read_built(store, entry)
    if artifact.parallel:
        return Bisection(report.model, report.bucket, report.target, report.sizes, (), conclusion=_IN_RANKS)
    spec = spec_of(artifact)
    buckets = [variant.bucket for variant in model_dispatcher(artifact, spec.buckets).variants]
    bucket = next(one for one in buckets if bucket_name(one) == report.bucket)
    pinned = str(Reference(None, bundle.model, digest=bundle.digest))
    verify = VerifyJob(pinned, str(store.path), spec, str(folder), artifact.target, seeds)
    job = BisectJob(verify, bucket, _dims(report.sizes), report.extremes)
    with tempfile.TemporaryDirectory(prefix="aotc-bisect-") as work:
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{work}/inductor", "TRITON_CACHE_DIR": f"{work}/triton"}
        environment = {**child_environment(), **caches}
        try:
            return answer_of("aotc.tools.bisection.bisect_worker", job, Bisection, Path(work), environment)
        except ChildProcessError as error:
            raise VerifyError(f"the process that bisects {report.model} {error}") from error


def _dims(sizes: str) -> Dims:
    """The sizes of a report, as `describe_sizes` writes them."""
    pairs = [part.partition("=") for part in sizes.split(",") if "=" in part]
    return {name: int(size) for name, _, size in pairs}
