"""Attach the result of `aotc verify` to the bundles that were verified: one attestation for each artifact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import aotc
from aotc.errors import Issue, VerifyError
from aotc.machine.environment import this_environment
from aotc.runtime.fetch import local_store
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.store import Store
from aotc.store.opening import open_transfer
from aotc.store.reference import Reference, is_remote
from aotc.store.remote.push import push_attestations
from aotc.store.signing.attestations import attest
from aotc.store.signing.keys import PrivateKey
from aotc.verification import ISSUES_LIMIT, Limit, Verification
from aotc.verify.verdicts import VerifyReport


def attest_reports(
    where: str, reports: Sequence[VerifyReport], limits: Mapping[str, Sequence[Limit]], key: PrivateKey | None = None
) -> list[Verification]:
    """Attach what `reports` say of each artifact to its bundle in the store `where`; to one at a URL they are pushed.

    `limits` are those of a gate, by the bundle's digest. Raises VerifyError where no artifact was run, NotFoundError,
    SignatureError, CorruptError, RemoteError, StoreError.
    """
    store = Store.open(local_store() if is_remote(where) else Path(where))
    digests = dict.fromkeys((report.model, report.bundle) for report in reports if report.bundle)
    attested: list[Verification] = []
    for model, digest in digests:
        bundle = read_bundle(store, Reference(None, model, digest=digest))
        of_bundle = [report for report in reports if report.bundle == digest]
        found = list(verifications(of_bundle, bundle, limits.get(digest, ())))
        for verification in found:
            attest(store, bundle, verification, key)
        if found and is_remote(where):
            push_attestations(open_transfer(where), store, digest, () if key is None else (key.public,))
        attested += found
    if not attested:
        raise VerifyError("nothing was compared, so there is nothing to attest")
    return attested


def verifications(
    reports: Sequence[VerifyReport], bundle: Bundle, limits: Sequence[Limit] = ()
) -> Iterator[Verification]:
    """What the reports of one bundle say of each of its artifacts that ran here."""
    for entry in bundle.artifacts:
        ours = [report for report in reports if report.target == entry.target]
        compared = [report for report in ours if report.status != "could not run"]
        if not compared:
            continue
        wrong = [report for report in ours if report.status != "ok"]
        yield Verification(
            model=bundle.model,
            target=entry.target,
            artifact=entry.digest,
            passed=not wrong and all(limit.passed for limit in limits),
            created=datetime.now(UTC),
            aotc=aotc.__version__,
            environment=this_environment(entry.target.partition(":")[0]),
            compared=len(compared),
            buckets=tuple(dict.fromkeys(report.bucket for report in compared)),
            issues=tuple(_issue(report) for report in wrong[:ISSUES_LIMIT]),
            limits=tuple(limits),
            launches=next((report.launches for report in ours if report.launches), ()),
        )


def _issue(report: VerifyReport) -> Issue:
    first, *_ = report.detail.split("\n")
    return Issue(f"{report.status}: {first[:500]}", where=f"{report.bucket} at {report.sizes}")
