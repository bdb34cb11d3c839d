"""`aotc ls`, `aotc inspect`, `aotc schema`, and other people's tools on the same store."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from doctoring import artifact_of
from processes import ROOT, ZOO

from aotc.cli import main
from aotc.compiler.patches.machinery.patch import chosen
from aotc.compiler.patches.machinery.registry import PATCHES
from aotc.store.layout.store import Store
from aotc.store.layout.units import find_built

MODELS = sorted(yaml.safe_load((ZOO / "manifest.yaml").read_text())["models"])


def aotc(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def as_json(*arguments: object) -> Any:
    result = aotc(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_lists_every_tag(zoo_store: Path) -> None:
    rows = as_json("ls", "--store", zoo_store)
    assert [row["model"] for row in rows] == MODELS
    linear = rows[MODELS.index("linear")]
    digests = {entry.model: entry.digest for entry in Store.open(zoo_store).tags()}
    assert linear["tag"] == "latest" and linear["digest"] == digests["linear"]
    assert linear["buckets"] == 2 and linear["weights"] == ["live"]
    assert linear["targets"] == [artifact_of(Store.open(zoo_store), "linear").target]
    assert linear["size"] > 10_000 and linear["published"].endswith("Z") and linear["created"] == ""
    assert rows[MODELS.index("frozen")]["weights"] == ["frozen"]
    lines = aotc("ls", "--store", zoo_store).stdout.splitlines()
    columns = ["model:tag", "targets", "standalone", "buckets", "weights", "compressed", "published", "digest"]
    assert lines[0].split() == columns
    assert [line.split()[0] for line in lines[1:]] == [f"{model}:latest" for model in MODELS]
    said = {line.split()[0].partition(":")[0]: line.split()[2] for line in lines[1:]}
    assert (said["linear"], said["recurrent"]) == ("yes", "no")
    assert linear["misfits"] == {linear["targets"][0]: []}


def test_inspect_says_what_keeps_code_from_running_without_torch(zoo_store: Path) -> None:
    assert "standalone   no: " in aotc("inspect", "recurrent", "--store", zoo_store).stdout
    assert "standalone   fits" in aotc("inspect", "autocast", "--store", zoo_store).stdout
    (artifact,) = as_json("inspect", "recurrent", "--store", zoo_store)["artifacts"]
    operators = ("gru.input", "lstm.input", "rnn_relu.input", "rnn_tanh.input")
    assert artifact["misfits"][-4:] == [f"it calls aten::{operator}" for operator in operators]


def test_a_build_measures_what_a_call_takes_of_every_bucket(zoo_store: Path) -> None:
    """For the page of `aotc inspect --html`. In the unit, since the artifact's bytes repeat."""
    store = Store.open(zoo_store)
    for model in ("linear", "stepped"):
        for variant in artifact_of(store, model).variants:
            unit = find_built(store, variant.key)
            assert unit is not None and unit.times is not None and unit.times.eager is not None
            for spread in (unit.times.compiled, unit.times.eager):
                assert 0 < spread.least_ms <= spread.median_ms and spread.calls >= 1


def test_ls_of_no_store_says_so(tmp_path: Path) -> None:
    result = aotc("ls", "--store", tmp_path / "none")
    assert result.exit_code == 2
    assert f"error: there is no store at {tmp_path / 'none'}" in result.stderr
    assert "hint: `aotc build` makes one" in result.stderr


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_shows_one_artifact_for_people(zoo_store: Path) -> None:
    artifact = artifact_of(Store.open(zoo_store), "pooled")
    text = aotc("inspect", "pooled", "--store", zoo_store).stdout
    for part in (
        "pooled  sha256:",
        f"{artifact.target}  built by aotc {artifact.aotc} with torch {torch.__version__}",
        "live, 3 tensors of class Pooled",
        "needs        linux x86_64, glibc ",
        "CPU features avx avx2",
        "KiB compressed",
        "ids is a contiguous int64 [batch, seq]",
        "mask is a contiguous bool [batch, seq]",
        "autocast off, default dtype float32",
        "training False",
        "bucket batch=4,seq=16",
        "patches of torch",
        "addmm",
    ):
        assert part in text
    fused = [line for line in text.splitlines() if "× cpp" in line]
    assert any("_softmax" in line and "masked_fill" in line for line in fused)


