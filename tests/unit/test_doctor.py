"""`aotc doctor`: each check says ok, warn or fail, with both values and what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from click.testing import CliRunner
from doctoring import artifact_of, library_file
from processes import ZOO
from sample_artifacts import stored_artifact

from aotc import fetch
from aotc.cli import main
from aotc.errors import EnvironmentMismatchError, Issue
from aotc.machine import cpp_compiler
from aotc.machine.environment import this_environment
from aotc.machine.targets import CPU_FEATURES, best_cpu_target
from aotc.records import Environment, Parallel
from aotc.runtime.libraries import torch_abi
from aotc.store.files import anonymous as library_files
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.reference import parse_reference
from aotc.tools.doctor import bundle_checks

HERE = this_environment()
GPU = {"cuda_capability": "9.0", "cuda": "12.8"}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AOTC_TRUSTED_KEYS", "AOTC_SIGNED_AFTER", "AOTC_STORE", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "AOTC_CACHE_DIR", "DOCKER_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    (tmp_path / "home").mkdir()


def doctor(*arguments: object) -> tuple[int, dict[tuple[str, str], dict[str, str]]]:
    """The exit code, and the checks by part and name."""
    ran = CliRunner().invoke(main, ["doctor", *map(str, arguments), "--json"])
    assert ran.exception is None or isinstance(ran.exception, SystemExit), ran.exception
    checks = json.loads(ran.stdout)["checks"]
    assert all(check["hint"] for check in checks if check["status"] != "ok" and check["part"] != "manifest")
    return ran.exit_code, {(check["part"], check["name"]): check for check in checks}


@pytest.fixture
def tiny(tmp_path: Path, work: Path) -> Any:
    """Publishes `tiny:v1` with an artifact for each target, built in this environment but for some fields."""
    store = Store.create(tmp_path / "store")

    def publish_tiny(**targets: dict[str, Any]) -> str:
        artifacts = []
        for target, fields in targets.items():
            needs = {"cpu_features": CPU_FEATURES.get(target, ()), **fields}
            environment: Environment = msgspec.structs.replace(HERE, **needs)
            artifacts.append(stored_artifact(store, work, (1,), target=target, environment=environment))
        publish(store, "tiny", "v1", artifacts)
        return f"{store.path}#tiny:v1"

    return publish_tiny


# -- a bundle ---------------------------------------------------------------------------------------------------------


def test_a_bundle_that_loads_shows_every_rule_with_both_values_and_what_is_taken(tiny: Any) -> None:
    code, checks = doctor(tiny(**{"cpu:x86-64-v3": {}, "cuda:sm_90": GPU}))
    assert code == 0 and checks["bundle", "loads"]["found"] == "aotc.load takes cpu:x86-64-v3"
    torch = checks["artifact cpu:x86-64-v3", "torch"]
    assert (torch["needed"], torch["found"]) == (".".join(HERE.torch.split(".")[:2]), HERE.torch)
    assert checks["artifact cpu:x86-64-v3", "files"]["status"] == "ok"
    if not HERE.cuda_capability:
        gpu = checks["artifact cuda:sm_90", "GPU"]
        assert (gpu["status"], gpu["needed"], gpu["found"]) == ("warn", "9.0", "none")


def test_a_bundle_that_does_not_load_names_each_broken_rule_and_the_nearest_artifact(tiny: Any) -> None:
    code, checks = doctor(
        tiny(**{"cpu:x86-64-v3": {"libc": "9.99"}, "cpu:x86-64-v4": {"torch": "1.0.0", "libc": "9.99"}})
    )
    assert code == 1
    broken = {key for key, check in checks.items() if check["status"] == "fail"}
    assert broken >= {
        ("artifact cpu:x86-64-v3", "glibc"),
        ("artifact cpu:x86-64-v4", "glibc"),
        ("artifact cpu:x86-64-v4", "torch"),
    }
    loads = checks["bundle", "loads"]
    assert "cpu:x86-64-v3 comes nearest: glibc 9.99 or newer" in loads["found"]
    assert "build it for cpu:x86-64-v3 with torch" in loads["hint"]


def test_code_of_another_torch_is_checked_by_its_symbols_and_the_hint_keeps_its_target(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = tiny(**{"cpu:x86-64-v3": {"torch": "2.99.0", "libstdcxx": ()}})
    code, checks = doctor(ref)
    hint = checks["bundle", "loads"]["hint"]
    assert code == 1 and hint.startswith("build it for cpu:x86-64-v3 with torch") and "--compat abi" in hint

    monkeypatch.setattr(torch_abi, "check_symbols", lambda artifact, files_of: None)
    code, checks = doctor(ref, "--compat", "abi")
    assert code == 0 and checks["bundle", "loads"]["found"] == "aotc.load with compat='abi' takes cpu:x86-64-v3"

    def refuse(artifact: Any, files_of: Any) -> None:
        missing = tuple(Issue(f"calls `{name}`", expected=name) for name in ("aoti_a", "aoti_b"))
        raise EnvironmentMismatchError("no", issues=missing, hint="build it with the service's torch")

    monkeypatch.setattr(torch_abi, "check_symbols", refuse)
    ran = CliRunner().invoke(main, ["doctor", ref, "--compat", "abi"])
    assert ran.exit_code == 1 and "calls `aoti_a`" in ran.stdout and "calls `aoti_b`" in ran.stdout


def test_code_for_several_ranks_shows_how_many_gpus_there_are(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "store")
    needs = msgspec.structs.replace(HERE, cpu_features=CPU_FEATURES["cpu:x86-64-v3"])
    fields = {"target": "cpu:x86-64-v3", "environment": needs, "parallel": Parallel("tensor", 4)}
    publish(store, "tiny", "v1", [stored_artifact(store, work, (1,), **fields)])
    code, checks = doctor(f"{store.path}#tiny:v1")
    ranks = checks["artifact cpu:x86-64-v3", "ranks"]
    assert code == 0 and ranks["status"] == "ok" and ranks["needed"].startswith("4 ranks of tensor")

    for count, status in ((1, "warn"), (4, "ok")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        check = bundle_checks.ranks_of("artifact", Parallel("tensor", 4), "cuda:sm_90")
        assert check.status == status and check.found == f"{count} GPU{'s' if count > 1 else ''}"
        assert ("other 3 ranks" in check.hint) == (status == "warn")


def test_a_bundle_that_was_fetched_in_part_loads_what_is_there(tiny: Any, tmp_path: Path) -> None:
    tiny(**{"cpu:x86-64-v3": {}, "cpu:x86-64-v4": {}})
    source = f"file://{tmp_path / 'store'}#tiny:v1"
    reference = fetch(source, store=tmp_path / "part", target="cpu:x86-64-v3")
    code, checks = doctor(reference)
    assert code == 0 and checks["bundle", "loads"]["found"] == "aotc.load takes cpu:x86-64-v3"
    assert checks["artifact cpu:x86-64-v4", "record"]["status"] == "warn"


def test_what_is_missing_of_the_bundle_fails(tiny: Any, tmp_path: Path) -> None:
    reference = tiny(**{"cpu:x86-64-v3": {}})
    store = Store.open(tmp_path / "store")
    library = store.blobs.path(library_file(artifact_of(store, "tiny", "v1").variants[0]).blob)
    whole = library.read_bytes()
    library.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    for damage in ("is corrupt", "is not in the store"):
        code, checks = doctor(reference)
        files, loads = checks["artifact cpu:x86-64-v3", "files"], checks["bundle", "loads"]
        assert code == 1 and files["status"] == loads["status"] == "fail"
        assert files["found"].startswith("model.so: ") and damage in files["found"]
        library.unlink(missing_ok=True)
    code, checks = doctor(f"{store.path}#tiny:v2")
    assert code == 1 and "there is tiny:v1" in checks["bundle", "reference"]["hint"]


def test_where_keys_are_trusted_the_signature_is_checked_and_not_remembered(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from aotc.store.signing.keys import generate_key_pair, read_private_key
    from aotc.store.signing.release import sign_release

    private, public = generate_key_pair(tmp_path / "release", b"")
    monkeypatch.setenv("AOTC_TRUSTED_KEYS", str(public))
    reference = tiny(**{"cpu:x86-64-v3": {}})
    code, checks = doctor(reference)
    assert code == 1 and "aotc sign" in checks["bundle", "signature"]["hint"]
    sign_release(
        Store.open(tmp_path / "store"), parse_reference(reference), read_private_key(str(private), lambda: b"")
    )
    code, checks = doctor(reference)
    assert code == 0 and "trusted" in checks["bundle", "signature"]["found"]
    assert not (tmp_path / "home" / "trust-v1").exists()  # a load would have remembered it


# -- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path) -> None:
    code, checks = doctor("--store", tmp_path / "store")
    found = {name: check for (_, name), check in checks.items()}
    assert found["torch"]["found"].startswith(HERE.torch) and found["glibc"]["found"] == HERE.libc
    assert str(best_cpu_target(HERE.cpu_features)) in found["CPU"]["found"]
    assert found["memory for code"]["status"] == "ok"
    assert found["store"]["status"] == "warn" and "aotc build" in found["store"]["hint"]
    assert "AOTC_TRUSTED_KEYS" in found["trusted keys"]["hint"]
    assert code == any(check["status"] == "fail" for check in checks.values())


def test_a_torch_older_than_aotc_requires_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is that of aotc's own package."""
    needed = ["msgspec>=0.19", 'torchvision>=98; extra == "torch"', 'torch<100,>=99.1; extra == "torch"']
    monkeypatch.setattr("importlib.metadata.requires", lambda name: needed)
    code, checks = doctor()
    torch = checks["this machine", "torch"]
    assert code == 1 and (torch["needed"], torch["found"]) == ("99.1 or newer", HERE.torch)


