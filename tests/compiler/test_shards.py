"""A build in parts, on several machines, and the merge of the parts: whole, or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from doctoring import artifact_of, copy_store
from in_process import build_here, plan_here, run_here
from processes import ZOO

from aotc.compiler.messages import Unit
from aotc.compiler.planning.cache_lookup import PlannedUnit
from aotc.compiler.planning.key import unit_key
from aotc.compiler.planning.shards import Shard, parse_shard, split
from aotc.compiler.publish.merging import merge_stores
from aotc.errors import BuildError, NotFoundError
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store
from aotc.store.layout.units import UnitRecord, find_unit, put_unit
from aotc.store.reference import Reference

MANIFEST = ZOO / "manifest.yaml"


def planned_units(count: int) -> list[PlannedUnit]:
    spec = read_manifest(MANIFEST, ["linear"]).models["linear"]
    target = parse_target("cpu:x86-64-v3")
    units = []
    for number in range(count):
        factors = {"number": number}
        units.append(Unit(spec, {"batch": number + 1}, target, factors, unit_key(factors)))
    return [PlannedUnit(unit, None, ()) for unit in units]


@pytest.mark.parametrize(("units", "shards"), [(8, 3), (1, 4), (16, 16), (7, 1)])
def test_shards_hold_every_unit_once_and_as_many_as_each_other(units: int, shards: int) -> None:
    planned = planned_units(units)
    parts = [split(planned, Shard(index, shards)) for index in range(1, shards + 1)]
    names = [plan.unit.name for part, _ in parts for plan in part]
    assert sorted(names) == sorted(plan.unit.name for plan in planned)
    sizes = [len(part) for part, _ in parts]
    assert max(sizes) - min(sizes) <= 1
    for index, (part, whole) in enumerate(parts, 1):
        assert [unit.unit for unit in whole.units if unit.shard == index] == [plan.unit.name for plan in part]


def test_a_shard_does_not_depend_on_the_order_of_the_manifest() -> None:
    planned = planned_units(9)
    one = {plan.unit.name for plan in split(planned, Shard(2, 3))[0]}
    assert {plan.unit.name for plan in split(planned[::-1], Shard(2, 3))[0]} == one


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "-1/2", "1/2/3", "a/b"])
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match="is not a shard"):
        parse_shard(text)


# -- shards of a real build -------------------------------------------------------------------------------------------


@pytest.fixture
def shards(zoo_store: Path, tmp_path: Path) -> list[Path]:
    """Three stores, each as one shard of a build of two models leaves it; nothing is compiled, all is in the zoo's."""
    made, manifest = [], read_manifest(MANIFEST, ["linear", "tied"])
    for index in (1, 2, 3):
        full = copy_store(zoo_store, tmp_path / f"full-{index}")
        store = full.path
        for entry in full.tags():
            full.remove_entries([one for one in full.entries() if one.digest == entry.digest])
        report = build_here(manifest, store, shard=Shard(index, 3))
        assert (report.units, report.bundles, full.tags()) == (3, {}, [])
        forget_others(full, {f"{outcome.model} {outcome.bucket}" for outcome in report.outcomes})
        made.append(store)
    return made


def forget_others(store: Store, kept: set[str]) -> None:
    for path in (store.path / ".aotc" / "units").glob("*.json"):
        record = json.loads(path.read_bytes())
        bucket = ",".join(f"{dim}={size}" for dim, size in record["artifact"]["variants"][0]["bucket"].items())
        if f"{record['artifact']['model']} {bucket}" not in kept:
            path.unlink()


def test_a_shard_says_how_many_units_are_its(zoo_store: Path, tmp_path: Path) -> None:
    store = copy_store(zoo_store, tmp_path).path
    ran = run_here("build", MANIFEST, "--store", store, "--model", "linear", "--shard", "1/2")
    assert ran.returncode == 0, ran.stderr
    assert "shard 1/2: 1 of 2 units; `aotc merge` publishes them" in ran.stdout


def test_a_shard_says_nothing_of_models_beside_one_that_cannot_be_planned(zoo_store: Path, tmp_path: Path) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    linear = manifest["models"]["linear"]
    text = yaml.safe_dump({"version": 1, "models": {"linear": linear, "broken": {**linear, "regions": ["nowhere.*"]}}})
    (tmp_path / "m.yaml").write_text(text)
    shutil.copy(ZOO / "models.py", tmp_path)
    store = copy_store(zoo_store, tmp_path / "full").path
    ran = run_here("build", tmp_path / "m.yaml", "--store", store, "--shard", "1/1")
    assert ran.returncode == 1 and "failed: broken - " in ran.stderr, ran.stderr
    assert "shard 1/1: 2 of 2 units" in ran.stdout
    assert "not published" not in ran.stdout + ran.stderr


