"""Units of one build on a GPU: what one has measured and compiled, the next one takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu_runs import FOLDER, start_aotc

from aotc.tools.inspection.artifact_picks import picks_of

pytestmark = pytest.mark.cuda


def test_what_two_buckets_ask_alike_is_measured_once_and_they_repeat_from_their_picks(tmp_path: Path) -> None:
    store, output, manifest = tmp_path / "store", tmp_path / "build.json", FOLDER / "sharing.yaml"
    arguments = (manifest, "--store", store)
    assert start_aotc("build", *arguments, "--jobs", "1", "--json", output=output).wait() == 0, output.read_text()
    report = json.loads(output.read_text())
    first, second = sorted(report["units"], key=lambda unit: bool(unit["shared"]))
    assert not first["shared"]
    units = picks_of("twice", store)
    races = [[pick for pick in unit.picks if pick.kind in ("operator", "kernel") and pick.runner_up] for unit in units]
    measured = [[pick.identity for pick in unit if not pick.measured_in] for unit in races]
    assert not set(measured[0]) & set(measured[1])
    taken = next(unit for unit in units if any(pick.measured_in for pick in unit.picks))
    assert second["shared"]["picks"] == sum(bool(pick.measured_in) for pick in taken.picks)
    checked = tmp_path / "check.txt"
    status = start_aotc("build", *arguments, "--check", "--jobs", "2", output=checked).wait()
    assert checked.read_text().count("the same, byte for byte") == 2 and status == 0, checked.read_text()