def test_lines_for_a_person(tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["doctor", "--store", str(tmp_path / "store")]).stdout.splitlines()
    assert shown[0] == "this machine" and shown[-1].endswith(" fail")
    (store,) = [number for number, line in enumerate(shown) if line.split()[:2] == ["warn", "store"]]
    assert shown[store + 1].lstrip().startswith("hint: `aotc build` makes one")


def test_where_no_code_may_be_mapped_from_memory_a_file_is_used_or_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_files, "_memory_is_executable", lambda: False)
    _, checks = doctor()
    assert "a temporary file" in checks["this machine", "memory for code"]["found"]
    monkeypatch.setattr(library_files, "_is_executable", lambda descriptor: False)
    code, checks = doctor()
    failed = checks["this machine", "memory for code"]
    assert code == 1 and failed["status"] == "fail" and "TMPDIR" in failed["hint"]


@pytest.mark.parametrize(("works", "told"), [(False, "cannot be run"), (True, "compiles nothing")])
def test_a_compiler_that_is_missing_or_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, works: bool, told: str
) -> None:
    """To serve needs none; to build does."""
    compiler, manifest = tmp_path / "g++", tmp_path / "manifest.yaml"
    if works:
        compiler.write_text('#!/bin/sh\ntest "$1" = --version && echo fake 1 && exit 0\nexit 1\n')
        compiler.chmod(0o755)
    manifest.write_text("version: 1\nmodels: {}\n")
    monkeypatch.setenv("CXX", str(compiler))
    cpp_compiler.compiler_version.cache_clear()
    try:
        for arguments, status in (((), "warn"), ((manifest,), "fail")):
            check = doctor(*arguments)[1]["building", "C++ compiler"]
            assert check["status"] == status and told in check["found"] and "set CXX" in check["hint"]
    finally:
        cpp_compiler.compiler_version.cache_clear()


