"""Code that has not run where it was built: a load refuses it, until `aotc verify --attest` has run it.

Code for a GPU that the building machine lacks is such code. Here a CPU's is marked so; to a load that is the same.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from doctoring import artifact_of, copy_store, publish_changed
from processes import ROOT

import aotc
from aotc.cli import main
from aotc.records import Artifact, LaunchPick
from aotc.runtime.attested import attested
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store.signing.attestations import Attestation
from aotc.verify.attesting import verifications
from aotc.verify.verdicts import VerifyReport
from examples.models import transformer_block

REF = "quickstart:untested"


def untested(artifact: Artifact) -> Artifact:
    variants = tuple(msgspec.structs.replace(variant, untested=True) for variant in artifact.variants)
    return msgspec.structs.replace(artifact, variants=variants)


@pytest.fixture
def store(quickstart_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store whose `quickstart:untested` has never run."""
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    copied = copy_store(quickstart_store, tmp_path)
    publish_changed(copied, "quickstart", untested, "untested")
    return copied


def load(store: Store, **options: bool) -> torch.nn.Module:
    return aotc.load(f"{store.path}#{REF}", transformer_block(width=256, heads=4).eval(), **options)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_it_is_refused_unless_that_is_allowed_or_verify_has_attested_it(store: Store) -> None:
    with pytest.raises(aotc.UnverifiedError, match="has not run") as refused:
        load(store)
    assert refused.value.reason == "unverified"
    assert "aotc verify" in refused.value.hint and "allow_untested=True" in refused.value.hint
    compiled, x = load(store, trust=aotc.Trust(allow_untested=True)), torch.randn(4, 128, 256)
    with torch.no_grad():
        assert torch.allclose(compiled(x), compiled.module(x), atol=1e-4)
    with pytest.raises(aotc.UnverifiedError):
        load(store, trust=aotc.Trust(allow_untested=True, require_verified=True))
    assert "never run" in run("inspect", REF, "--store", str(store.path))
    package = ["export", REF, "--pt2", str(store.path / "model.pt2"), "--store", str(store.path)]
    assert CliRunner().invoke(main, package).exit_code == 2

    before = read_bundle(store, parse_reference(REF))
    run("verify", REF, "--store", str(store.path), "--seeds", "1", "--attest")
    assert read_bundle(store, parse_reference(REF)) == before
    load(store)
    run(*package)
    assert "passed `aotc verify`" in run("inspect", REF, "--store", str(store.path))


def test_it_is_launched_as_verify_has_measured(store: Store) -> None:
    """On a GPU; the worker gives the launches with its last report."""
    bundle, artifact = read_bundle(store, parse_reference(REF)), artifact_of(store, "quickstart", "untested")
    launches = (LaunchPick(graph=True, direct_ms=2.0, graph_ms=1.0, reason="measured"), None)
    report = VerifyReport("quickstart", "batch=1", artifact.target, "batch=1", "ok", launches=launches)
    (verification,) = verifications([report], bundle)
    attestation = Attestation(bundle.digest, verification)
    given = attested(artifact, lambda: attestation)
    assert [variant.launch for variant in given.variants] == [launches[0], artifact.variants[1].launch]
    tested = artifact_of(store, "quickstart")
    assert attested(tested, lambda: attestation) == tested  # by its own smoke run
