"""On this torch a patch is needed within its bounds, and beyond them torch is right without it.

The whole suite runs the reproducers of patches that end before the newest torch, which no other run would find to be
needed. `pytest -m every_torch`, which CI runs with the newest torch, runs them all, also those that need a library;
`python -m aotc.compiler.patches.machinery.check` runs them with their patches, too.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from processes import ROOT, environment

from aotc.compiler.patches.machinery.check import reproducible
from aotc.compiler.patches.machinery.patch import NEWEST_TESTED
from aotc.compiler.patches.machinery.registry import PATCHES

NAMES = reproducible()
NEWEST = ".".join(map(str, NEWEST_TESTED))
WITH_NEWEST = {
    patch.name
    for patch in PATCHES
    if patch.reproduce and ("library" in patch.reproduce.__code__.co_names or patch.is_for("cpu", NEWEST))
}
"""Those that run in `pytest -m every_torch` only."""


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    """Of those that this run asks for."""
    asked = [item.callspec.params["name"] for item in request.session.items if "verdicts" in _fixtures_of(item)]
    command = [sys.executable, "-m", "aotc.compiler.patches.machinery.check", "--without-only", *asked]
    # As aotc's own builds; what is compiled with line tables, the session's compiler does not keep.
    settings = environment(AOT_INDUCTOR_ENABLE_LINE_TABLES="0")
    ran = subprocess.run(command, cwd=ROOT, env=settings, stdout=subprocess.PIPE, text=True, check=True)
    (found,) = json.loads(ran.stdout).values()
    return dict(found)


def _fixtures_of(item: pytest.Item) -> list[str]:
    skipped = item.get_closest_marker("skip")
    return [] if skipped else getattr(item, "fixturenames", [])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.every_torch(alone=name in WITH_NEWEST)) for name in NAMES],
)
def test_a_patch_is_applied_where_torch_is_wrong_without_it(verdicts: dict[str, str], name: str) -> None:
    assert verdicts[name] in ("needed", "right")


def test_every_patch_of_a_bug_has_a_reproducer_but_those_of_gpus() -> None:
    lacking = {patch.name for patch in PATCHES if patch.kind == "bug" and patch.device != "cuda"} - {*NAMES}
    assert not lacking
