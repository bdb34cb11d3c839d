"""SLSA provenance and SBOMs of builds: the specifications' forms, policies of a fetch, and what is shown of them."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from doctoring import copy_store
from in_process import run_here
from processes import ROOT
from remote_reading import QUICK
from signing import bundle_in, key_by_openssl, needs_openssl, private_key, signed
from test_attestations import LOCAL

from aotc.cli import main
from aotc.compiler.publish.supply_chain import UNKNOWN_BUILDER, attest_bundles, builder_id, packages_of
from aotc.errors import SignatureError, UnverifiedError
from aotc.store.layout.bundle import Bundle, read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference, parse_reference
from aotc.store.remote.fetching import fetch, of_targets
from aotc.store.remote.push import push
from aotc.store.signing.attachments import attached_name, reader_of
from aotc.store.signing.attestations import ATTESTATIONS, read_envelopes
from aotc.store.signing.build_statements import Requirement, parse_requirements, statements_of
from aotc.store.signing.keys import PrivateKey
from aotc.store.signing.trust import read_trust

BEGAN = datetime(2026, 11, 28, 12, tzinfo=UTC)
WORKFLOW = {
    "GITHUB_SERVER_URL": "https://github.com",
    "GITHUB_WORKFLOW_REF": "o/r/.github/workflows/b.yml@refs/heads/main",
}
BUILDER = "https://github.com/o/r/.github/workflows/b.yml@refs/heads/main"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[PrivateKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [private_key(key_by_openssl(folder, name, "-algorithm", "ed25519")[0]) for name in ("mine", "foreign")]


@pytest.fixture
def bundle(store: Store, work: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    for name in ("AOTC_BUILDER_ID", "CI_PROJECT_URL", "GITHUB_SHA", "GITHUB_REPOSITORY", "GITHUB_RUN_ID", "CI_JOB_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in WORKFLOW.items():
        monkeypatch.setenv(name, value)
    bundle_in(store, work)
    return read_bundle(store, LOCAL)


def attest(store: Store, bundle: Bundle, key: PrivateKey | None = None) -> list[str]:
    return list(attest_bundles(store, {bundle.model: bundle.digest}, BEGAN, key))


def payloads(store: Store, bundle: Bundle) -> dict[str, Any]:
    """The statements as any other reader finds them."""
    found = store.attachment(attached_name(bundle.digest, ATTESTATIONS))
    assert found is not None
    layers = read_envelopes(reader_of(store), found).layers
    texts = [json.loads(base64.b64decode(json.loads(layer.data)["payload"])) for layer in layers]
    assert [dict(layer.annotations)["predicateType"] for layer in layers] == [one["predicateType"] for one in texts]
    return {one["predicateType"]: one for one in texts}


def test_both_statements_are_about_the_bundle_in_the_forms_of_their_specifications(
    store: Store, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_REPOSITORY", "o/r")
    monkeypatch.setenv("GITHUB_SHA", "c" * 40)
    attest(store, bundle)
    statements = payloads(store, bundle)
    assert {*statements} == {"https://slsa.dev/provenance/v1", "https://cyclonedx.org/bom"}
    for one in statements.values():
        assert one["_type"] == "https://in-toto.io/Statement/v1"
        assert one["subject"] == [{"name": "tiny", "digest": {"sha256": bundle.digest[7:]}}]
    slsa = statements["https://slsa.dev/provenance/v1"]["predicate"]
    assert slsa["runDetails"]["builder"]["id"] == BUILDER
    assert slsa["runDetails"]["metadata"]["startedOn"] == "2026-11-28T12:00:00Z"
    source, *dependencies = slsa["buildDefinition"]["resolvedDependencies"]
    assert source == {"uri": f"git+https://github.com/o/r@{'c' * 40}", "digest": {"gitCommit": "c" * 40}}
    assert any(one["uri"].startswith("pkg:pypi/torch@") for one in dependencies)
    assert slsa["buildDefinition"]["externalParameters"]["targets"] == [bundle.artifacts[0].target]
    bom = statements["https://cyclonedx.org/bom"]["predicate"]
    assert (bom["bomFormat"], bom["specVersion"], bom["version"]) == ("CycloneDX", "1.6", 1)
    assert bom["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": bundle.digest[7:]}]
    refs = [one["bom-ref"] for one in bom["components"]]
    assert len(set(refs)) == len(refs) and refs == bom["dependencies"][0]["dependsOn"]
    assert {one["type"] for one in bom["components"]} == {"library", "file"}


def test_packages_are_those_that_take_part_and_all_that_they_require() -> None:
    found = {name: (version, purl) for name, version, purl in packages_of([{"factory": "click:Command"}])}
    assert {"torch", "sympy", "filelock", "click"} <= {*found} and "pytest" not in found
    assert "+" not in found["torch"][1] and found["click"][1] == f"pkg:pypi/click@{found['click'][0]}"


@pytest.mark.parametrize(
    ("variables", "builder"),
    [
        (WORKFLOW, BUILDER),
        ({"CI_PROJECT_URL": "https://gitlab.com/o/r"}, "https://gitlab.com/o/r//.gitlab-ci.yml"),
        ({**WORKFLOW, "AOTC_BUILDER_ID": "https://builds.example/1"}, "https://builds.example/1"),
        ({}, UNKNOWN_BUILDER),
    ],
)
def test_the_builder_is_what_ci_says(variables: dict[str, str], builder: str) -> None:
    assert builder_id(variables) == builder


@needs_openssl
def test_what_was_not_built_anew_is_attested_once(store: Store, bundle: Bundle, keys: Sequence[PrivateKey]) -> None:
    mine, _ = keys
    assert [attest(store, bundle, mine), attest(store, bundle, mine), attest(store, bundle)] == [["tiny"], [], []]
    assert len(list(statements_of(store, bundle.digest))) == 2


# -- policies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(store: Store, tmp_path: Path) -> Reference:
    return parse_reference(f"{Store.create(tmp_path / 'remote').path.as_uri()}#tiny")


@needs_openssl
@pytest.mark.parametrize("required", ["provenance", "sbom", "provenance,sbom", f"provenance={BUILDER},sbom"])
def test_a_fetch_takes_a_bundle_whose_statements_a_trusted_key_signed(
    store: Store,
    bundle: Bundle,
    there: Reference,
    keys: Sequence[PrivateKey],
    required: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, _ = keys
    monkeypatch.setenv("AOTC_REQUIRE", required)
    signed(store, bundle.digest, mine)
    attest(store, bundle, mine)
    push(store, LOCAL, there, limits=QUICK)
    fetch(there, tmp_path / "copy", of_targets(), trust=read_trust([mine.public.pem]), limits=QUICK)
    assert {one.kind for one in statements_of(Store.open(tmp_path / "copy"), bundle.digest)} == {"provenance", "sbom"}


@needs_openssl
@pytest.mark.parametrize(
    ("by", "required", "reason"),
    [
        (None, "sbom", "unverified"),
        ("nobody", "provenance", "untrusted"),
        ("foreign", "sbom", "untrusted"),
        ("mine", "provenance=https://elsewhere", "untrusted"),
    ],
)
def test_a_fetch_refuses_what_a_policy_asks_for_and_is_not_there(
    store: Store,
    bundle: Bundle,
    there: Reference,
    keys: Sequence[PrivateKey],
    by: str | None,
    required: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, foreign = keys
    signed(store, bundle.digest, mine)
    if by is not None:
        attest(store, bundle, {"mine": mine, "foreign": foreign}.get(by))
    push(store, LOCAL, there, limits=QUICK)
    monkeypatch.setenv("AOTC_REQUIRE", required)
    with pytest.raises(UnverifiedError) as caught:
        fetch(there, tmp_path / "copy", of_targets(), trust=read_trust([mine.public.pem]), limits=QUICK)
    assert caught.value.reason == reason and caught.value.digest == bundle.digest
    assert not (tmp_path / "copy").exists(), "nothing was written"


def test_a_policy_is_a_list_of_known_statements_and_needs_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_requirements("provenance=https://b/1, sbom") == (
        Requirement("provenance", "https://b/1"),
        Requirement("sbom"),
    )
    for wrong in ("spdx", "sbom=x"):
        with pytest.raises(SignatureError, match="AOTC_REQUIRE"):
            parse_requirements(wrong)
    monkeypatch.delenv("AOTC_TRUSTED_KEYS", raising=False)
    monkeypatch.setenv("AOTC_REQUIRE", "sbom")
    with pytest.raises(SignatureError, match="no trusted keys"):
        read_trust()


@needs_openssl
def test_a_build_attests_and_inspect_shows_both_and_who_signed(
    quickstart_store: Path, keys: Sequence[PrivateKey], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what the store has already: nothing is compiled."""
    store = copy_store(quickstart_store, tmp_path).path
    private, public = key_by_openssl(tmp_path, "ci")
    build = ("build", ROOT / "manifests" / "quickstart.yaml", "--store", store)
    ran = run_here(*build, "--attest", "--sign", private)
    assert ran.returncode == 0 and "attested quickstart: provenance and SBOM, signed by" in ran.stderr, ran.stderr
    again = run_here(*build, "--attest", "--sign", private)
    assert again.returncode == 0 and "attested" not in again.stderr
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(public))
    shown = CliRunner().invoke(main, ["inspect", f"{store}#quickstart"])
    key = private_key(private).public.fingerprint
    assert f"built by {UNKNOWN_BUILDER}, signed by {key}" in shown.output, shown.output
    assert f"components, signed by {key}" in shown.output
    stated = json.loads(CliRunner().invoke(main, ["inspect", f"{store}#quickstart", "--json"]).stdout)["statements"]
    assert {one["kind"]: one["key"] for one in stated} == {"provenance": key, "sbom": key}


@pytest.mark.parametrize("wrong", [["--sign", "k"], ["--attest", "--dry-run"], ["--attest", "--shard", "1/2"]])
def test_attest_goes_with_a_build_that_publishes(wrong: list[str]) -> None:
    ran = CliRunner().invoke(main, ["build", str(ROOT / "manifests" / "quickstart.yaml"), *wrong])
    assert ran.exit_code == 2 and "--attest" in ran.output
