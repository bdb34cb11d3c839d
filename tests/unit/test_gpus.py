"""The GPUs that code can be built for without one: their properties, and what a build and a load make of them."""

from __future__ import annotations

import pytest

from aotc.machine.gpus import GPUS, attributes, gpu_for, known_targets
from aotc.machine.targets import parse_target

CAPABILITY, MULTIPROCESSORS, WARP, THREADS, SHARED = (75, 76), 16, 10, 39, 97  # of `CUdevice_attribute` in cuda.h


def test_the_table_has_the_targets_that_fleets_have_each_with_its_source() -> None:
    assert known_targets() == tuple(f"cuda:sm_{n}" for n in (80, 86, 89, 90, 100, 120))
    assert all(gpu.source for gpu in GPUS)
    assert len({(gpu.target, gpu.name) for gpu in GPUS}) == len(GPUS)


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_gpu_answers_with_its_own_capability_and_size(gpu: object) -> None:
    assert gpu in GPUS
    found = next(one for one in GPUS if one == gpu)
    said = attributes(found, parse_target(found.target))
    capability = tuple(map(int, parse_target(found.target).capability.split(".")))
    assert tuple(said[number] for number in CAPABILITY) == capability
    assert said[MULTIPROCESSORS] == found.multiprocessors and said[WARP] == 32
    assert 48 << 10 <= said[SHARED] <= 227 << 10


def test_limits_are_those_of_the_programming_guide() -> None:
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    expected = {
        "cuda:sm_80": (2048, 163),
        "cuda:sm_86": (1536, 99),
        "cuda:sm_90": (2048, 227),
        "cuda:sm_120": (1536, 99),
    }
    for target, (threads, kib) in expected.items():
        gpu = gpu_for(target)
        assert gpu is not None
        said = attributes(gpu, parse_target(target))
        assert (said[THREADS], said[SHARED]) == (threads, kib << 10)


def test_an_h100_answers_as_one_did() -> None:
    """What the driver (580.159) of an H100 SXM said of these attributes."""
    gpu = gpu_for("cuda:sm_90", "NVIDIA H100 80GB HBM3")
    assert gpu is not None
    seen = {1: 1024, 8: 49152, 12: 65536, 13: 1980000, 16: 132, 36: 2619000, 37: 5120, 38: 52428800, 39: 2048}
    said = attributes(gpu, parse_target("cuda:sm_90"))
    assert {number: said[number] for number in seen} == seen


def test_picks_name_the_gpu_and_the_first_of_a_target_stands_for_others() -> None:
    h200, other = gpu_for("cuda:sm_90", "NVIDIA H200"), gpu_for("cuda:sm_90", "of another name")
    assert h200 is not None and h200.name == "NVIDIA H200"
    assert other is not None and other.name == "NVIDIA H100 80GB HBM3"
    assert gpu_for("cuda:sm_75") is None