def test_merged_shards_are_the_bundles_that_one_build_gives(
    shards: Sequence[Path], zoo_store: Path, tmp_path: Path
) -> None:
    into = tmp_path / "merged"
    ran = run_here("merge", *shards, "--into", into, "--json")
    assert ran.returncode == 0, ran.stderr
    merged = json.loads(ran.stdout)
    whole = {entry.model: entry.digest for entry in Store.open(zoo_store).tags()}
    assert merged["bundles"] == {model: whole[model] for model in ("linear", "tied")}
    assert merged["units"] == 3
    again = plan_here(read_manifest(MANIFEST, ["linear"]), into)
    assert [plan.cached is not None for plan in again] == [True, True]
    assert run_here("fsck", "--store", into).returncode == 0


def test_a_merge_without_a_shard_names_what_is_missing_and_publishes_nothing(
    shards: Sequence[Path], tmp_path: Path
) -> None:
    into = tmp_path / "merged"
    ran = run_here("merge", shards[0], shards[2], "--into", into)
    assert ran.returncode == 2
    assert "1 of the 3 units planned for `latest` are in none of the stores" in ran.stderr
    assert "(shard 2/3)" in ran.stderr
    assert not into.exists()


def test_shards_of_different_sources_are_not_merged(shards: Sequence[Path], tmp_path: Path) -> None:
    plan = next((shards[1] / ".aotc" / "plans").iterdir())
    changed = json.loads(plan.read_bytes())
    changed["units"][0]["key"] = unit_key({"compiler": "another"})
    plan.write_text(json.dumps(changed))
    with pytest.raises(BuildError, match="planned from different inputs; 1 units differ") as refused:
        merge_stores(shards, tmp_path / "merged", "latest")
    assert changed["units"][0]["unit"] in refused.value.issues[0].message
    assert not (tmp_path / "merged").exists()


def test_a_unit_of_another_model_does_not_stand_for_the_planned_one(shards: Sequence[Path], tmp_path: Path) -> None:
    store = Store.open(shards[1])
    (record,) = (store.path / ".aotc" / "units").glob("*.json")
    unit = find_unit(store, f"sha256:{record.stem}")
    assert unit is not None
    put_unit(store, msgspec.structs.replace(unit, artifact=msgspec.structs.replace(unit.artifact, model="other")))
    with pytest.raises(
        BuildError, match="1 of the units planned for `latest` are stored under the key of another unit"
    ) as refused:
        merge_stores(shards, tmp_path / "merged", "latest")
    (issue,) = refused.value.issues
    assert issue.actual.startswith("other ")
    assert issue.expected.partition(" ")[2] == issue.actual.partition(" ")[2]
    assert not (tmp_path / "merged").exists()


def test_a_damaged_blob_is_not_merged(shards: Sequence[Path], tmp_path: Path) -> None:
    record = next((shards[0] / ".aotc" / "units").glob("*.json"))
    file = json.loads(record.read_bytes())["artifact"]["variants"][0]["files"][0]
    for shard in shards:
        blob = Store.open(shard).blobs.path(file["blob"])
        if blob.exists():
            blob.chmod(0o644)
            *kept, last = blob.read_bytes()
            blob.write_bytes(bytes([*kept, last ^ 1]))
    ran = run_here("merge", *shards, "--into", tmp_path / "merged")
    assert ran.returncode == 2
    assert "is corrupt" in ran.stderr
    assert Store.open(tmp_path / "merged").tags() == []


# -- bundles of two machines ------------------------------------------------------------------------------------------


def for_gpu(store: Store, tmp_path: Path) -> Store:
    """A store with the `tied` bundle as a machine with a GPU would have built it: for another target."""
    artifact = artifact_of(store, "tied", "v1")
    needs = msgspec.structs.replace(artifact.environment, cuda_capability="9.0", cuda="13.0")
    other = msgspec.structs.replace(artifact, target="cuda:sm_90", environment=needs)
    elsewhere = Store.create(tmp_path / "gpu")
    shutil.copytree(store.path / "blobs", elsewhere.path / "blobs", dirs_exist_ok=True)
    publish(elsewhere, "tied", "v1", [other], created="2026-02-03T04:05:06Z")
    return elsewhere


def only(zoo_store: Path, tmp_path: Path, model: str) -> Store:
    store = Store.create(tmp_path / "cpu")
    shutil.copytree(zoo_store / "blobs", store.path / "blobs", dirs_exist_ok=True)
    publish(store, model, "v1", [artifact_of(Store.open(zoo_store), model)], created="2026-01-02T03:04:05Z")
    return store


def artifacts(store: Store, model: str, tag: str) -> dict[str, str]:
    bundle = read_bundle(store, Reference(None, model, tag=tag))
    return {artifact.target: artifact.digest for artifact in bundle.artifacts}


def test_bundles_for_two_targets_become_one(zoo_store: Path, tmp_path: Path) -> None:
    cpu = only(zoo_store, tmp_path, "tied")
    gpu = for_gpu(cpu, tmp_path)
    merged = merge_stores([cpu.path, gpu.path], tmp_path / "merged", "v1")
    assert merged.units == 2
    both = artifacts(Store.open(tmp_path / "merged"), "tied", "v1")
    assert both == artifacts(cpu, "tied", "v1") | artifacts(gpu, "tied", "v1")