def test_files_of_credentials_are_named_without_what_is_in_them(tmp_path: Path) -> None:
    config = {"auths": {"registry.example.com": {"auth": "YnVpbGRlcjpzZWNyZXQ="}}, "credsStore": "not-installed"}
    (tmp_path / "home" / "config.json").write_text(json.dumps(config))
    (tmp_path / "home" / ".docker").mkdir()
    (tmp_path / "home" / ".docker" / "config.json").write_text("{")
    ran = CliRunner().invoke(main, ["doctor"])
    assert f"{tmp_path / 'home' / 'config.json'}: registry.example.com" in ran.stdout
    assert "docker-credential-not-installed is not on the PATH" in ran.stdout
    assert "config.json is not used" in ran.stdout
    assert "secret" not in ran.stdout and "YnVp" not in ran.stdout


def test_a_remote_store_is_asked_once(tiny: Any, tmp_path: Path) -> None:
    tiny(**{"cpu:x86-64-v3": {}})
    code, checks = doctor("--store", f"file://{tmp_path / 'store'}")
    assert checks["remotes", "store"]["status"] == "ok" and "tags: 1" in checks["remotes", "store"]["found"]
    pytest.importorskip("requests")
    code, checks = doctor("--store", "oci://127.0.0.1:9/team/tiny")  # the port `discard`, where nothing listens
    assert code == 1 and checks["remotes", "store"]["status"] == "fail"