def test_inspect_shows_guards_of_every_kind(zoo_store: Path) -> None:
    text = aotc("inspect", f"{zoo_store}#semantics").stdout
    for guard in (
        "batch.x is a contiguous float32 [n, 4]",
        "batch.flags is a contiguous bool [n]",
        "scale is 2.0",
        "flip is False",
    ):
        assert guard in text
    assert "bucket seq=8..64 step 8" in aotc("inspect", "derived", "--store", zoo_store).stdout


def test_inspect_as_json_holds_the_whole_record_and_the_kernels(zoo_store: Path) -> None:
    shown = as_json("inspect", "linear:latest", "--store", zoo_store)
    (artifact,) = shown["artifacts"]
    assert shown["model"] == "linear" and shown["created"] == ""
    assert artifact["environment"]["torch"] == torch.__version__
    assert artifact["environment"]["cpu_features"]
    assert [variant["bucket"] for variant in artifact["variants"]] == [{"batch": 2}, {"batch": 4}]
    applied = [patch.name for patch in chosen(PATCHES, "cpu", {})]
    assert artifact["variants"][0]["patches"] == applied
    kernels = artifact["variants"][0]["kernels"]
    assert {operator for kernel in kernels for operator in kernel["operators"]} >= {"addmm", "relu"}
    assert all(kernel["calls"] >= 1 for kernel in kernels)
    assert any("relu" in kernel["operators"] and "source" in kernel for kernel in kernels)
    assert artifact["manifest"]["factory"] == "models.py:Linear"


def test_inspect_of_a_digest_is_inspect_of_its_tag(zoo_store: Path) -> None:
    digest = next(entry.digest for entry in Store.open(zoo_store).tags() if entry.model == "tied")
    assert as_json("inspect", f"tied@{digest}", "--store", zoo_store) == as_json("inspect", f"{zoo_store}#tied:latest")


def test_an_unknown_reference_lists_the_known_ones(zoo_store: Path) -> None:
    result = aotc("inspect", "linaer", "--store", zoo_store)
    assert result.exit_code == 2
    assert "error: linaer:latest is not in the store" in result.stderr
    assert "hint: there is linear:latest, " in result.stderr and f" and {len(MODELS) - 5} more" in result.stderr


def test_a_text_that_is_no_reference_says_what_one_is(zoo_store: Path) -> None:
    result = aotc("inspect", "linear:", "--store", zoo_store)
    assert result.exit_code == 2
    assert "[STORE#]model[:tag] or [STORE#]model@sha256:<64 hex>" in result.stderr


def test_no_path_of_the_build_machine_is_in_a_record(zoo_store: Path) -> None:
    for model in MODELS:
        text = json.dumps(as_json("inspect", model, "--store", zoo_store))
        assert str(ROOT) not in text and str(zoo_store) not in text and "aotc-build-" not in text, model


# -- other people's tools ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="skopeo is not installed")
@pytest.mark.parametrize("model", ["linear", "frozen"])
def test_skopeo_reads_the_store(zoo_store: Path, model: str, tmp_path: Path) -> None:
    raw = subprocess.run(
        ["skopeo", "inspect", "--raw", f"oci:{zoo_store}:{model}:latest"], capture_output=True, text=True, check=True
    )
    index = json.loads(raw.stdout)
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    assert len(index["manifests"]) == 1
    copied = tmp_path / "copied"
    subprocess.run(
        ["skopeo", "copy", "--all", "--quiet", f"oci:{zoo_store}:{model}:latest", f"oci:{copied}:{model}:latest"],
        check=True,
    )
    assert artifact_of(Store.open(copied), model) == artifact_of(Store.open(zoo_store), model)


# -- schema -----------------------------------------------------------------------------------------------------------


def test_the_schema_is_a_json_schema_that_accepts_every_manifest() -> None:
    schema = json.loads(aotc("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    manifests = [*(ROOT / "manifests").glob("*.yaml"), ZOO / "manifest.yaml"]
    assert len(manifests) >= 4
    for manifest in manifests:
        jsonschema.validate(yaml.safe_load(manifest.read_text()), schema, jsonschema.Draft202012Validator)


def test_the_schema_refuses_an_unknown_key() -> None:
    schema = json.loads(aotc("schema").stdout)
    entry = {"factory": "a:b", "inputs": {}, "bukets": []}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": 1, "models": {"m": entry}}, schema, jsonschema.Draft202012Validator)
