"""A build says which units have the GPU's driver compile in the service."""

from __future__ import annotations

import re

import pytest
from conftest import Builds

from aotc.picks import Pick
from aotc.tools.inspection.artifact_picks import picks_of

pytestmark = pytest.mark.cuda


def noted(builds: Builds, model: str) -> list[int]:
    """For each unit of the model how many KB its notes say that the driver compiles; 0 where they are silent."""
    units = [unit for unit in builds.report["units"] if unit["model"] == model]
    said = [re.search(r"GPU's driver compiles (\d+) KB", " ".join(unit["notes"])) for unit in units]
    assert said
    return [int(found[1]) if found else 0 for found in said]


def test_an_operator_that_nvrtc_compiles_is_noted(builds: Builds) -> None:
    assert all(kilobytes > 16 for kilobytes in noted(builds, "airy"))


@pytest.mark.parametrize("model", ["mlp", "mlp-bf16", "linear-fp16", "attention-ranged", "own-kernel"])
def test_kernels_that_lie_compiled_are_not(builds: Builds, model: str) -> None:
    assert not any(noted(builds, model))


@pytest.mark.parametrize("model", ["attention", "depthwise"])
def test_cudnn_s_are_noted_where_they_won(builds: Builds, model: str) -> None:
    won = [any(map(compiled_by_the_driver, unit.picks)) for unit in picks_of(model, builds.store)]
    assert [kilobytes > 0 for kilobytes in noted(builds, model)] == won


def compiled_by_the_driver(pick: Pick) -> bool:
    depthwise = pick.subject == "convolution" and "groups=96" in pick.arguments
    return pick.winner.name == ("convolution" if depthwise else "cudnn")
