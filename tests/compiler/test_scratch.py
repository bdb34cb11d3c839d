"""How much scratch memory a generated launcher allocates for a kernel's tensor maps."""

from __future__ import annotations

import pytest
from torch._inductor.codegen.common import TritonScratchWorkspace
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from aotc.compiler.patches import scratch_of_one_program
from aotc.errors import BuildError


def torch_2_11(self: object, idx: int, workspace: TritonScratchWorkspace, prefix: str | None = None) -> object:
    """What that version generates."""
    name = f"{prefix}_scratch_{idx}"
    if not workspace.size:
        return [f"CUdeviceptr {name} = 0;"], name
    return [f"int64_t {name}_size[] = {{{workspace.size}}};", f"int64_t {name}_stride[] = {{1}};"], name


def test_scratch_memory_is_allocated_for_each_program_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", torch_2_11)
    with scratch_of_one_program.apply():
        lines, name = CUDADeviceOpOverrides().cpp_scratch(
            7, TritonScratchWorkspace(384, lambda: "uint8"), prefix="global_scratch"
        )
    assert name == "global_scratch_scratch_7"
    assert f"int64_t {name}_size[] = {{static_cast<int64_t>(384) * grid_0 * grid_1 * grid_2}};" in lines
    assert f"int64_t {name}_stride[] = {{1}};" in lines
    assert CUDADeviceOpOverrides.cpp_scratch is torch_2_11


def test_another_torchs_scratch_memory_is_not_rewritten_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CUDADeviceOpOverrides, "cpp_scratch", lambda *args, **kwargs: (["int64_t size = 384;"], "name"))
    with (
        scratch_of_one_program.apply(),
        pytest.raises(
            BuildError, match=r"`scratch_of_one_program` of torch expects to rewrite .* in 1 places, and finds 0"
        ),
    ):
        CUDADeviceOpOverrides().cpp_scratch(0, TritonScratchWorkspace(384, lambda: "uint8"))


def test_a_kernel_without_scratch_memory_gets_none() -> None:
    with scratch_of_one_program.apply():
        lines, name = CUDADeviceOpOverrides().cpp_scratch(
            0, TritonScratchWorkspace(0, lambda: "uint8"), prefix="profile_scratch"
        )
    assert lines == [f"CUdeviceptr {name} = 0;"]
