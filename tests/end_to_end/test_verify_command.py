"""`aotc verify`: right code passes; a wrong artifact, wrong weights and a crash are each found and named."""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner
from doctoring import (
    artifact_of,
    crashing,
    library_bytes,
    publish_changed,
    replace_variant,
    with_library,
)
from in_process import run_here
from processes import ZOO, finish, start, wait_until_none_names

from aotc.cli import main
from aotc.errors import CorruptError, VerifyError
from aotc.records import Argument, Artifact, File
from aotc.store.layout.store import Store
from aotc.verify.run import verify_reference

MANIFEST = ZOO / "manifest.yaml"
WAITING = """
import sys, time
import torch

def make():
    print("waiting", file=sys.stderr, flush=True)
    time.sleep(60)

def ones_but_for_batch_4(shape, dtype, generator):
    return make() if shape[0] == 4 else torch.ones(shape, dtype=dtype)
"""


def verify(store: Path, *arguments: object, tmp_path: Path, cwd: Path = ZOO) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the reports. The command runs in this process; what it verifies, in a fresh one as always."""
    runner = CliRunner(env={"AOTC_CACHE_DIR": str(tmp_path / "cache")})
    with contextlib.chdir(cwd):
        result = runner.invoke(main, ["verify", *map(str, arguments), "--store", str(store), "--json"])
    assert result.stdout, result.stderr
    return result.exit_code, json.loads(result.stdout)


def own_cache(folder: Path) -> dict[str, str]:
    return {"AOTC_CACHE_DIR": str(folder / "cache")}


def interrupt_when_it_waits(command: subprocess.Popen[str], number: signal.Signals) -> subprocess.CompletedProcess[str]:
    assert command.stderr is not None
    assert any("waiting" in line for line in command.stderr)
    command.send_signal(number)
    ran = finish(command)
    assert ran.returncode == 128 + number, ran.stderr
    return ran


def with_patched_library(store: Store, artifact: Artifact, index: int, old: bytes, new: bytes) -> Artifact:
    variant = artifact.variants[index]
    library = library_bytes(store, variant)
    assert old in library
    return replace_variant(artifact, index, with_library(store, variant, library.replace(old, new)))


def with_patched_weights(store: Store, artifact: Artifact, old: bytes, new: bytes) -> Artifact:
    (variant,) = artifact.variants
    (file,) = (file for file in variant.files if file.mapped and old in store.blobs.load(file, 1 << 20))
    blob = store.blobs.put_bytes(store.blobs.load(file, 1 << 20).replace(old, new))
    others = [other for other in variant.files if other is not file]
    changed = File(name=file.name, digest=blob.digest, size=blob.size, blob=blob.digest, blob_size=blob.size)
    return replace_variant(artifact, 0, msgspec.structs.replace(variant, files=(*others, changed)))


# -- what is right ----------------------------------------------------------------------------------------------------


def test_right_code_passes_at_every_bucket(zoo_store: Path, tmp_path: Path) -> None:
    models = ("linear", "pooled", "stepped", "semantics", "frozen")
    selected = [part for model in models for part in ("--model", model)]
    code, reports = verify(zoo_store, MANIFEST, *selected, "--seeds", "2", tmp_path=tmp_path, cwd=tmp_path)
    assert code == 0
    assert {report["status"] for report in reports} == {"ok"}
    digests = {entry.model: entry.digest for entry in Store.open(zoo_store).tags()}
    assert {(r["model"], r["bundle"]) for r in reports} == {(model, digests[model]) for model in models}
    assert [r["bucket"] for r in reports if r["model"] == "linear"] == ["batch=2", "batch=4"]
    assert {r["sizes"] for r in reports if r["model"] == "pooled"} >= {
        "batch=4,seq=16",
        "batch=4,seq=15",
        "batch=1,seq=1",
    }
    assert {r["sizes"] for r in reports if r["model"] == "stepped"} >= {
        "batch=4,seq=8",
        "batch=4,seq=31",
        "batch=3,seq=8",
        "batch=4,seq=1",
    }
    assert all(report["error"] <= report["allowed"] for report in reports if report["allowed"])


def test_a_reference_is_verified_with_the_factory_of_its_record(zoo_store: Path, tmp_path: Path) -> None:
    ran = run_here(
        "verify", "linear", "--store", zoo_store, "--seeds", "1", cwd=ZOO, AOTC_CACHE_DIR=str(tmp_path / "cache")
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    header, *rows = ran.stdout.splitlines()
    assert header.split() == ["model", "bucket", "target", "sizes", "error", "eager's", "allowed", "result"]
    assert [row.split()[0] + row.split()[-1] for row in rows] == ["linearok", "linearok"]


def test_a_terminal_is_shown_how_far_it_is(zoo_store: Path, tmp_path: Path) -> None:
    shown = {"AOTC_CACHE_DIR": str(tmp_path / "cache"), "FORCE_COLOR": "1", "COLUMNS": "200"}
    ran = run_here("verify", "linear", "--store", zoo_store, "--seeds", "1", cwd=ZOO, **shown)
    assert ran.returncode == 0, ran.stderr
    assert "2 sizes verified; linear batch=4" in ran.stderr


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_padding_that_leaks_into_the_result_is_found_at_the_padded_sizes(zoo_store: Path, tmp_path: Path) -> None:
    code, reports = verify(zoo_store, "leaky", "--seeds", "1", tmp_path=tmp_path)
    assert code == 1
    by_size = {report["sizes"]: report["status"] for report in reports}
    assert by_size.pop("seq=16") == "ok"
    assert len(by_size) >= 3 and set(by_size.values()) == {"failed"}
    wrong = next(report for report in reports if report["sizes"] == "seq=15")
    assert wrong["error"] > wrong["allowed"]
    assert "rms error" in wrong["detail"] and "allowed" in wrong["detail"]


def test_corrupted_arithmetic_is_found(copied: Store, tmp_path: Path) -> None:
    """The number that masks attention out, -1e9, becomes 0: only calls with something masked come out wrong."""
    publish_changed(
        copied,
        "pooled",
        lambda artifact: with_patched_library(copied, artifact, 0, struct.pack("<f", -1e9), struct.pack("<f", 0.0)),
        "corrupt",
    )
    code, reports = verify(copied.path, "pooled:corrupt", "--seeds", "1", tmp_path=tmp_path)
    assert code == 1
    assert {report["status"] for report in reports} == {"ok", "failed"}
    assert next(report["status"] for report in reports if report["sizes"] == "batch=4,seq=15") == "failed"


def test_weights_that_are_attached_in_each_other_s_place_are_found(copied: Store, tmp_path: Path) -> None:
    def swap(artifact: Artifact) -> Artifact:
        names = {"norm.weight": "norm.bias", "norm.bias": "norm.weight"}
        (variant,) = artifact.variants
        arguments = tuple(
            Argument(state=names.get(a.state, a.state)) if a.state is not None else a for a in variant.arguments
        )
        assert arguments != variant.arguments
        return replace_variant(artifact, 0, msgspec.structs.replace(variant, arguments=arguments))

    publish_changed(copied, "ranged", swap, "swapped")
    code, reports = verify(copied.path, "ranged:swapped", "--seeds", "1", tmp_path=tmp_path)
    assert code == 1
    assert {report["status"] for report in reports} == {"failed"}


def test_frozen_weights_that_are_not_the_record_s_are_found(copied: Store, tmp_path: Path, zoo: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        bias = zoo.Linear(width=64).linear.bias.detach()
    old = struct.pack("<4f", *bias[:4].tolist())
    new = struct.pack("<4f", *(bias[:4] + 0.01).tolist())
    publish_changed(copied, "frozen", lambda artifact: with_patched_weights(copied, artifact, old, new), "other")
    code, reports = verify(copied.path, "frozen:other", "--seeds", "1", tmp_path=tmp_path)
    assert code == 1
    assert {report["status"] for report in reports} == {"failed"}


def test_nan_never_passes(copied: Store, tmp_path: Path) -> None:
    publish_changed(
        copied,
        "pooled",
        lambda artifact: with_patched_library(
            copied, artifact, 0, struct.pack("<f", -1e9), struct.pack("<f", float("nan"))
        ),
        "nan",
    )
    code, reports = verify(copied.path, "pooled:nan", "--seeds", "1", tmp_path=tmp_path)
    assert code == 1
    assert any("NaN" in report["detail"] for report in reports if report["status"] == "failed")


# -- what crashes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
def test_a_library_that_crashes_is_named_and_the_other_buckets_are_still_verified(
    copied: Store, tmp_path: Path, index: int
) -> None:
    def crash(artifact: Artifact) -> Artifact:
        variant = artifact.variants[index]
        return replace_variant(artifact, index, with_library(copied, variant, crashing(library_bytes(copied, variant))))

    publish_changed(copied, "linear", crash, "crashing")
    code, reports = verify(copied.path, "linear:crashing", "--seeds", "1", tmp_path=tmp_path)
    assert code == 1
    statuses = ["ok", "ok"]
    statuses[index] = "crashed"
    assert [(r["bucket"], r["sizes"], r["status"]) for r in reports] == [
        ("batch=2", "batch=2", statuses[0]),
        ("batch=4", "batch=4", statuses[1]),
    ]
    assert "was killed by SIGSEGV while it ran this bucket" in reports[index]["detail"]


# -- what cannot run --------------------------------------------------------------------------------------------------


def test_an_artifact_that_cannot_be_loaded_is_no_verdict(copied: Store, tmp_path: Path) -> None:
    def older(artifact: Artifact) -> Artifact:
        needs = msgspec.structs.replace(artifact.environment, torch="1.13.0")
        return msgspec.structs.replace(artifact, environment=needs)

    publish_changed(copied, "linear", older, "older")
    code, reports = verify(copied.path, "linear:older", "--seeds", "1", tmp_path=tmp_path)
    assert code == 2
    assert [report["status"] for report in reports] == ["could not run"]
    assert "built with torch 1.13.0, this process has torch" in reports[0]["detail"]


def test_with_compat_abi_code_of_another_torch_minor_is_verified(copied: Store, tmp_path: Path) -> None:
    def older(artifact: Artifact) -> Artifact:
        needs = msgspec.structs.replace(artifact.environment, torch="2.10.0")
        return msgspec.structs.replace(artifact, environment=needs)

    publish_changed(copied, "linear", older, "minor")
    code, reports = verify(copied.path, "linear:minor", "--seeds", "1", tmp_path=tmp_path)
    assert code == 2 and "--compat abi" in reports[0]["detail"]
    code, reports = verify(copied.path, "linear:minor", "--seeds", "1", "--compat", "abi", tmp_path=tmp_path)
    assert code == 0 and {report["status"] for report in reports} == {"ok"}
    for option in (["--attest"], ["--bisect"], ["--gate", "gate.yaml"]):
        ran = CliRunner().invoke(main, ["verify", "linear:minor", "--compat", "abi", *option])
        assert ran.exit_code == 2 and "need the torch minor of the build" in ran.output


def test_a_model_whose_source_changed_since_the_build_is_no_verdict(zoo_store: Path, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text((ZOO / "models.py").read_text() + "\nCHANGED = True\n")
    ran = run_here(
        "verify", "linear", "--store", zoo_store, "--seeds", "1", cwd=tmp_path, PYTHONPATH=str(ZOO.parents[1])
    )
    assert ran.returncode == 2
    assert "the source of class Linear changed since the build" in ran.stderr
    assert "build it again with `aotc build`" in ran.stderr and "aotc.load" not in ran.stderr


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no-such-model", "no-such-model:latest is not in the store"),
        ("linear:no-such-tag", "linear:no-such-tag is not in the store"),
        ("a b", "is not a model name"),
        ("a" * 5000, "is not a model name"),
        ("missing.yaml", "there is no such file"),
    ],
)
def test_what_is_not_there_cannot_be_verified(zoo_store: Path, what: str, message: str) -> None:
    ran = run_here("verify", what, "--store", zoo_store, cwd=ZOO)
    assert ran.returncode == 2
    assert message in ran.stderr and "Traceback" not in ran.stderr


def test_a_working_folder_whose_name_is_not_utf8_is_told(zoo_store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    ran = run_here("verify", "linear", "--store", zoo_store, cwd=folder)
    assert ran.returncode == 2
    assert r"caf\udce9' is not UTF-8" in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.parametrize("name", ["models.yml", "models.json", "models"])
def test_a_manifest_may_have_any_name(zoo_store: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "models.py").write_text((ZOO / "models.py").read_text())
    (tmp_path / name).write_text(MANIFEST.read_text())
    code, reports = verify(zoo_store, name, "--model", "older-cpu", "--tag", "none", tmp_path=tmp_path, cwd=tmp_path)
    assert code == 2
    (report,) = reports
    assert report["model"] == "older-cpu" and "older-cpu:none is not in the store" in report["detail"]


def test_a_model_of_the_manifest_that_was_not_built_keeps_no_other_from_being_verified(
    zoo_store: Path, tmp_path: Path
) -> None:
    more = "models:\n  not-built: {factory: models.py:Linear, inputs: {x: {shape: [2, 8]}}}\n"
    (tmp_path / "models.py").write_text((ZOO / "models.py").read_text())
    (tmp_path / "manifest.yaml").write_text(MANIFEST.read_text().replace("models:\n", more, 1))
    arguments = ("manifest.yaml", "--model", "not-built", "--model", "linear", "--seeds", "1")
    code, reports = verify(zoo_store, *arguments, tmp_path=tmp_path, cwd=tmp_path)
    assert code == 2
    status = {report["model"]: report["status"] for report in reports}
    assert status == {"not-built": "could not run", "linear": "ok"}
    assert "not-built:latest is not in the store" in reports[0]["detail"]


@pytest.mark.parametrize("change", [{"target": "cpu:z80"}, {"manifest": {"name": 1}}], ids=["target", "record"])
def test_a_model_that_cannot_run_here_keeps_no_other_from_being_verified(
    copied: Store, tmp_path: Path, change: dict[str, Any]
) -> None:
    publish_changed(copied, "pooled", lambda artifact: msgspec.structs.replace(artifact, **change))
    code, reports = verify(copied.path, MANIFEST, "--model", "linear", "--model", "pooled", tmp_path=tmp_path)
    assert code == 2
    status = {report["model"]: report["status"] for report in reports}
    assert status == {"linear": "ok", "pooled": "could not run"}


def test_what_a_model_s_own_code_raises_is_told_and_keeps_no_other_from_being_verified(
    copied: Store, tmp_path: Path
) -> None:
    for name in ("manifest.yaml", "models.py"):
        (tmp_path / name).write_text((ZOO / name).read_text())
    (tmp_path / "failing.py").write_text("def ones(shape, dtype, generator):\n    raise ValueError('no inputs')\n")
    other = {**artifact_of(copied, "linear").manifest, "inputs": {"x": {"shape": ["batch", 8], "init": "failing:ones"}}}
    publish_changed(copied, "linear", lambda artifact: msgspec.structs.replace(artifact, manifest=other))
    selected = ("--model", "linear", "--model", "frozen", "--seeds", "1")
    arguments = ("verify", tmp_path / "manifest.yaml", *selected, "--store", copied.path, "--json")
    ran = run_here(*arguments, cwd=tmp_path, **own_cache(tmp_path))
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    reports = json.loads(ran.stdout)
    status = {report["model"]: report["status"] for report in reports if not report.get("extremes")}
    assert status == {"linear": "could not run", "frozen": "ok"}
    assert "the init `failing:ones` of `x` raised ValueError: no inputs" in reports[0]["detail"]


def test_a_bucket_of_the_manifest_that_the_bundle_lacks_could_not_run(copied: Store, tmp_path: Path) -> None:
    publish_changed(
        copied, "linear", lambda artifact: msgspec.structs.replace(artifact, variants=artifact.variants[:1])
    )
    code, reports = verify(copied.path, MANIFEST, "--model", "linear", "--seeds", "1", tmp_path=tmp_path)
    assert code == 2
    assert [(report["bucket"], report["status"]) for report in reports] == [
        ("batch=2", "ok"),
        ("batch=4", "could not run"),
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_verify_shows_what_it_has_verified(
    copied: Store, tmp_path: Path, number: signal.Signals
) -> None:
    for name in ("manifest.yaml", "models.py"):
        (tmp_path / name).write_text((ZOO / name).read_text())
    (tmp_path / "waiting.py").write_text(WAITING)
    other = {**artifact_of(copied, "pooled").manifest, "factory": "waiting.py:make"}
    publish_changed(copied, "pooled", lambda artifact: msgspec.structs.replace(artifact, manifest=other))
    arguments = ("verify", tmp_path / "manifest.yaml", "--model", "linear", "--model", "pooled", "--store", copied.path)
    ran = interrupt_when_it_waits(start("-m", "aotc", *arguments, **own_cache(tmp_path)), number)
    assert ran.returncode == 128 + number
    lines = [line.split() for line in ran.stdout.splitlines()[1:]]
    assert {line[0] for line in lines} == {"linear"} and {line[-1] for line in lines} == {"ok"}, ran.stdout
    assert wait_until_none_names("aotc.verify", 10, "AOTC_CACHE_DIR=" + own_cache(tmp_path)["AOTC_CACHE_DIR"]) == []


def test_an_interrupted_verify_shows_a_bucket_that_is_done_of_a_model_that_is_not(
    copied: Store, tmp_path: Path
) -> None:
    (tmp_path / "models.py").write_text((ZOO / "models.py").read_text())
    (tmp_path / "waiting.py").write_text(WAITING)
    inputs = {"x": {"shape": ["batch", 8], "init": "waiting:ones_but_for_batch_4"}}
    other = {**artifact_of(copied, "linear").manifest, "inputs": inputs}
    publish_changed(copied, "linear", lambda artifact: msgspec.structs.replace(artifact, manifest=other))
    command = start("-m", "aotc", "verify", "linear", "--store", copied.path, cwd=tmp_path, **own_cache(tmp_path))
    ran = interrupt_when_it_waits(command, signal.SIGINT)
    assert [(line.split()[1], line.split()[-1]) for line in ran.stdout.splitlines()[1:]] == [("batch=2", "ok")]
    assert wait_until_none_names("aotc.verify", 10, "AOTC_CACHE_DIR=" + own_cache(tmp_path)["AOTC_CACHE_DIR"]) == []


def test_a_record_whose_manifest_or_target_cannot_be_read_is_a_typed_error(copied: Store) -> None:
    publish_changed(copied, "linear", lambda artifact: msgspec.structs.replace(artifact, manifest={"name": 1}), "odd")
    with pytest.raises(CorruptError, match="the manifest in the record of `linear`"):
        list(verify_reference("linear:odd", copied.path, 1))
    publish_changed(copied, "linear", lambda artifact: msgspec.structs.replace(artifact, target="cpu:z80"), "new")
    with pytest.raises(VerifyError, match="holds cpu:z80; none of it runs on this machine"):
        list(verify_reference("linear:new", copied.path, 1))
