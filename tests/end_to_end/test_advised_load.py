"""Loads that refuse what an advisory is of, and what a build records for an audit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from doctoring import copy_store
from forked_python import forked_python

import aotc
from aotc.advisories import FEED_VERSION, Advisory, Affected, Concern, Feed, own_feed
from aotc.cli import main
from aotc.store.advisory_feed import publish_feed
from aotc.store.layout.built import read_built, read_report
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store.signing.keys import generate_key_pair, read_private_key
from aotc.tools.audit.audit import audit
from examples.models import transformer_block


@pytest.fixture
def store(quickstart_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    return copy_store(quickstart_store, tmp_path)


def module() -> torch.nn.Module:
    return transformer_block(width=256, heads=4).eval()


def of_softmax() -> Feed:
    """An advisory of a patch that this aotc does not have: that of a newer one."""
    concern = Concern("not_yet", "silent", operators=("aten.softmax", "aten._scaled_dot_product", "aten.scaled_dot"))
    affected = (Affected(database_specific=concern),)
    advisory = Advisory(id="AOTC-2030-0001", modified="2030-01-01T00:00:00Z", summary="Sums.", affected=affected)
    return Feed(FEED_VERSION, (advisory,))


@pytest.mark.parametrize("name", ["quickstart_store", "zoo_store", "regions_store", "training_store"])
def test_a_build_has_no_advisory_of_the_aotc_that_built_it(name: str, request: pytest.FixtureRequest) -> None:
    done = audit([str(request.getfixturevalue(name))], own_feed(), "")
    assert done.artifacts and (done.found, done.unread) == ((), [])


def test_a_report_has_the_operators_of_the_captured_and_of_the_lowered_graph(store: Store) -> None:
    (entry,) = read_bundle(store, parse_reference("quickstart")).artifacts
    for variant in read_built(store, entry).variants:
        report = read_report(store, variant)
        assert report is not None and report.operators is not None
        # F.linear and layer_norm are captured as they are called; Inductor lowers a product, and a mean as a sum.
        assert report.operators["aten.linear.default"] == ("float32",)
        assert {"aten.layer_norm.default", "aten.rsqrt.default"} <= report.operators.keys()
        assert {"aten.addmm.default", "aten.mm.default"} & report.operators.keys()
        assert list(report.operators) == sorted(report.operators)


@pytest.mark.parametrize("remote", [False, True])
def test_a_load_refuses_what_an_advisory_of_a_signed_list_is_of(store: Store, tmp_path: Path, remote: bool) -> None:
    private, public = generate_key_pair(tmp_path / "ci", b"")
    where = f"file://{store.path}" if remote else str(store.path)
    publish_feed(where, of_softmax(), read_private_key(str(private), lambda: b""))
    aotc.load(f"{where}#quickstart", module(), trust=aotc.Trust(advisories=True))  # by its own list
    with pytest.raises(aotc.SignatureError, match="no trusted keys are set"):
        aotc.load(f"{where}#quickstart", module(), trust=aotc.Trust(advisories=where))
    signed = CliRunner().invoke(main, ["sign", f"{store.path}#quickstart", "--key", str(private)])
    assert signed.exit_code == 0, signed.output
    with pytest.raises(aotc.AdvisoryError) as caught:
        aotc.load(f"{where}#quickstart", module(), trust=aotc.Trust(keys=[public], advisories=where))
    error = caught.value
    assert error.ids == ("AOTC-2030-0001",) and error.target.startswith("cpu:")
    assert error.digest == read_bundle(store, parse_reference("quickstart")).digest
    assert [issue.where for issue in error.issues] == ["batch=1,seq=128", "batch=4,seq=128"]
    assert error.issues[0].message == "AOTC-2030-0001 (silent) applies: Sums."
    assert "aotc audit" in error.hint and isinstance(error, aotc.StoreError)


def test_an_advised_load_imports_no_compiler(store: Store) -> None:
    ref = f"{store.path}#quickstart"
    code = f"""
import sys, aotc
from examples.models import transformer_block
module = transformer_block(width=256, heads=4).eval()
aotc.load({ref!r}, module, trust=aotc.Trust(advisories=True))
print(*sys.modules)
"""
    names = forked_python(code).split()
    banned = ("torch._inductor", "torch._dynamo", "sympy", "triton", "aotc.compiler", "aotc.tools")
    assert "aotc.advisories" in names and not [name for name in names if name.startswith(banned)]
