"""Whether an artifact runs on a machine: each rule of `aotc.machine.compatibility` alone, and several at once."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest
import torch
from small_artifact import small_artifact

import aotc.machine.environment as environment
import aotc.machine.hwcap as hwcap
import aotc.machine.native_target as native
import aotc.machine.this_host as this_host
from aotc.errors import EnvironmentMismatchError, Issue
from aotc.machine.compatibility import mismatches
from aotc.machine.environment import this_environment
from aotc.machine.targets import CPU_FEATURES, best_cpu_target
from aotc.machine.this_host import refuse_free_threading
from aotc.records import Artifact, Environment

V3, V4, AMX = (CPU_FEATURES[f"cpu:{name}"] for name in ("x86-64-v3", "x86-64-v4", "amx"))
HERE = Environment(os="linux", machine="x86_64", torch="2.13.0+cpu", libc="2.36", cpu_features=V4)
GPU = msgspec.structs.replace(HERE, cuda_capability="9.0", cuda="12.8", gpu="NVIDIA H200")


def cpu_artifact(target: str = "cpu:x86-64-v3", weights: str = "live", **needs: Any) -> Artifact:
    fields = {"os": "linux", "machine": "x86_64", "torch": "2.13.0", "libc": "2.28", **needs}
    return small_artifact(
        target=target,
        weights=weights,
        environment=Environment(**{"cpu_features": CPU_FEATURES[target], **fields}),
    )


def gpu_artifact(capability: str = "9.0", **needs: Any) -> Artifact:
    fields = {"os": "linux", "machine": "x86_64", "torch": "2.13.0", "cuda": "12.6", **needs}
    return small_artifact(
        target=f"cuda:sm_{capability.replace('.', '')}",
        environment=Environment(cuda_capability=capability, **fields),
    )


def only(artifact: Artifact, here: Environment = HERE) -> Issue:
    (issue,) = mismatches(artifact, here)
    assert issue.hint
    return issue


def values(issue: Issue) -> tuple[str, str]:
    return issue.expected, issue.actual


def changed(**fields: Any) -> Environment:
    return msgspec.structs.replace(HERE, **fields)


def test_an_artifact_runs_where_all_that_it_needs_is_there() -> None:
    assert mismatches(cpu_artifact(), HERE) == []
    assert mismatches(cpu_artifact("cpu:x86-64-v4"), HERE) == []
    assert mismatches(gpu_artifact(), GPU) == []


def test_another_operating_system() -> None:
    assert values(only(cpu_artifact(), changed(os="darwin"))) == ("linux", "darwin")


def test_another_architecture() -> None:
    assert values(only(cpu_artifact(), changed(machine="aarch64"))) == ("x86_64", "aarch64")


def test_a_missing_cpu_feature_is_named_and_the_hint_is_the_target_to_add() -> None:
    issue = only(cpu_artifact("cpu:amx"))
    assert "amx_tile" in issue.message
    assert "avx2" not in issue.message
    assert values(issue) == (" ".join(AMX), "cpu:x86-64-v4")
    assert "cpu:x86-64-v4" in issue.hint


def test_of_code_for_another_architecture_both_differences_are_said() -> None:
    of_machine, of_cpu = mismatches(cpu_artifact("cpu:neon", machine="aarch64"), HERE)
    assert values(of_machine) == ("aarch64", "x86_64")
    assert values(of_cpu) == (" ".join(CPU_FEATURES["cpu:neon"]), "cpu:x86-64-v4")
    assert "asimd" in of_cpu.message


def test_a_cpu_of_aarch64_with_vectors_of_another_length_or_below_all_targets() -> None:
    graviton = changed(machine="aarch64", cpu_features=CPU_FEATURES["cpu:sve256"])
    assert mismatches(cpu_artifact("cpu:neon", machine="aarch64"), graviton) == []
    issue = only(cpu_artifact("cpu:sve128", machine="aarch64"), graviton)
    assert "sve128" in issue.message
    assert issue.actual == "cpu:sve256"
    assert "`cpu:sve256`" in issue.hint
    old = changed(machine="aarch64", cpu_features=("asimd", "crc32", "fp"))
    assert only(cpu_artifact("cpu:neon", machine="aarch64"), old).actual == "below neon"


def test_a_cpu_below_every_target() -> None:
    issue = only(cpu_artifact(), changed(cpu_features=("sse2", "avx")))
    assert "avx2" in issue.message
    assert issue.actual == "below x86-64-v3"
    assert "mount /proc" in only(cpu_artifact(), changed(cpu_features=())).hint


def test_live_weights_run_on_a_more_capable_cpu_and_frozen_ones_only_on_their_own_level() -> None:
    assert mismatches(cpu_artifact("cpu:x86-64-v3"), HERE) == []
    assert mismatches(cpu_artifact("cpu:x86-64-v4", "frozen"), HERE) == []
    issue = only(cpu_artifact("cpu:x86-64-v3", "frozen"))
    assert values(issue) == ("cpu:x86-64-v3", "cpu:x86-64-v4")
    assert "live" in issue.hint


@pytest.mark.parametrize(
    ("needed", "here", "runs"),
    [
        ("2.36", "2.36", True),
        ("2.9", "2.36", True),
        ("2.38", "2.36", False),
        ("2.36", "2.9", False),
        ("", "2.36", True),
        ("2.28", "", False),
        ("", "", True),
    ],
)
def test_glibc_must_be_at_least_the_version_whose_symbols_are_used(needed: str, here: str, runs: bool) -> None:
    found = mismatches(cpu_artifact(libc=needed), changed(libc=here))
    assert [values(issue) for issue in found] == ([] if runs else [(needed, here)])
    assert all(issue.hint for issue in found)


@pytest.mark.parametrize(
    ("needed", "here", "runs"),
    [
        (("CXXABI_1.3.9", "GLIBCXX_3.4.30"), ("CXXABI_1.3.13", "GLIBCXX_3.4.30"), True),
        (("GLIBCXX_3.4.9",), ("CXXABI_1.3.13", "GLIBCXX_3.4.30"), True),
        (("CXXABI_1.3.9", "GLIBCXX_3.4.32"), ("CXXABI_1.3.13", "GLIBCXX_3.4.30"), False),
        (("CXXABI_1.3.15", "GLIBCXX_3.4.30"), ("CXXABI_1.3.13", "GLIBCXX_3.4.30"), False),
        (("GLIBCXX_3.4.30",), (), False),
        ((), (), True),
    ],
)
def test_libstdcxx_must_have_the_newest_symbols_that_are_used(
    needed: tuple[str, ...], here: tuple[str, ...], runs: bool
) -> None:
    found = mismatches(cpu_artifact(libstdcxx=needed), changed(libstdcxx=here))
    assert [values(issue) for issue in found] == ([] if runs else [(" ".join(needed), " ".join(here))])
    assert all(issue.hint for issue in found)


@pytest.mark.parametrize(
    ("built", "here", "runs"),
    [
        ("2.13.0", "2.13.1", True),
        ("2.13.1", "2.13.0+cu128", True),
        ("2.13.0", "2.13.0a0+git1234", True),
        ("2.13.0", "2.15.0", False),
        ("2.13.0", "2.1.3", False),
        ("2.13.0", "3.13.0", False),
        ("2.2.0", "2.20.0", False),
    ],
)
def test_torch_must_be_of_the_same_major_and_minor_version(built: str, here: str, runs: bool) -> None:
    found = mismatches(cpu_artifact(torch=built), changed(torch=here))
    assert [values(issue) for issue in found] == ([] if runs else [(built, here)])
    assert all(issue.hint and built in issue.message and here in issue.message for issue in found)


def test_no_gpu_here() -> None:
    issue = only(gpu_artifact())
    assert issue.expected == "9.0"
    assert HERE.torch in issue.message


@pytest.mark.parametrize(
    ("built", "ptx", "runs"),
    [("9.0", False, True), ("8.0", False, False), ("8.0", True, True), ("10.0", True, False), ("10.0", False, False)],
)
def test_the_capability_must_be_equal_or_with_ptx_at_most_this_gpus(built: str, ptx: bool, runs: bool) -> None:
    found = mismatches(gpu_artifact(built, ptx=ptx), GPU)
    assert [values(issue) for issue in found] == ([] if runs else [(built, "9.0")])
    assert all("cuda:sm_90" in issue.hint and "NVIDIA H200" in issue.message for issue in found)


def test_ptx_of_capability_9_runs_on_12_which_is_higher_though_its_text_is_not() -> None:
    here = msgspec.structs.replace(GPU, cuda_capability="12.0")
    assert mismatches(gpu_artifact("9.0", ptx=True), here) == []


@pytest.mark.parametrize(
    ("built", "here", "runs"), [("12.6", "12.8", True), ("12.6", "13.0", False), ("12.6", "", False)]
)
def test_torchs_cuda_must_be_of_the_same_major_version(built: str, here: str, runs: bool) -> None:
    found = mismatches(gpu_artifact(cuda=built), msgspec.structs.replace(GPU, cuda=here))
    assert [values(issue) for issue in found] == ([] if runs else [(built, here)])
    assert all(issue.hint for issue in found)


def test_a_cpu_artifact_does_not_care_about_the_gpu() -> None:
    assert mismatches(cpu_artifact(), msgspec.structs.replace(GPU, cuda="11.0", cuda_capability="7.0")) == []


def test_all_mismatches_come_at_once_each_with_a_hint() -> None:
    here = Environment("darwin", "arm64", "2.15.0", libc="2.17", cpu_features=())
    issues = mismatches(cpu_artifact(), here)
    assert len(issues) == 5
    assert all(issue.hint and issue.expected for issue in issues)
    both = mismatches(gpu_artifact("8.0", cuda="11.8"), GPU)
    assert [values(issue) for issue in both] == [("8.0", "9.0"), ("11.8", "12.8")]


# -- this machine -----------------------------------------------------------------------------------------------------


def test_this_machine_runs_what_is_built_for_this_machine() -> None:
    here = this_environment()
    assert here.torch == torch.__version__
    assert here.cuda_capability == ""
    target = best_cpu_target(here.cpu_features)
    if target is not None:
        needs = msgspec.structs.replace(here, cpu_features=CPU_FEATURES[target])
        assert mismatches(small_artifact(target=target, environment=needs), here) == []


def test_native_is_the_most_capable_target_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "cpu_features", lambda: frozenset(V4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native.resolve_target("native") == "cpu:x86-64-v4"
    assert native.resolve_target("cpu:amx") == "cpu:amx"
    for machine, features, said in (
        ("x86_64", {"sse2"}, "below x86-64-v3"),
        ("aarch64", {"fp", "asimd"}, "below neon"),
        ("riscv64", set(), "a CPU of riscv64"),
    ):
        monkeypatch.setattr(native.platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(native, "cpu_features", lambda features=features: frozenset(features))
        with pytest.raises(EnvironmentMismatchError, match=said):
            native.resolve_target("native")


def test_of_a_masked_cpu_the_features_that_linux_lists_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """An emulator of another CPU leaves `/proc/cpuinfo` as it is; torch reads CPUID."""
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset(AMX))
    told = {"avx": True, "avx2": True, "fma3": True, "avx512_f": False, "cpu_name": "Haswell", "l2_cache_size": 0}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: told)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    assert best_cpu_target(environment.cpu_features.__wrapped__()) == "cpu:x86-64-v3"


def test_what_torch_reads_of_this_cpu_agrees_with_linux() -> None:
    told = torch.cpu.get_capabilities()
    assert {*environment._CPUID} <= {*told}
    assert environment.cpu_flags() & {*environment._CPUID.values()} == {
        name for torchs, name in environment._CPUID.items() if told[torchs]
    }


def test_features_of_aarch64_are_what_the_kernel_tells_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`AT_HWCAP` (16) and `AT_HWCAP2` (26); and the length of SVE's vectors, which has no bit. An emulator leaves
    `/proc/cpuinfo` as it is."""
    fp, asimd, crc32, atomics, asimdrdm, sve = (1 << bit for bit in (0, 1, 7, 8, 12, 22))
    told = {16: fp | asimd | crc32 | atomics | asimdrdm, 26: 0}
    monkeypatch.setattr(this_host.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(hwcap, "_auxiliary_value", told.__getitem__)
    monkeypatch.setattr(hwcap, "_sve_bits", lambda: 256)
    assert this_host.cpu_flags() == {*CPU_FEATURES["cpu:neon"]}
    told |= {16: told[16] | sve, 26: 1 << 1 | 1 << 13 | 1 << 14}
    assert this_host.cpu_flags() == {*CPU_FEATURES["cpu:neon"], "sve", "sve256", "sve2", "i8mm", "bf16"}


@pytest.mark.parametrize(("given", "target"), [(True, "cpu:amx"), (False, "cpu:x86-64-v4")])
def test_amx_is_a_feature_only_where_the_kernel_gives_its_tiles(
    monkeypatch: pytest.MonkeyPatch, given: bool, target: str
) -> None:
    monkeypatch.setattr(environment, "cpu_flags", lambda: frozenset(AMX))
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: given)
    assert best_cpu_target(environment.cpu_features.__wrapped__()) == target


