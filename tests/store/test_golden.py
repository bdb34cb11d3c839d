"""The golden store of each format, made by `golden/make.py` with the last aotc that wrote it: this aotc loads those of
its own format, and refuses others with both numbers. Two versions of aotc can share a store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import aotc
from aotc.cli import main
from aotc.digest import canonical_json
from aotc.records import SCHEMA_VERSION
from aotc.store.layout.built import read_built
from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.maintenance.fsck import fsck
from aotc.store.maintenance.gc import collect
from aotc.store.maintenance.retention import Policy
from aotc.store.reference import parse_reference

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.name for path in GOLDEN.glob("v*"))
LOADED = [2]
"""The formats whose bundles this aotc loads: `aotc/store/FORMAT.md`, "Versions", says for how long."""


@pytest.fixture(params=[f"v{number}" for number in LOADED])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "store"))


def test_there_is_a_golden_store_of_each_format_that_was_written() -> None:
    assert [f"v{number}" for number in range(1, SCHEMA_VERSION + 1)] == VERSIONS
    assert SCHEMA_VERSION in LOADED


def test_a_golden_store_is_whole_and_says_how_it_was_made(golden: Path) -> None:
    assert fsck(golden).errors == []
    store = Store.open(golden)
    (entry,) = read_bundle(store, parse_reference("linear")).artifacts
    assert read_built(store, entry).manifest["factory"] == "torch.nn:Linear"


def test_a_golden_artifact_computes_what_eager_does(golden: Path) -> None:
    store = Store.open(golden)
    (entry,) = read_bundle(store, parse_reference("linear")).artifacts
    built = read_built(store, entry).environment.torch
    if built.split(".")[:2] != torch.__version__.split(".")[:2]:
        pytest.skip(f"the golden artifact is for torch {built}")
    module, x = torch.nn.Linear(4, 3).eval(), torch.randn(2, 4)
    compiled = aotc.load(f"{golden}#linear", module, ignore=("source",))  # torch's own, of any patch release
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


# -- several versions beside one store ---------------------------------------------------------------------------------


def _newer(golden: Path, folder: Path) -> Path:
    """A store of a format that is yet to come: the golden one, with other numbers and a field more."""
    store = Store.open(shutil.copytree(golden, folder))
    (entry,) = store.entries()
    index = json.loads(store.blobs.read(entry.digest, 1 << 20))
    manifest = json.loads(store.blobs.read(index["manifests"][0]["digest"], 1 << 20))
    record = json.loads(store.blobs.read(manifest["config"]["digest"], 1 << 20))
    config = store.blobs.put_bytes(canonical_json({**record, "schema": 3, "to_come": 1}))
    manifest["artifactType"] = manifest["artifactType"].replace("v2", "v3")
    kind = manifest["config"]["mediaType"].replace("v2", "v3")
    manifest["config"] = {"mediaType": kind, "digest": config.digest, "size": config.size}
    blob = store.blobs.put_bytes(canonical_json(manifest))
    index["manifests"][0] |= {"digest": blob.digest, "size": blob.size}
    blob = store.blobs.put_bytes(canonical_json(index))
    own = json.loads((folder / "index.json").read_text())
    own["manifests"][0] |= {"digest": blob.digest, "size": blob.size}
    (folder / "index.json").write_bytes(canonical_json(own))
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """One store with a bundle of each format, tagged `linear:v1`, `linear:v2` and `linear:v3`."""
    stores = {f"v{number}": GOLDEN / f"v{number}" for number in range(1, SCHEMA_VERSION + 1)}
    stores[f"v{SCHEMA_VERSION + 1}"] = _newer(GOLDEN / f"v{SCHEMA_VERSION}", tmp_path / "newer")
    folder, entries = tmp_path / "shared", []
    for tag, store in stores.items():
        shutil.copytree(store, folder, dirs_exist_ok=True)
        (entry,) = json.loads((store / "index.json").read_text())["manifests"]
        entry["annotations"]["org.opencontainers.image.ref.name"] = f"linear:{tag}"
        entries.append(entry)
    whole = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": entries}
    (folder / "index.json").write_bytes(canonical_json(whole))
    yield folder


def test_beside_older_and_newer_bundles_one_loads_its_own_and_refuses_the_others_with_both_numbers(
    shared: Path,
) -> None:
    """An upgrade of the runtime, and its rollback: the tags of the other version are in the same store."""
    module = torch.nn.Linear(4, 3).eval()
    for tag, other in (("v1", ".v1"), (f"v{SCHEMA_VERSION + 1}", f".v{SCHEMA_VERSION + 1}")):
        with pytest.raises(aotc.SchemaVersionError) as caught:
            aotc.load(f"{shared}#linear:{tag}", module, ignore=("source",))
        assert caught.value.found.endswith(other) and caught.value.supported.endswith(f".v{SCHEMA_VERSION}")
        assert "build it again" in caught.value.hint
    entry = read_bundle(Store.open(shared), parse_reference("linear:v2")).artifacts[0]
    if read_built(Store.open(shared), entry).environment.torch.split(".")[:2] == torch.__version__.split(".")[:2]:
        compiled = aotc.load(f"{shared}#linear:v2", module, ignore=("source",))
        torch.testing.assert_close(compiled(torch.ones(2, 4)), module(torch.ones(2, 4)))


def test_gc_fsck_and_ls_leave_the_bundles_of_other_versions_alone_and_say_what_they_are(shared: Path) -> None:
    before = sorted(path.name for path in (shared / "blobs" / "sha256").iterdir())
    report = fsck(shared, repair=True)
    assert report.errors == [] and {one.path for one in report.findings if one.kind == "version"} == {
        "linear:v1",
        "linear:v3",
    }
    collect(Store.open(shared), Policy(grace=0.0))
    assert sorted(path.name for path in (shared / "blobs" / "sha256").iterdir()) == before
    ran = CliRunner().invoke(main, ["ls", "--store", str(shared)])
    assert ran.exit_code == 0, ran.output
    assert "linear:v2" in ran.stdout and ran.stderr.count("of another version: linear:v") == 2


def test_a_tag_moves_from_one_version_s_bundle_to_another_s_and_back(shared: Path) -> None:
    for tag in ("v1", "v2"):
        ran = CliRunner().invoke(main, ["tag", f"linear:{tag}", "linear:latest", "--store", str(shared)])
        assert ran.exit_code == 0, ran.output
    assert Store.open(shared).resolve(parse_reference("linear")) == Store.open(shared).resolve(
        parse_reference("linear:v2")
    )
