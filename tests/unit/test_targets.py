"""Targets: names, what they need, and which one a machine gets."""

from __future__ import annotations

import itertools

import pytest

from aotc.machine.targets import CPU_FEATURES, CPU_LEVELS, best_cpu_target, cuda_target, parse_target


@pytest.mark.parametrize("name", list(CPU_FEATURES))
def test_a_cpu_target_says_which_features_its_code_needs(name: str) -> None:
    target = parse_target(name)
    assert (target.name, target.device, target.cpu_features, target.capability) == (name, "cpu", CPU_FEATURES[name], "")


@pytest.mark.parametrize(
    ("name", "capability"),
    [("cuda:sm_80", "8.0"), ("cuda:sm_90", "9.0"), ("cuda:sm_100", "10.0"), ("cuda:sm_121", "12.1")],
)
def test_a_cuda_target_and_its_capability_say_the_same(name: str, capability: str) -> None:
    target = parse_target(name)
    assert (target.device, target.capability) == ("cuda", capability)
    major, minor = map(int, capability.split("."))
    assert cuda_target((major, minor)) == name


@pytest.mark.parametrize(("name", "machine"), [("cuda:sm_90@aarch64", "aarch64"), ("cuda:sm_100@x86_64", "x86_64")])
def test_a_cuda_target_may_name_the_architecture_of_its_host(name: str, machine: str) -> None:
    target, plain = parse_target(name), parse_target(name.partition("@")[0])
    assert (target.name, target.machine, plain.machine) == (name, machine, "")
    assert (target.device, target.capability) == (plain.device, plain.capability)


@pytest.mark.parametrize(
    "name",
    [
        *("", "native", "cpu", "cuda:", "cuda:sm_9", "cuda:sm_90a", "cuda:90", "cpu:x86-64-v2", "CPU:amx"),
        *("cuda:sm_90@", "cuda:sm_90@arm", "cuda@aarch64", "cpu:neon@aarch64"),
    ],
)
def test_other_names_are_refused(name: str) -> None:
    """Who asks lists the known ones: a manifest, in its hint."""
    with pytest.raises(ValueError, match=f"`{name}` is not a target"):
        parse_target(name)


@pytest.mark.parametrize("names", [("cpu:amx", "cpu:x86-64-v4", "cpu:x86-64-v3"), ("cpu:sve128", "cpu:neon")])
def test_of_each_architecture_targets_are_listed_most_capable_first_each_holding_the_next(names: list[str]) -> None:
    listed = [name for name in CPU_FEATURES if name in names]
    assert listed == list(names)
    features = [set(CPU_FEATURES[name]) for name in listed]
    assert all(more > less for more, less in itertools.pairwise(features))
    assert len({CPU_LEVELS[name].machine for name in names}) == 1


def test_code_for_sve_is_for_one_length_of_its_vectors() -> None:
    """Linux has no feature for the length: `aotc.machine.this_host` adds it."""
    for one, other in itertools.permutations(("sve128", "sve256")):
        here = {*CPU_FEATURES["cpu:sve128"], *CPU_FEATURES["cpu:sve256"]} - {other}
        assert best_cpu_target(here) == f"cpu:{one}"
    assert best_cpu_target(here - {one}) == "cpu:neon"


@pytest.mark.parametrize("name", list(CPU_FEATURES))
def test_a_machine_gets_the_most_capable_target_whose_features_it_has(name: str) -> None:
    assert best_cpu_target({*CPU_FEATURES[name], "sse2", "something_new"}) == name


def test_one_missing_feature_is_the_next_target_down_and_below_v3_is_none() -> None:
    amx = set(CPU_FEATURES["cpu:amx"])
    assert best_cpu_target(amx - {"amx_tile"}) == "cpu:x86-64-v4"
    assert best_cpu_target(amx - {"avx512vl"}) == "cpu:x86-64-v3"
    assert best_cpu_target(amx - {"avx2"}) is None
    assert best_cpu_target(frozenset()) is None
