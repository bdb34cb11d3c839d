"""Where an artifact may start: with no toolchain at all, and only on a GPU that its code is for."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from gpu_runs import Gpu, run_python

from aotc import EnvironmentMismatchError
from aotc.machine.compatibility import mismatches
from aotc.machine.environment import this_environment
from aotc.machine.targets import cuda_target
from aotc.records import Artifact
from aotc.store.layout.publishing import publish
from aotc.store.layout.store import Store

pytestmark = pytest.mark.cuda

BARE = '''
import importlib.machinery, sys, torch

BANNED = ("triton", "sympy", "torch._dynamo", "torch._inductor")

class Ban:
    """Importing raises; looking up whether a module exists, as torch's CUDA initialisation does, is not an import."""

    def find_spec(self, name, path=None, target=None):
        if any(name == banned or name.startswith(banned + ".") for banned in BANNED):
            return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec):
        raise ModuleNotFoundError(f"{spec.name} is banned", name=spec.name)

    def exec_module(self, module):
        raise ModuleNotFoundError("banned")

before = [name for name in BANNED if name in sys.modules]
sys.meta_path.insert(0, Ban())

import aotc
from gpu_models import Mlp

with torch.no_grad():
    torch.manual_seed(0)
    module = Mlp().eval().cuda()
    x = torch.randn(3, 64, device="cuda")
    for launch in ("always", "never"):
        for capture in ("eager", "lazy"):
            compiled = aotc.load(sys.argv[1], module, graphs=aotc.Graphs(use=launch, capture=capture))
            assert torch.allclose(compiled(x), module(x), atol=1e-4), (launch, capture)
            for parameter in module.parameters():
                parameter.data = parameter.data * 2
            assert torch.allclose(compiled(x), module(x), rtol=1e-3, atol=1e-2), (launch, capture)
            for parameter in module.parameters():
                parameter.data = parameter.data / 2
print("compilers:", *(name for name in BANNED if name in sys.modules and name not in before))
print("done")
'''


def test_no_toolchain_is_needed_at_load(gpu: Gpu) -> None:
    """No triton, no Dynamo, no Inductor, no compiler, no CUDA toolkit, and a home that cannot be written."""
    printed = run_python(
        BARE,
        f"{gpu.store}#mlp",
        PATH="",
        CXX="/bin/false",
        CC="/bin/false",
        CUDA_HOME=None,
        CUDA_PATH=None,
        HOME="/proc",  # root may write anywhere else
        XDG_CACHE_HOME=None,
        AOTC_CACHE_DIR=None,
    )
    assert printed.split() == ["compilers:", "done"]


# -- the GPU must be the one that the code is for ---------------------------------------------------------------------


def for_capability(artifact: Artifact, capability: str, *, ptx: bool = False) -> Artifact:
    """The artifact as if it were built for a GPU of that capability."""
    major, minor = map(int, capability.split("."))
    needs = msgspec.structs.replace(artifact.environment, cuda_capability=capability, ptx=ptx)
    return msgspec.structs.replace(artifact, target=cuda_target((major, minor)), environment=needs)


def test_an_artifact_for_another_capability_is_refused_with_both_values(gpu: Gpu, tmp_path: Path) -> None:
    store = Store.open(Path(shutil.copytree(gpu.store, tmp_path / "store")))
    publish(store, "mlp", "old", [for_capability(gpu.artifact("mlp"), "7.0")], created="2026-01-02T03:04:05Z")
    capability = torch.cuda.get_device_capability()
    here = f"{capability[0]}.{capability[1]}"
    with pytest.raises(EnvironmentMismatchError) as caught:
        Gpu(store.path).load("mlp:old", gpu.module("mlp"))
    (issue,) = caught.value.issues
    assert (issue.expected, issue.actual) == ("7.0", here)
    assert "sm_70" in str(caught.value) and cuda_target(capability) in str(caught.value) and issue.hint


def test_the_record_names_the_gpu_that_built_it(gpu: Gpu) -> None:
    artifact, here = gpu.artifact("mlp"), this_environment("cuda")
    assert artifact.target == cuda_target(torch.cuda.get_device_capability())
    assert artifact.environment.cuda_capability == here.cuda_capability
    assert artifact.environment.gpu == torch.cuda.get_device_name()
    assert mismatches(artifact, here) == []


@pytest.mark.parametrize(
    ("built", "ptx", "runs"),
    [("7.0", False, False), ("7.0", True, True), ("99.0", False, False), ("99.0", True, False)],
)
def test_ptx_runs_on_newer_capabilities_only(gpu: Gpu, built: str, ptx: bool, runs: bool) -> None:
    found = mismatches(for_capability(gpu.artifact("mlp"), built, ptx=ptx), this_environment("cuda"))
    assert (found == []) is runs
    if not runs:
        assert [issue.expected for issue in found] == [built] and found[0].hint
