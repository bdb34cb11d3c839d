"""Signing and loading as people do it: the commands, `aotc.load`, and nothing of a refused bundle on this host."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from doctoring import copy_store
from forked_python import forked_python
from in_process import run_here
from safetensors.torch import save_file

import aotc
from aotc.cli import main
from aotc.machine.environment import this_environment
from aotc.runtime.libraries.files import FilesInMemory
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.store.signing.attestations import attest
from aotc.store.signing.keys import read_private_key
from aotc.store.signing.signatures import signatures_of
from aotc.verification import Verification
from examples.models import transformer_block


@pytest.fixture
def store(quickstart_store: Path, tmp_path: Path) -> Store:
    return copy_store(quickstart_store, tmp_path)


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COSIGN_PASSWORD", "a password")
    return tmp_path / "cache"


@pytest.fixture
def key(cache_folder: Path, tmp_path: Path) -> Path:
    assert command("sign", "--generate-key-pair", tmp_path / "ci").exit_code == 0
    return tmp_path / "ci.key"


def command(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def module() -> torch.nn.Module:
    return transformer_block(width=256, heads=4).eval()


def test_a_signed_bundle_loads_and_answers_right(store: Store, key: Path, cache_folder: Path) -> None:
    signed = command("sign", "quickstart", "--store", store.path, "--key", key, "--expires", "30d", "--json")
    assert signed.exit_code == 0, signed.output
    digest = read_bundle(store, parse_reference("quickstart")).digest
    assert [one["digest"] for one in json.loads(signed.stdout)["signatures"]] == [digest]
    eager = module()
    compiled = aotc.load("quickstart", eager, store=store.path, trust=aotc.Trust(keys=[key.with_suffix(".pub")]))
    x = torch.randn(4, 128, 256)
    with torch.no_grad():
        assert torch.allclose(compiled(x), eager(x), atol=1e-5)
    assert [path.suffix for path in (cache_folder / "trust-v1").iterdir() if path.suffix == ".json"] == [".json"]


def test_of_an_unsigned_bundle_nothing_is_written_or_read_into_memory(
    store: Store, key: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(key.with_suffix(".pub")))
    monkeypatch.setattr(FilesInMemory, "__init__", lambda *_, **__: pytest.fail("a library is read"))
    with pytest.raises(aotc.SignatureError) as caught:
        aotc.load("quickstart", module(), store=store.path)
    assert caught.value.reason == "unsigned"
    assert isinstance(caught.value, aotc.StoreError)
    assert not cache_folder.exists()


def test_a_bundle_signed_before_the_time_asked_for_is_refused(store: Store, key: Path) -> None:
    command("sign", "quickstart", "--store", store.path, "--key", key)
    public = key.with_suffix(".pub").read_text()
    with pytest.raises(aotc.SignatureError) as caught:
        aotc.load(
            "quickstart", module(), store=store.path, trust=aotc.Trust(keys=public, signed_after="2100-01-01T00:00:00Z")
        )
    assert caught.value.reason == "too-old"


def test_a_service_that_checks_signatures_imports_no_compiler(store: Store, key: Path) -> None:
    command("sign", "quickstart", "--store", store.path, "--key", key)
    code = (
        "import sys, aotc\n"
        "assert not [name for name in sys.modules if name.startswith(('cryptography', 'nacl'))]\n"
        "from examples.models import transformer_block\n"
        "aotc.load('quickstart', transformer_block(width=256, heads=4).eval(), store=sys.argv[1])\n"
        "assert 'cryptography' in sys.modules and 'nacl' not in sys.modules\n"
        "print(*[n for n in sys.modules if n.startswith(('torch._dynamo', 'torch._inductor', 'triton', 'sympy'))])"
    )
    assert forked_python(code, store.path, AOTC_TRUSTED_KEYS=str(key.with_suffix(".pub"))).split() == []


def test_verify_imports_no_factory_that_an_unsigned_record_names(store: Store, key: Path) -> None:
    public = key.with_suffix(".pub")
    ran = run_here("verify", "quickstart", "--store", store.path, "--key", public)
    assert (ran.returncode, "is not signed" in ran.stderr) == (2, True), ran.stderr
    command("sign", "quickstart", "--store", store.path, "--key", key)
    attesting = ("--seeds", "1", "--attest", "--sign", key)
    ran = run_here("verify", "quickstart", "--store", store.path, "--key", public, *attesting)
    assert ran.returncode == 0, ran.stderr
    assert "attested quickstart for cpu:" in ran.stderr and "passed, signed by sha256:" in ran.stderr
    aotc.load("quickstart", module(), store=store.path, trust=aotc.Trust(keys=[public], require_verified=True))


def test_inspect_shows_who_signed(store: Store, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\n  signed" not in command("inspect", "quickstart", "--store", store.path).output
    command("sign", "quickstart", "--store", store.path, "--key", key)
    assert "by none of AOTC_TRUSTED_KEYS" in command("inspect", "quickstart", "--store", store.path).output
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(key.with_suffix(".pub")))
    shown = json.loads(command("inspect", "quickstart", "--store", store.path, "--json").stdout)["signatures"]
    assert [(one["claims"]["name"], one["flaw"]) for one in shown] == [("quickstart:latest", "")]
    assert shown[0]["key"].startswith("sha256:")


def test_a_digest_is_signed_for_the_names_that_are_given(store: Store, key: Path) -> None:
    """What CI does: it signs what it built, whatever the tag names by now."""
    digest = read_bundle(store, parse_reference("quickstart")).digest
    signed = command(
        *("sign", f"quickstart@{digest}", "--store", store.path, "--key", key),
        *("--as", "quickstart:latest", "--as", "registry.example/ml/quickstart:v1"),
    )
    assert signed.exit_code == 0 and signed.stdout.count(digest) == 2
    aotc.load("quickstart", module(), store=store.path, trust=aotc.Trust(keys=[key.with_suffix(".pub")]))


def test_what_cannot_be_signed_says_why(
    store: Store, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("sign", "quickstart", "--store", store.path).exit_code == 2
    missing = command("sign", "quickstart", "--store", store.path, "--key", tmp_path / "none.key")
    assert (missing.exit_code, "cannot read the key" in missing.stderr) == (2, True)
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    wrong = command("sign", "quickstart", "--store", store.path, "--key", key)
    assert (wrong.exit_code, "cannot be decrypted" in wrong.stderr) == (2, True)
    monkeypatch.delenv("COSIGN_PASSWORD")
    nobody = command("sign", "quickstart", "--store", store.path, "--key", key)
    assert (nobody.exit_code, "set COSIGN_PASSWORD" in nobody.stderr) == (2, True)
    assert signatures_of(store, read_bundle(store, parse_reference("quickstart")).digest) is None


def test_a_load_that_requires_it_takes_only_what_has_passed_verify(store: Store, key: Path, tmp_path: Path) -> None:
    """In a local store and from a remote, without keys and with them; no compiler is imported for it."""
    bundle = read_bundle(store, parse_reference("quickstart"))
    with pytest.raises(aotc.UnverifiedError) as caught:
        aotc.load("quickstart", module(), store=store.path, trust=aotc.Trust(require_verified=True))
    assert (caught.value.reason, caught.value.target) == ("unverified", bundle.artifacts[0].target)
    fields = {"target": bundle.artifacts[0].target, "artifact": bundle.artifacts[0].digest, "aotc": aotc.__version__}
    passed = Verification(
        "quickstart", **fields, passed=True, created=datetime.now(UTC), environment=this_environment()
    )
    attest(store, bundle, passed)
    aotc.load("quickstart", module(), store=store.path, trust=aotc.Trust(require_verified=True))
    remote = f"{store.path.as_uri()}#quickstart"
    aotc.load(remote, module(), cache=tmp_path / "fetched", trust=aotc.Trust(require_verified=True))
    command("sign", "quickstart", "--store", store.path, "--key", key)
    trusted = aotc.Trust(keys=[key.with_suffix(".pub")], require_verified=True)
    with pytest.raises(aotc.UnverifiedError) as caught:
        aotc.load("quickstart", module(), store=store.path, trust=trusted)
    assert caught.value.reason == "untrusted"
    attest(store, bundle, passed, read_private_key(str(key), lambda: b"a password"))
    aotc.load("quickstart", module(), store=store.path, trust=trusted)
    aotc.load(remote, module(), cache=tmp_path / "fetched", trust=trusted)


def test_an_export_asks_for_a_trusted_signature_as_a_load_does(
    store: Store, key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks for it later: the program that opens what was exported has no aotc."""
    save_file(module().state_dict(), tmp_path / "model.safetensors")
    exporting = ["export", "quickstart", "--store", store.path, "--weights", tmp_path / "model.safetensors"]
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(key.with_suffix(".pub")))
    refused = command(*exporting, "--standalone", tmp_path / "model")
    assert refused.exit_code == 2 and "sign" in refused.output and not (tmp_path / "model").exists()
    assert command("sign", "quickstart", "--store", store.path, "--key", key).exit_code == 0
    assert command(*exporting, "--standalone", tmp_path / "model").exit_code == 0
    assert (tmp_path / "model" / "libaotc.so").exists()