def test_two_variants_of_one_unit_are_not_merged(zoo_store: Path, tmp_path: Path) -> None:
    cpu = only(zoo_store, tmp_path, "tied")
    other = Store.create(tmp_path / "other")
    shutil.copytree(cpu.path / "blobs", other.path / "blobs", dirs_exist_ok=True)
    artifact = artifact_of(cpu, "tied", "v1")
    (variant,) = artifact.variants
    changed = msgspec.structs.replace(variant, files=(*variant.files, variant.report))
    publish(
        other, "tied", "v1", [msgspec.structs.replace(artifact, variants=(changed,))], created="2026-01-02T03:04:05Z"
    )
    with pytest.raises(BuildError, match="1 units are in several of the stores, with different variants") as refused:
        merge_stores([cpu.path, other.path], tmp_path / "merged", "v1")
    assert refused.value.issues[0].expected == str(cpu.path)
    assert not (tmp_path / "merged").exists()


ANOTHER_MODEL = {
    "class": lambda module, state: (msgspec.structs.replace(module, class_name="Another"), state),
    "file": lambda module, state: (
        msgspec.structs.replace(module, sources=dict.fromkeys(module.sources, "sha256:" + "0" * 64)),
        state,
    ),
    "sizes": lambda module, state: (
        module,
        tuple(msgspec.structs.replace(spec, shape=tuple(size + 1 for size in spec.shape)) for spec in state),
    ),
    "depth": lambda module, state: (module, (*state, msgspec.structs.replace(state[0], name="deeper.weight"))),
}


@pytest.mark.parametrize("change", ANOTHER_MODEL)
def test_another_model_of_the_same_name_is_not_merged(zoo_store: Path, tmp_path: Path, change: str) -> None:
    cpu = only(zoo_store, tmp_path, "linear")
    artifact = artifact_of(cpu, "linear", "v1")
    module, state = ANOTHER_MODEL[change](artifact.module, artifact.state)
    assert (module, state) != (artifact.module, artifact.state)
    target = next(name for name in ("cpu:amx", "cpu:x86-64-v4") if name != artifact.target)
    other = msgspec.structs.replace(artifact, target=target, module=module, state=state)
    elsewhere = Store.create(tmp_path / "other")
    shutil.copytree(cpu.path / "blobs", elsewhere.path / "blobs", dirs_exist_ok=True)
    publish(elsewhere, "linear", "v1", [other], created="2026-02-03T04:05:06Z")
    with pytest.raises(BuildError, match=f"for {artifact.target} and for {target} are of different models") as refused:
        merge_stores([cpu.path, elsewhere.path], tmp_path / "merged", "v1")
    assert all(issue.expected != issue.actual for issue in refused.value.issues)
    assert not (tmp_path / "merged").exists()


def test_a_store_with_nothing_to_merge_is_named(zoo_store: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="has no bundle with the tag `nightly`, and no shard"):
        merge_stores([zoo_store], tmp_path / "merged", "nightly")
    with pytest.raises(NotFoundError):
        merge_stores([tmp_path / "nowhere"], tmp_path / "merged", "latest")


# -- what is built again ----------------------------------------------------------------------------------------------


def statuses(report: Any) -> dict[str, str]:
    return {unit["unit"].rpartition(" ")[0]: "cached" if unit["cached"] else "new" for unit in report}


def test_a_changed_bucket_list_and_a_changed_model_build_only_those(zoo_store: Path, tmp_path: Path) -> None:
    store = copy_store(zoo_store, tmp_path).path
    folder = shutil.copytree(ZOO, tmp_path / "zoo")
    manifest = folder / "manifest.yaml"
    text = manifest.read_text()
    manifest.write_text(
        text.replace("buckets: [{batch: 2}, {batch: 4}]", "buckets: [{batch: 4}, {batch: 6}]").replace(
            "mask: {shape: [batch, seq], dtype: bool, init: ones, pad: {batch: true, seq: false}}",
            "mask: {shape: [batch, seq], dtype: bool, init: ones, pad: {batch: false, seq: false}}",
            1,
        )
    )
    ran = run_here("build", manifest, "--store", store, "--dry-run", "--json")
    plan = statuses(json.loads(ran.stdout))
    assert [name for name, status in plan.items() if status == "new"] == ["linear batch=6", "pooled batch=4,seq=16"]
    assert "linear batch=2" not in plan


def test_a_unit_costs_what_it_is_recorded_to(zoo_store: Path) -> None:
    """Each stage's time and memory are in the record, and the stages fill the unit's time."""
    store = Store.open(zoo_store)
    record = find_unit(store, artifact_of(store, "frozen").variants[0].key)
    assert isinstance(record, UnitRecord)
    stages = sorted(record.stages.items(), key=lambda item: item[1].began)
    assert [name for name, _ in stages] == ["import", "model", "export", "compile", "smoke run", "store"]
    assert sum(stage.seconds for _, stage in stages) == pytest.approx(record.seconds, rel=0.1)
    assert record.stages["compile"].memory > 100 << 20
    assert {"autotuning", "compiling", "linking", "lowering"} <= record.stages["compile"].parts.keys()
    put_unit(store, record)
