"""Building again: what the store holds is not compiled, what changed is, and every command says which and why."""

from __future__ import annotations

import json
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from doctoring import artifact_of
from in_process import build_here, plan_here, run_here
from processes import ZOO

from aotc.compiler.codegen.stored_code import stored_code
from aotc.compiler.messages import FinishedUnit, Job, OnProgress, Task, Unit
from aotc.compiler.pipeline import UnitBuild
from aotc.compiler.planning.cache_lookup import look_up
from aotc.compiler.request import BuildRequest
from aotc.digest import sha256_file
from aotc.errors import BuildError
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.provenance import CallTimes, Spread
from aotc.store.layout.store import Store
from aotc.store.layout.units import StoredUnits, latest_unit, put_unit, unit_costs

MANIFEST = ZOO / "manifest.yaml"
LINEAR = read_manifest(MANIFEST, ["linear"])


def build_json(*arguments: object) -> Any:
    ran = run_here("build", *arguments, "--json")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def listing(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_a_rebuild_with_nothing_changed_compiles_nothing_and_gives_the_same_bundles(copied: Store) -> None:
    before = {str(entry): entry.digest for entry in copied.tags()}
    report = build_json(MANIFEST, "--store", copied.path)
    assert {unit["status"] for unit in report["units"]} == {"cached"}
    assert max(unit["seconds"] for unit in report["units"]) < 1
    assert {f"{model}:latest": digest for model, digest in report["bundles"].items()} == before
    assert {str(entry): entry.digest for entry in copied.tags()} == before


def test_what_a_gpu_s_driver_compiled_in_the_smoke_run_is_said_each_time_unless_it_is_little(copied: Store) -> None:
    target = artifact_of(copied, "linear").target
    for batch, size in ((2, 300 << 10), (4, 4 << 10)):
        unit = latest_unit(copied, "linear", {"batch": batch}, target)
        assert unit is not None
        put_unit(copied, msgspec.structs.replace(unit, driver_compiled=size, times=None))
    large, little = build_here(LINEAR, copied.path).outcomes
    assert [large.bucket, little.bucket] == ["batch=2", "batch=4"]
    (note,) = large.notes
    assert "compiles 300 KB" in note and "CUDA_CACHE_PATH" in note
    assert little.notes == ()


def test_code_that_is_slower_than_eager_is_said_each_time(copied: Store) -> None:
    """Not where a busy machine or few calls leave it open, and not of equals."""
    target = artifact_of(copied, "linear").target
    slower = CallTimes(Spread(3.0, 3.1, 50), Spread(2.0, 2.1, 50))
    for batch, times in (
        (2, slower),
        (4, CallTimes(Spread(2.05, 2.06, 50), Spread(2.0, 2.02, 50))),
    ):
        unit = latest_unit(copied, "linear", {"batch": batch}, target)
        assert unit is not None
        put_unit(copied, msgspec.structs.replace(unit, times=times))
    told, equal = build_here(LINEAR, copied.path).outcomes
    (note,) = told.notes
    assert note.startswith("SLOWER THAN EAGER: a call takes 3.000 ms, and 2.000 in eager")
    assert equal.notes == ()
    for open_question in (
        msgspec.structs.replace(slower, waited=0.5),
        CallTimes(Spread(3.0, 3.1, 5), Spread(2.0, 2.1, 5)),
    ):
        unit = latest_unit(copied, "linear", {"batch": 2}, target)
        assert unit is not None
        put_unit(copied, msgspec.structs.replace(unit, times=open_question))
        assert build_here(LINEAR, copied.path).outcomes[0].notes == ()


def test_another_folder_of_the_same_models_compiles_nothing(copied: Store, tmp_path: Path) -> None:
    folder = shutil.copytree(ZOO, tmp_path / "elsewhere" / "zoo")
    plan = build_json(folder / "manifest.yaml", "--store", copied.path, "--dry-run")
    assert [unit["unit"] for unit in plan if not unit["cached"]] == []


def test_a_dry_run_writes_nothing(copied: Store, tmp_path: Path) -> None:
    before = listing(copied.path)
    plan = build_json(MANIFEST, "--store", copied.path, "--dry-run", "--force")
    assert len(plan) > 10
    assert all(not unit["cached"] and unit["reasons"][0]["message"] == "--force" for unit in plan)
    assert listing(copied.path) == before
    new = tmp_path / "new"
    ran = run_here("build", MANIFEST, "--store", new, "--model", "linear", "--dry-run")
    assert ran.stdout.count("to compile\n    there is no store yet") == 2
    assert not new.exists()


def test_explain_says_why_a_unit_is_stale(copied: Store, tmp_path: Path) -> None:
    folder = shutil.copytree(ZOO, tmp_path / "zoo")
    models = folder / "models.py"
    models.write_text(models.read_text() + "\nCHANGED = True\n")
    manifest = folder / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("kwargs: {width: 64}", "kwargs: {width: 64}\n    mode: default"))
    ran = run_here(
        "build", manifest, "--store", copied.path, "--explain", "--dry-run", "--model", "frozen", "--model", "tied"
    )
    target = artifact_of(copied, "tied").target
    *reasons, totals = ran.stdout.splitlines()
    line = manifest.read_text().splitlines().index("    mode: default") + 1
    assert totals.startswith(f"2 of 2 units to compile for {target}")
    assert reasons == [
        f"frozen batch=2 {target}: to compile",
        f"    {manifest}:{line}: manifest mode max-autotune → default",
        "    models.py: source of models changed",
        f"tied n=4 {target}: to compile",
        "    models.py: source of models changed",
    ]


