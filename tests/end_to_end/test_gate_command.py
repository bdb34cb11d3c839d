"""`aotc verify --gate` against the release before, with a report and an attestation."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from doctoring import artifact_of, copy_store
from in_process import run_here
from processes import ZOO

from aotc.provenance import BuiltArtifact
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.reference import parse_reference
from aotc.store.signing.attachments import reader_of
from aotc.store.signing.attestations import read_attestations
from aotc.tools.gate import releases

GATE = """
version: 1
numbers: {of_allowed: 100%}
latency: {worse: 300%}
startup: {load: 60, first_output: 300}
coverage: {trace: trace.jsonl, share: 90%}
"""


def test_a_release_is_compared_with_the_last_tag_and_its_limits_are_attested(
    zoo_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, least in (("STARTS", 1), ("ROUNDS", releases.LEAST_ROUNDS), ("SECONDS", 0.001)):
        monkeypatch.setattr(releases, name, least)
    store = copy_store(zoo_store, tmp_path)
    release: BuiltArtifact = msgspec.structs.replace(artifact_of(store, "linear"), aotc="another version")
    publish(store, "linear", "next", [release])
    (tmp_path / "gate.yaml").write_text(GATE)
    trace = [{"batch": 4, "count": 3}, {"batch": 3, "count": 1}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace))
    asked = ("--gate", tmp_path / "gate.yaml", "--report", tmp_path / "report.md", "--attest", "--json")
    ran = run_here("verify", "linear:next", "--store", store.path, "--seeds", "1", *asked, cwd=ZOO)
    assert ran.returncode == 1, ran.stderr  # for the coverage alone
    bundle = read_bundle(store, parse_reference("linear:next"))
    document = json.loads(ran.stdout)
    assert {report["status"] for report in document["reports"]} == {"ok"}
    limits = {one["name"]: one for one in document["limits"][bundle.digest]}
    assert [name for name, one in limits.items() if not one["passed"] and one.get("measured", True)] == [
        "coverage of trace.jsonl"
    ]
    assert limits["coverage of trace.jsonl"]["found"].startswith("75.00% of 4 calls")
    latencies = [one["found"] for name, one in limits.items() if name.endswith("against linear:latest")]
    assert len(latencies) == 2 and all("noise is" in found for found in latencies)
    assert "| coverage of trace.jsonl | at least 90.00% |" in (tmp_path / "report.md").read_text()
    ((attestation,), _) = read_attestations(reader_of(store), store.attachment, bundle.digest)
    assert not attestation.verification.passed
    assert {one.name for one in attestation.verification.limits} == limits.keys()
