"""Why a unit that the store does not have must be compiled: `aotc build --explain`."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import ZOO
from sample_artifacts import CREATED, stored_artifact

from aotc.compiler.messages import Unit
from aotc.compiler.planning.cache_lookup import look_up
from aotc.digest import sha256_bytes
from aotc.machine.targets import parse_target
from aotc.manifest import read_manifest
from aotc.store.layout.store import Store
from aotc.store.layout.units import StoredUnits, UnitRecord, put_unit


@pytest.fixture
def unit() -> Unit:
    spec = next(iter(read_manifest(ZOO / "manifest.yaml").models.values()))
    return Unit(spec, {"batch": 1}, parse_target("cpu:x86-64-v4"), {}, sha256_bytes(b"key"))


def reason(store: Store, unit: Unit) -> str:
    (issue,) = look_up(StoredUnits(store), unit, False, {}).reasons
    return issue.message


def test_a_unit_that_no_build_has_finished(store: Store, unit: Unit) -> None:
    assert reason(store, unit) == "not built before"


def test_a_unit_that_was_built_for_another_target(store: Store, unit: Unit, work: Path) -> None:
    artifact = stored_artifact(store, work, (1,), target="cpu:x86-64-v3", model=unit.spec.name)
    put_unit(store, UnitRecord(sha256_bytes(b"other"), {}, artifact, 1.0, CREATED))
    assert reason(store, unit) == "built for cpu:x86-64-v3 only"


def test_a_unit_that_failed(store: Store, unit: Unit) -> None:
    log = store.path / ".aotc" / "logs" / unit.log_name
    log.parent.mkdir(parents=True)
    log.write_text("error")
    assert reason(store, unit) == f"failed in the last build: see .aotc/logs/{log.name}"