def test_a_remote_without_its_library_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aotc.store.remote.registry.session", None)
    monkeypatch.setitem(sys.modules, "requests", None)
    monkeypatch.delitem(sys.modules, "aotc.store.remote.registry.session")
    code, checks = doctor("--store", "oci://127.0.0.1:9/team/tiny")
    assert code == 1 and "pip install 'aotc[oci]'" in checks["remotes", "store"]["hint"]


# -- a manifest -------------------------------------------------------------------------------------------------------

MANIFEST = """
version: 1
models:
  good:
    factory: things:make
    inputs: {input: {shape: [2, 3]}}
    targets: [TARGETS]
  bad:
    factory: missing_package.module:make
    inputs: {x: {shape: [2, 3]}}
"""


def test_a_manifest_that_can_be_built_here_in_part(tmp_path: Path) -> None:
    (tmp_path / "things.py").write_text("import torch\ndef make(): return torch.nn.Linear(3, 3)\n")
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text(MANIFEST.replace("TARGETS", "native, cuda:sm_12"))
    code, checks = doctor(manifest, "--store", tmp_path / "store")
    assert code == 1
    assert checks["model good", "factory"]["status"] == "ok"
    assert checks["model good", "inputs"]["found"].startswith("forward takes input; ")
    assert checks["model good", "target native"]["status"] == "ok"
    assert checks["model good", "target cuda:sm_12"]["status"] == "fail"  # older than any that torch supports
    assert "missing_package" in checks["model bad", "factory"]["found"]
    assert checks["building", "memory"]["needed"] and not (tmp_path / "store").exists()


STACKS = {
    # 5 linear layers of 72 floats
    "right": ("inputs: {x: {shape: [n, 8]}}", "inputs", "ok", "forward takes x; 1.4 KiB of weights; runs at n=2 in"),
    "name": ("inputs: {y: {shape: [n, 8]}}", "inputs", "fail", "Stack.forward needs `x`, and no input has that name"),
    "shape": ("inputs: {x: {shape: [n, 7]}}", "inputs", "fail", "the model itself fails at n=2: RuntimeError"),
    "regions": ("regions: [blocks.*, gates.*]", "regions", "ok", "blocks.0 (3 of its kind), gates.0 (2 of its kind)"),
    "none": ("regions: [block.*]", "regions", "fail", "the region `block.*` matches no submodule"),
    "list": ("regions: [blocks]", "regions", "fail", "the region `blocks` is not called"),
    "gpu": ("targets: [cuda]", "inputs", "ok", "forward takes x; not run"),
}
"""Of each model what its manifest adds, and a check with its status and a part of its text."""


def test_inputs_and_regions_are_held_against_the_model(tmp_path: Path) -> None:
    (tmp_path / "stack_to_check.py").write_text((ZOO / "region_models.py").read_text())
    manifest, models = tmp_path / "manifest.yaml", ""
    for model, (more, *_) in STACKS.items():
        inputs = "" if more.startswith("inputs") else "inputs: {x: {shape: [n, 8]}}, "
        models += f"  {model}: {{factory: 'stack_to_check.py:Stack', {inputs}{more}, buckets: [{{n: 4}}, {{n: 2}}]}}\n"
    manifest.write_text(f"version: 1\nmodels:\n{models}")
    with mock.patch.object(torch.cuda, "is_available", lambda: False):
        _, checks = doctor(manifest, "--store", tmp_path / "store")
    for model, (_, name, status, found) in STACKS.items():
        check = checks[f"model {model}", name]
        assert check["status"] == status and found in check["found"], check
    shape = checks["model shape", "inputs"]["found"]  # names the manifest's line and the model's
    line = next(n for n, text in enumerate(manifest.read_text().splitlines(), 1) if text.startswith("  shape:"))
    assert shape.startswith(f"{manifest}:{line}: ") and "stack_to_check.py:" in shape


def test_every_mistake_of_a_manifest_is_a_check(tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.yaml"
    manifest.write_text("version: 1\nmodels: {m: {factory: things}}\n")
    ran = CliRunner().invoke(main, ["doctor", str(manifest)])
    assert ran.exit_code == 1 and ran.stdout.count(f"{manifest}:2") > 1


def test_what_is_no_reference_cannot_be_checked() -> None:
    ran = CliRunner().invoke(main, ["doctor", "a b"])
    assert ran.exit_code == 2 and "hint:" in ran.stderr