def test_force_compiles_what_is_there_and_dummy_weights_give_the_same_artifact(copied: Store) -> None:
    options = ("--force", "--tag", "forced", "--dummy-weights")
    report = build_json(MANIFEST, "--store", copied.path, "--model", "older-cpu", *options)
    assert [unit["status"] for unit in report["units"]] == ["built"]
    assert artifact_of(copied, "older-cpu", "forced") == artifact_of(copied, "older-cpu")


def test_a_refactored_model_is_captured_anew_and_its_code_is_taken_from_the_store(
    copied: Store, tmp_path: Path
) -> None:
    folder = shutil.copytree(ZOO, tmp_path / "zoo")
    models = folder / "models.py"
    source = models.read_text()
    once = "return torch.relu(self.linear(x))"
    assert source.count(once) == 1
    models.write_text(source.replace(once, "hidden = self.linear(x)\n        return torch.relu(hidden)"))
    named = ("linear", "frozen", "ranged", "semantics")
    before = {name: artifact_of(copied, name) for name in named}
    report = build_json(
        folder / "manifest.yaml", "--store", copied.path, *(f"--model={name}" for name in named), "--jobs", "2"
    )
    assert {unit["status"] for unit in report["units"]} == {"reused"}
    assert all("nothing was compiled" in unit["notes"][-1] for unit in report["units"])
    for name in named:
        old, new = before[name], artifact_of(copied, name)
        assert old.module.sources != new.module.sources
        assert [one.files for one in old.variants] == [one.files for one in new.variants]
    known = {cost.model for cost in unit_costs(copied) if cost.seconds < 1}
    assert not known & set(named)  # a later estimate is that of a compilation


def test_code_that_cannot_be_read_is_compiled(copied: Store, tmp_path: Path) -> None:
    unit = latest_unit(copied, "frozen", {"batch": 2}, artifact_of(copied, "frozen").target)
    assert unit is not None
    (variant,) = unit.artifact.variants
    assert len(variant.files) > 1
    output = tmp_path / "out"
    output.mkdir()
    job = Job(
        Unit(LINEAR.models["linear"], {"batch": 2}, parse_target(unit.artifact.target), {}, ""),
        *(str(ZOO), str(output)),
        graphs={variant.graph: unit.key},
        store=str(copied.path),
    )
    found = stored_code(job, variant.graph)
    assert found is not None and found.unit == unit.key
    assert [sha256_file(output / file.name) for file in variant.files] == [file.digest for file in variant.files]
    assert stored_code(job, "another") is None
    for path in output.iterdir():
        path.unlink()
    damaged = copied.blobs.path(variant.files[-1].blob)
    damaged.chmod(0o644)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    assert stored_code(job, variant.graph) is None
    assert not list(output.iterdir())


def test_no_memory_is_kept_for_dummy_weights_and_their_units_have_the_same_keys(tmp_path: Path) -> None:
    real, dummy = (plan_here(LINEAR, tmp_path, dummy_weights=dummy) for dummy in (False, True))
    assert [plan.unit.key for plan in real] == [plan.unit.key for plan in dummy]
    assert all(plan.unit.state_bytes > 0 for plan in real) and all(plan.unit.state_bytes == 0 for plan in dummy)


class Refusing:
    """An executor that compiles nothing."""

    slots = parallel = 1

    def compile(self, task: Task, on_progress: OnProgress) -> AbstractContextManager[FinishedUnit]:
        raise BuildError("asked to compile")

    def raise_if_ended(self) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("other_built_it", "status"), [(False, "failed"), (True, "cached")])
def test_force_compiles_what_was_there_when_it_began_whatever_the_clocks_say(
    copied: Store, other_built_it: bool, status: str
) -> None:
    """It was built on a host whose clock is ahead, or behind where another build gives it meanwhile."""
    record = latest_unit(copied, "linear", {"batch": 2}, artifact_of(copied, "linear").target)
    assert record is not None
    put_unit(copied, msgspec.structs.replace(record, created="2199-01-01T00:00:00Z"))
    manifest = read_manifest(MANIFEST)
    target = parse_target(record.artifact.target)
    plan = look_up(
        StoredUnits(copied),
        Unit(manifest.models["linear"], {"batch": 2}, target, {}, record.key),
        force=True,
        changed={},
    )
    if other_built_it:
        put_unit(copied, msgspec.structs.replace(record, created="2001-01-01T00:00:00Z"))
    each = UnitBuild(BuildRequest(manifest, copied.path), copied, Refusing(), lambda event: None)
    outcome, _ = each.result(plan)
    assert outcome.status == status


def test_another_tag_names_the_same_artifacts(copied: Store) -> None:
    report = build_here(LINEAR, copied.path, tag="v2")
    tags = {str(entry): entry.digest for entry in copied.tags() if entry.model == "linear"}
    assert tags["linear:v2"] == tags["linear:latest"] == report.bundles["linear"]


def test_the_report_is_a_table_for_people(copied: Store) -> None:
    ran = run_here("build", MANIFEST, "--store", copied.path, "--model", "linear")
    header, first, second, *rest = ran.stdout.splitlines()
    assert header.split() == ["model", "bucket", "target", "seconds", "compressed", "status"]
    assert first.split()[:2] == ["linear", "batch=2"] and first.split()[-1] == "cached"
    assert second.split()[:2] == ["linear", "batch=4"]
    assert any(line.startswith(f"published {copied.path}#linear:latest  sha256:") for line in rest)
    assert "[2/2] linear batch=4" in ran.stderr


def test_a_unit_whose_blobs_are_gone_is_compiled_again(copied: Store) -> None:
    file = artifact_of(copied, "older-cpu").variants[0].files[0]
    copied.blobs.path(file.blob).unlink()
    (plan,) = plan_here(read_manifest(MANIFEST, ["older-cpu"]), copied.path)
    assert plan.cached is None and [reason.message for reason in plan.reasons] == ["its blobs are gone"]
