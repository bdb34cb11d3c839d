"""A store in a bucket or on the Hub, end to end: built into by a fresh machine that compiles nothing, listed, loaded,
computing."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from object_servers import needs_radosgw
from processes import ROOT, run_aotc, run_python
from serving import LOAD
from store_backends import needs_hub

from aotc.store.remote.staging import Staging

LIBRARIES: dict[str, tuple[str, tuple[str, ...]]] = {"s3": ("obstore", ()), "hf": ("huggingface_hub", ("yaml",))}
"""By which each is talked to, and what that imports itself of what a load does without."""


@pytest.fixture(params=[pytest.param("s3-ceph", marks=needs_radosgw), pytest.param("hub", marks=needs_hub)])
def bucket(
    request: pytest.FixtureRequest,
    backends_started: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> str:
    server = backends_started[request.param].server
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return str(server.new_url())


def test_a_fresh_machine_builds_without_compiling_and_a_service_loads_it(
    bucket: str, quickstart_store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "a machine that built it"))
    first = Staging(bucket)
    shutil.copytree(quickstart_store, first.store.path, dirs_exist_ok=True)
    for path in (quickstart_store / ".aotc" / "units").glob("*.json"):
        first.keep(f"sha256:{path.stem}")

    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "a fresh machine"))
    built = run_aotc("build", ROOT / "manifests" / "quickstart.yaml", "--store", bucket, "--json")
    report = json.loads(built.stdout)
    assert built.returncode == 0, built.stderr
    assert {unit["status"] for unit in report["units"]} == {"cached"}

    listed = json.loads(run_aotc("ls", "--store", bucket, "--json").stdout)
    assert [(row["model"], row["digest"]) for row in listed] == [*report["bundles"].items()]

    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "a replica"))
    library, of_library = LIBRARIES[bucket.partition("://")[0]]
    imported, used = run_python(LOAD, f"{bucket}#quickstart", library).strip().rsplit(maxsplit=1)
    assert [name for name in ast.literal_eval(imported) if not name.startswith(of_library)] == []
    assert used == "True"


def test_push_without_a_name_keeps_the_reference_s_own(bucket: str, quickstart_store: Path, tmp_path: Path) -> None:
    pushed = run_aotc("push", f"{quickstart_store}#quickstart", bucket, "--json")
    assert pushed.returncode == 0, pushed.stderr
    assert json.loads(pushed.stdout)["reference"] == f"{bucket}#quickstart:latest"
    pulled = run_aotc("fetch", f"{bucket}#quickstart", "--store", tmp_path / "copy", "--json")
    assert json.loads(pulled.stdout)["digest"] == json.loads(pushed.stdout)["digest"]
    refused = run_aotc("push", "quickstart", "oci://127.0.0.1:9/r:v1", "--store", bucket)
    assert refused.returncode == 2 and "is not a folder" in refused.stderr
