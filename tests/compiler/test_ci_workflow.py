"""The workflow in examples/ci: its file is one that GitHub reads, and its commands do what it promises."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from doctoring import copy_store
from in_process import run_here
from processes import ROOT, ZOO, environment
from scripts_here import run_script

from aotc.store.layout.store import Store

WORKFLOW = ROOT / "examples" / "ci" / "aotc-build.yml"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())
    return read


def runs(job: Mapping[str, Any]) -> dict[str, str]:
    return {step["name"]: step["run"] for step in job["steps"] if "run" in step}


def filled(text: str, context: Mapping[str, object]) -> str:
    """The text with GitHub's expressions replaced; KeyError for one that the test does not know."""
    return re.sub(r"\$\{\{\s*(.+?)\s*\}\}", lambda match: str(context[match[1]]), text)


def run_step(text: str, folder: Path, context: Mapping[str, object], variables: Mapping[str, str]) -> str:
    """Run a step as GitHub does, with the shell that it takes."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", filled(text, context)]
    ran = run_script(command, folder, environment(**variables))
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def test_what_is_published_needs_every_shard(workflow: dict[str, Any]) -> None:
    jobs = workflow["jobs"]
    matrix = jobs["shard"]["strategy"]["matrix"]["shard"]
    assert matrix == list(range(1, len(matrix) + 1))  # with strategy.job-total, each part once
    assert set(jobs["publish"]["needs"]) == {"shard", "gpu"}
    uploads = [step["with"] for step in jobs["shard"]["steps"] if "upload-artifact" in step.get("uses", "")]
    (store,) = (upload for upload in uploads if upload["path"] == "store")
    assert store["include-hidden-files"] is True  # .aotc begins with a dot, and GitHub leaves such out
    (download,) = (step["with"] for step in jobs["publish"]["steps"] if "download-artifact" in step.get("uses", ""))
    assert filled(store["name"], {"matrix.shard": 2}).startswith(download["pattern"].rstrip("*"))
    named = {step["uses"].partition("@")[2] for job in jobs.values() for step in job["steps"] if "uses" in step}
    assert all(re.fullmatch(r"v\d+", version) for version in named)


def test_its_manifest_is_for_the_targets_that_it_builds(workflow: dict[str, Any]) -> None:
    given = workflow["env"]
    plan = run_here(
        *("build", given["MANIFEST"], "--target", given["CPU_TARGET"], "--store", "nowhere", "--dry-run", "--json")
    )
    assert plan.returncode == 0, plan.stderr
    assert len(json.loads(plan.stdout)) == len(workflow["jobs"]["shard"]["strategy"]["matrix"]["shard"])
    assert given["DESTINATION"].endswith("quickstart:${{ github.sha }}")


def test_every_step_is_a_command_that_aotc_has(workflow: dict[str, Any]) -> None:
    known = subprocess.run(
        [sys.executable, "-m", "aotc", "build", "--help"], env=environment(), capture_output=True, text=True, check=True
    ).stdout
    used = set(re.findall(r"--[a-z-]+", " ".join(runs(workflow["jobs"]["shard"])["Build"].split())))
    assert used == {option for option in used if option in known}


def test_its_commands_build_merge_and_push(workflow: dict[str, Any], zoo_store: Path, tmp_path: Path) -> None:
    """Each runner finds its cache filled, as after an earlier commit: nothing need be compiled here."""
    jobs, total = workflow["jobs"], len(workflow["jobs"]["shard"]["strategy"]["matrix"]["shard"])
    (bundle,) = (entry for entry in Store.open(zoo_store).tags() if entry.model == "linear")
    variables = {
        **{name: filled(value, {"github.sha": COMMIT, "github.repository": "team/models"})
           for name, value in workflow["env"].items()},
        "MANIFEST": str(ZOO / "manifest.yaml"),
        "CPU_TARGET": "native",
        "DESTINATION": f"file://{tmp_path / 'published'}",
        "AOTC_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    publish = tmp_path / "publish"
    for shard in jobs["shard"]["strategy"]["matrix"]["shard"]:
        runner = tmp_path / f"runner-{shard}"
        copy_store(zoo_store, runner).path.rename(runner / "store")
        for name in ("Build", "Forget what no build has used for a month"):
            # The zoo's one model with two buckets stands for the whole manifest.
            text = runs(jobs["shard"])[name].replace('"$MANIFEST"', '"$MANIFEST" --model linear')
            run_step(text, runner, {"matrix.shard": shard, "strategy.job-total": total}, variables)
        shutil.copytree(runner / "store", publish / "stores" / f"shard-{shard}")
    run_step(runs(jobs["publish"])["Merge"], publish, {}, variables)
    merged = {str(entry): entry.digest for entry in Store.open(publish / "merged").tags()}
    assert merged == {f"linear:{COMMIT}": bundle.digest}
    pushed = run_step(runs(jobs["publish"])["Push"].replace("quickstart", "linear"), publish, {}, variables)
    assert bundle.digest in pushed
    listed = run_step('aotc ls --store "$DESTINATION" --json', publish, {}, variables)
    assert bundle.digest in listed
