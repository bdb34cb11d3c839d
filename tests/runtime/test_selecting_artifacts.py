"""Of a bundle's artifacts, the most capable that this machine runs; else every reason at once."""

from __future__ import annotations

import logging

import pytest
import torch
from hand_built import CPU, make_artifact, tensor

import aotc.runtime.select as select_module
from aotc.errors import BindError, EnvironmentMismatchError
from aotc.machine.targets import CPU_FEATURES
from aotc.records import Artifact, Environment
from aotc.runtime.select import device_of
from aotc.runtime.select import select_artifact as select_from

HERE = Environment(
    os="linux",
    machine="x86_64",
    torch="2.13.0",
    libc="2.36",
    cpu_features=CPU_FEATURES["cpu:x86-64-v4"],
    cuda_capability="9.0",
    cuda="12.8",
    gpu="a GPU",
)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select_module, "this_environment", lambda device: HERE)


def cpu(name: str, **needs: str) -> Artifact:
    fields = {"os": "linux", "machine": "x86_64", "torch": "2.13.1", **needs}
    return make_artifact(
        [tensor("x", 1)], target=name, environment=Environment(cpu_features=CPU_FEATURES[name], **fields)
    )


def gpu(capability: str, ptx: bool = False) -> Artifact:
    needs = Environment("linux", "x86_64", "2.13.0", cuda_capability=capability, cuda="12.8", ptx=ptx)
    return make_artifact([tensor("x", 1)], target=f"cuda:sm_{capability.replace('.', '')}", environment=needs)


def select_artifact(artifacts: list[Artifact], device: torch.device) -> Artifact:
    return select_from(artifacts, device, lambda artifact: artifact)


def test_the_most_capable_cpu_target_that_runs_here_is_chosen_whatever_the_order() -> None:
    artifacts = [cpu(name) for name in CPU_FEATURES]
    for order in (artifacts, artifacts[::-1]):
        assert select_artifact(order, CPU).target == "cpu:x86-64-v4"


def test_a_less_capable_one_is_chosen_where_the_better_one_has_another_reason_not_to_run() -> None:
    assert select_artifact([cpu("cpu:x86-64-v4", torch="2.15.0"), cpu("cpu:x86-64-v3")], CPU).target == "cpu:x86-64-v3"


def test_the_log_says_what_was_taken_and_why_others_were_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="aotc"):
        select_artifact([cpu("cpu:x86-64-v4", torch="2.15.0"), cpu("cpu:x86-64-v3")], CPU)
    refused, taken = (record.getMessage() for record in caplog.records)
    assert "cpu:x86-64-v4 does not run here: built with torch 2.15.0, this process has torch 2.13.0" in refused
    assert taken == "handmade: of ['cpu:x86-64-v4', 'cpu:x86-64-v3'], cpu:x86-64-v3 is taken"


def test_the_device_decides_between_cpu_and_gpu() -> None:
    artifacts = [cpu("cpu:x86-64-v3"), gpu("9.0")]
    assert select_artifact(artifacts, CPU).target == "cpu:x86-64-v3"
    assert select_artifact(artifacts, torch.device("cuda", 0)).target == "cuda:sm_90"


def test_the_highest_gpu_capability_that_runs_is_chosen() -> None:
    artifacts = [gpu("8.0", ptx=True), gpu("8.6", ptx=True), gpu("10.0", ptx=True)]
    assert select_artifact(artifacts, torch.device("cuda", 0)).target == "cuda:sm_86"


def test_no_artifact_is_read_beyond_the_one_that_is_chosen() -> None:
    read: list[str] = []

    def reading(artifact: Artifact) -> Artifact:
        read.append(artifact.target)
        return artifact

    select_from([gpu("9.0"), cpu("cpu:x86-64-v3"), cpu("cpu:amx"), cpu("cpu:x86-64-v4")], CPU, reading)
    assert read == ["cpu:amx", "cpu:x86-64-v4"]


def test_every_mismatch_of_every_artifact_is_listed_with_its_target() -> None:
    artifacts = [cpu("cpu:amx", os="darwin"), cpu("cpu:x86-64-v3", torch="2.15.0", libc="2.40")]
    with pytest.raises(EnvironmentMismatchError) as caught:
        select_artifact(artifacts, CPU)
    wheres = [issue.where for issue in caught.value.issues]
    assert wheres.count("cpu:amx") == 2
    assert wheres.count("cpu:x86-64-v3") == 2
    assert all(issue.expected and issue.hint for issue in caught.value.issues)
    assert caught.value.here == HERE


def test_a_bundle_without_an_artifact_for_the_device_says_what_it_holds() -> None:
    with pytest.raises(EnvironmentMismatchError, match=r"cuda:sm_90.*cpu") as caught:
        select_artifact([gpu("9.0")], CPU)
    assert caught.value.hint
    with pytest.raises(EnvironmentMismatchError, match="nothing"):
        select_artifact([], CPU)


# -- the device -------------------------------------------------------------------------------------------------------


def test_the_modules_device_decides_then_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_of(torch.nn.Linear(1, 1), None, {"cuda:sm_90"}) == CPU
    assert device_of(torch.nn.Linear(1, 1), "cpu", {"cuda:sm_90"}) == CPU
    assert device_of(None, "cpu", {"cuda:sm_90"}) == CPU
    assert device_of(None, None, {"cpu:amx", "cuda:sm_90"}) == CPU
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of(None, "cuda:1", set()) == torch.device("cuda", 1)


def test_another_device_than_the_module_s_is_refused() -> None:
    with pytest.raises(BindError, match="device cuda was asked for, and the module's tensors are on cpu") as caught:
        device_of(torch.nn.Linear(1, 1), "cuda", {"cuda:sm_90"})
    assert "module.to('cuda')" in caught.value.hint


def test_a_gpu_that_torch_does_not_see_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(BindError, match="cuda:1 was asked for, and torch sees 1 GPUs"):
        device_of(None, "cuda:1", set())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BindError, match="cuda was asked for, and torch sees 0 GPUs"):
        device_of(None, "cuda", set())
    assert device_of(None, None, {"cuda:sm_90"}) == CPU  # and no artifact of the bundle fits the CPU: both are named


def test_cpu_0_is_the_cpu_as_tensors_name_it() -> None:
    assert device_of(None, "cpu:0", set()) == torch.ones(1).device


def test_a_module_on_several_devices_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(TypeError, match="cpu, meta"):
        device_of(module, None, set())
