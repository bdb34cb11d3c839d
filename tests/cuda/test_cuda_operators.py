"""A Triton kernel of the user's own: compiled into the library, so that nothing of Triton is needed where it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_runs import Gpu, close, run_python

pytestmark = pytest.mark.cuda


def test_it_is_compiled_into_the_library_and_no_operator_is_needed(gpu: Gpu) -> None:
    (variant,) = gpu.artifact("own-kernel").variants
    assert variant.operators == ()
    compiled, module = gpu.loaded("own-kernel")
    x = torch.randn(33, 64, device="cuda")
    assert close(compiled(x), module(x))


def test_a_service_without_the_operator_imports_no_triton(gpu: Gpu) -> None:
    printed = run_python(
        """
import sys, torch, aotc
class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
module = Bare().cuda().eval()
compiled = aotc.load(sys.argv[1], module, ignore=["class", "source", "attributes"])
x = torch.randn(33, 64, device="cuda")
with torch.no_grad():
    y = module.linear(x)
    print(torch.allclose(compiled(x), (y * 0.5 + y * y).relu(), atol=1e-4))
print(*sorted({"torch._dynamo", "torch._inductor", "triton", "sympy"} & sys.modules.keys()))
""",
        f"{gpu.store}#own-kernel",
    )
    assert printed.split() == ["True"]


def test_a_bare_launch_fails_with_what_to_write(builds: Any) -> None:
    (unit,) = [unit for unit in builds.failing["units"] if unit["model"] == "unwrapped-kernel"]
    assert unit["status"] == "failed"
    assert "gpu_triton.py" in unit["source"]
    assert "torch.library.wrap_triton(kernel)[grid]" in unit["error"]