def test_with_abi_another_minor_of_torch_runs_live_weights_on_a_cpu() -> None:
    for built in ("2.10.0", "2.12.1", "2.15.0"):
        artifact = cpu_artifact(torch=built)
        assert values(only(artifact)) == (built, HERE.torch)
        assert "compat='abi'" in only(artifact).hint
        assert mismatches(artifact, HERE, "abi") == []


@pytest.mark.parametrize(
    ("artifact", "here", "reason"),
    [
        (cpu_artifact(torch="2.9.1"), HERE, "for torch 2.10 and newer"),
        (cpu_artifact(torch="3.0.0"), HERE, "of one major version"),
        (cpu_artifact("cpu:x86-64-v4", "frozen", torch="2.12.0"), HERE, "oneDNN's packed ones"),
        (gpu_artifact(torch="2.12.0"), GPU, "CUDA's own libraries"),
    ],
)
def test_abi_is_refused_where_the_shim_promises_nothing(artifact: Artifact, here: Environment, reason: str) -> None:
    (issue,) = mismatches(artifact, here, "abi")
    assert values(issue) == (artifact.environment.torch, here.torch)
    assert reason in issue.hint
    assert "compat" not in only(artifact, here).hint


def test_abi_excuses_nothing_else() -> None:
    (issue,) = mismatches(cpu_artifact(torch="2.12.0", libc="2.99"), HERE, "abi")
    assert values(issue) == ("2.99", "2.36")


def test_a_python_without_its_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    refuse_free_threading()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False)
    with pytest.raises(EnvironmentMismatchError, match="free-threaded") as caught:
        refuse_free_threading()
    assert "PYTHON_GIL=1" in caught.value.hint


def test_the_target_of_a_gpu_where_there_is_none_is_refused_with_torchs_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentMismatchError) as caught:
        native.resolve_target("cuda")
    assert "to build without a GPU, name its architecture, like cuda:sm_90" in caught.value.hint
    assert torch.__version__ in caught.value.hint
